"""Attention sinks in ONNX: ``Attention`` over the keys of tokens, and a factor."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.exported import Builder
from zoo.nn import scaled_dot_product_attention
from zoo_export.export import export_model
from zoo_export.trace.make import Options
from zoo_export.trace.sinks import AttentionSinks
from zoo_export.trace.translation import TRANSLATIONS, prepare

HEADS, SHARED, SIZE = 4, 2, 8


class Attention(nn.Module):
    """Attention to given keys and values."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.tensor([-2.0, 0.0, 1.0, 3.0]), requires_grad=False)
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, mask=mask, sink=self.sink, scale=self.scale)


def tensors(rows: int, queries: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    query = torch.randn(rows, HEADS, queries, SIZE, dtype=dtype)
    return query, *(torch.randn(rows, SHARED, keys, SIZE, dtype=dtype) for _ in range(2))


def hidden(rows: int, queries: int, keys: int) -> Tensor:
    """A mask in which some queries see few keys or none."""
    torch.manual_seed(1)
    mask = torch.rand(rows, 1, queries, keys) > 0.5
    mask[0, 0, 0] = False
    return mask


def traced(module: nn.Module, arguments: tuple[Tensor, ...], *, row: bool = False) -> onnx.ModelProto:
    free = torch.export.Dim.DYNAMIC
    dims: list[dict[int, Any]] = [{0: free, 2: free}] * 3
    if len(arguments) == 4:
        dims.append({0: free, 3: free} if row else {0: free, 2: free, 3: free})
    with AttentionSinks():
        program = torch.export.export(module.eval(), arguments, dynamic_shapes=tuple(dims), strict=False)
    prepare(program)
    made = torch.onnx.export(
        program,
        dynamo=True,
        optimize=False,
        verbose=False,
        opset_version=23,
        custom_translation_table=TRANSLATIONS,
    )
    assert made is not None
    return made.model_proto


def run(model: onnx.ModelProto, arguments: tuple[Tensor, ...]) -> Tensor:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {item.name: value.numpy() for item, value in zip(session.get_inputs(), arguments, strict=True)}
    return torch.from_numpy(session.run(None, feeds)[0])


@pytest.mark.parametrize("scale", [None, 0.4])
def test_graph_equals_the_module(scale: float | None) -> None:
    module = Attention(scale)
    model = traced(module, (*tensors(3, 5, 9), hidden(3, 5, 9)))
    for sizes in ((1, 1, 1), (2, 1, 12), (4, 7, 7)):
        arguments = (*tensors(*sizes), hidden(*sizes))
        assert_close(run(model, arguments), module(*arguments))
        assert not run(model, arguments)[0, :, 0].any()


def test_without_a_mask_and_with_one_row() -> None:
    module = Attention(None)
    plain, arguments = tensors(3, 5, 9), (*tensors(3, 5, 9), hidden(3, 1, 9))
    assert_close(run(traced(module, plain), plain), module(*plain))
    assert_close(run(traced(module, arguments, row=True), arguments), module(*arguments))


def test_real_masks_and_extreme_scores() -> None:
    module = Attention(None)
    arguments = (*tensors(3, 5, 9), torch.zeros(()).masked_fill(~hidden(3, 5, 9), -torch.inf))
    for score in (-1e4, 1e4):
        module.sink.fill_(score)
        found = run(traced(module, arguments), arguments)
        assert found.isfinite().all()
        assert_close(found, module(*arguments))


def test_attention_reads_keys_and_values_as_they_are() -> None:
    """A joined key and value would be copies of those in a cache."""
    model = traced(Attention(None), (*tensors(3, 5, 9), hidden(3, 5, 9)))
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert list(node.input)[1:3] == [item.name for item in model.graph.input][1:3]
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.slow
def test_caches_are_written_in_place(exported_build: Builder) -> None:
    folder = exported_build("gpt-oss-tiny", noise=True, gain=2.0)
    assert export_model(folder, options=Options(profile="cpu")).passed
    model = onnx.load(str(folder / "model.cpu.onnx"), load_external_data=False)
    assert not {"zoo.cache", "zoo.logits"} & {item.key for item in model.metadata_props}
    assert [node.op_type for node in model.graph.node].count("TensorScatter") == 4
