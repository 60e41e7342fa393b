"""Mixtures of experts in ONNX: one loop, over the experts that tokens have chosen."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from zoo.config import Activation
from zoo.nn import MixtureOfExperts
from zoo_export.trace.experts import EXPERT_TRANSLATIONS, ExpertMixtures
from zoo_export.trace.translation import TRANSLATIONS

HIDDEN, INNER, EXPERTS = 12, 10, 6


def mixture(dtype: torch.dtype = torch.float32, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(HIDDEN, INNER, num_experts=EXPERTS, **{"top_k": 2, **options})
    return made.to(dtype).eval().requires_grad_(False)


def traced(module: MixtureOfExperts, dtype: torch.dtype = torch.float32) -> onnx.ModelProto:
    free = torch.export.Dim.DYNAMIC
    x = torch.randn(3, 5, HIDDEN, dtype=dtype)
    with ExpertMixtures():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: free, 1: free},), strict=False)
    made = torch.onnx.export(
        program,
        dynamo=True,
        optimize=False,
        verbose=False,
        opset_version=23,
        custom_translation_table={**TRANSLATIONS, **EXPERT_TRANSLATIONS},
    )
    assert made is not None
    return made.model_proto


def run(model: onnx.ModelProto, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(found)


def test_graph_equals_the_module() -> None:
    module = mixture(shared_intermediate_size=4)
    model = traced(module)
    for shape in ((1, 1), (2, 1), (4, 9)):
        x = torch.randn(*shape, HIDDEN)
        assert_close(run(model, x), module(x))


def test_biases_and_limits_are_translated() -> None:
    module = mixture(bias=True, limit=0.5, activation="gelu_sigmoid")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    model = traced(module)
    for shape in ((1, 1), (4, 9)):
        x = torch.randn(*shape, HIDDEN)
        assert_close(run(model, x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", get_args(Activation))
def test_every_activation_is_translated(activation: Activation) -> None:
    module = mixture(activation=activation)
    x = torch.randn(2, 7, HIDDEN)
    assert_close(run(traced(module), x), module(x))


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, EXPERTS])
def test_one_and_all_experts(top_k: int) -> None:
    module = mixture(top_k=top_k)
    x = torch.randn(2, 7, HIDDEN)
    assert_close(run(traced(module), x), module(x))


@pytest.mark.slow
def test_float16_is_computed() -> None:
    """ONNX Runtime adds scattered values in float32 only."""
    module = mixture(torch.float16)
    x = torch.randn(2, 7, HIDDEN, dtype=torch.float16)
    assert_close(run(traced(module, torch.float16), x), module(x), rtol=0.01, atol=0.01)


@pytest.mark.slow
def test_all_tokens_may_choose_the_same_experts() -> None:
    module = mixture()
    x = torch.randn(1, 1, HIDDEN).expand(3, 8, -1).contiguous()
    assert_close(run(traced(module), x), module(x))


@pytest.mark.slow
def test_experts_that_no_token_chooses_are_not_computed() -> None:
    """The weights of the others are NaN, which multiplied by 0 would remain."""
    module = mixture()
    x = torch.randn(1, 1, HIDDEN)
    wanted = module(x)
    _, chosen = module.router(x.flatten(0, 1))
    others = [number for number in range(EXPERTS) if number not in chosen]
    assert len(others) == EXPERTS - 2
    for stack in module.experts.parameters():
        stack[others] = torch.nan
    model = traced(module)
    assert_close(run(model, x), wanted)
    assert not np.isfinite(run(model, torch.randn(4, 9, HIDDEN)).numpy()).all()


def test_the_graph_has_one_loop_of_standard_operators() -> None:
    model = traced(mixture())
    assert [node.op_type for node in model.graph.node].count("Loop") == 1
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    assert {node.domain for node in (*model.graph.node, *loop.attribute[0].g.node)} == {""}
