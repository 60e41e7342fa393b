"""Graphs of every supported opset match their model, and use the operators of their opset alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from tests.conftest import Result
from zoo.errors import PluginError
from zoo.registry import registry
from zoo_export import export_model
from zoo_export.graph.opset import lower
from zoo_export.trace.make import Options

Exported = Callable[..., Path]
Zoo = Callable[..., Result]
TINY = sorted(name for name in registry().names("*-tiny") if registry().resolve(name).source is None)

CASES = [
    ("bert-tiny", 18),
    *((name, opset) for name in TINY for opset in (18, 24) if (name, opset) != ("bert-tiny", 18)),
    *((name, opset) for name in ("bert-tiny", "gpt-tiny", "t5-tiny", "vit-tiny") for opset in (20, 21, 23)),
]
"""Every preset with the lowest and the highest opset, and some with those between, which add a few operators each."""


def operators(graph: onnx.GraphProto) -> set[str]:
    found = set()
    for node in graph.node:
        found.add(node.op_type)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                found |= operators(inner)
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "opset"), CASES)
def test_preset_is_verified(exported_build: Exported, name: str, opset: int) -> None:
    folder = exported_build(name, noise=True)
    assert export_model(folder, options=Options(opset=opset)).passed
    for file in folder.glob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        assert {item.version for item in model.opset_import if not item.domain} == {opset}
        for operator in operators(model.graph) if opset < 23 else ():
            assert onnx.defs.has(operator, opset, ""), operator


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("opset", [18, 22])
def test_attention_equals_torch(opset: int, kind: str, masked: bool) -> None:
    """Also for a row without keys, whose result is 0, and for fewer heads of keys than of queries."""
    text = (
        '<ir_version: 10, opset_import: ["": 23]> graph (float[B, 4, L, 8] q, float[B, 2, S, 8] k, '
        f"float[B, 2, S, 8] v, {kind}[B, 1, L, S] mask) => (float[B, 4, L, 8] y) {{ y = Attention(q, k, v, mask) }}"
    )
    model = ir.to_proto(lower(ir.from_proto(onnx.parser.parse_model(text)), opset))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, heads, size, 8), np.float32) for heads, size in ((4, 5), (2, 7), (2, 7)))
    mask = rng.random((3, 1, 5, 7)) < 0.6
    mask[1] &= not masked
    if kind == "float":
        mask = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32)
    (found,) = ReferenceEvaluator(model).run(None, {"q": q, "k": k, "v": v, "mask": mask})
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v, mask)), enable_gqa=True
    ).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert (np.abs(found[1]).max() == 0) == masked


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("float", "y = TensorScatter(x, x)", "opset 18 has no TensorScatter"),
        ("float16", 'y = Cast<to = 10, round_mode = "up">(x)', "round_mode"),
    ],
)
def test_graph_that_an_opset_cannot_express_is_refused(kind: str, body: str, reason: str) -> None:
    text = f'<ir_version: 10, opset_import: ["": 24]> graph (float[2, 2] x) => ({kind}[2, 2] y) {{ {body} }}'
    with pytest.raises(PluginError, match=reason):
        lower(ir.from_proto(onnx.parser.parse_model(text)), 18)


@pytest.mark.slow
def test_variants_of_an_older_opset(exported_build: Exported, zoo: Zoo) -> None:
    """Attention weights and the decoding loop are verified, too; a module that diverges can be named."""
    folder = exported_build("llama-tiny", noise=True)
    for options in (("--attentions",), ("--generate",)):
        result = zoo("export", folder, "--onnx", "--opset", 18, *options)
        assert (result.status, result.err) == (0, "")
    for file in folder.glob("*.onnx"):
        assert {item.version for item in onnx.load(file, load_external_data=False).opset_import} == {18}
    modules: Any = zoo("diff", folder, "--json").json
    assert {"blocks.0", "norm"} <= {item["path"] for item in modules["graphs"]["model"]}
    assert zoo("verify", folder, "--retrace").status == 0
