"""Quantised stacks of matrices, as of experts, and weights that do not fit the formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from tests.conformance.plugin import RETURN, Edit, install_edited
from tests.precisions import compare_reduced, make_reduced
from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.variants.quantized.packing import read_dequantized
from zoo_export.verify import verify_model

EDITS: Sequence[Edit] = [
    (
        "model",
        "        self.head =",
        "        self.narrow = nn.Linear(c.hidden_size, 4)\n"
        "        self.wide = nn.Linear(4, c.hidden_size)\n"
        "        self.experts = nn.Parameter(torch.randn(4, c.hidden_size, 32) / 4)\n"
        "        self.back = nn.Parameter(torch.randn(4, 32, c.hidden_size) / 4)\n"
        "        self.ways = nn.Parameter(torch.randn(19, c.hidden_size, c.hidden_size) / 4)\n"
        "        self.scales = nn.Parameter(torch.ones(1, 1, c.hidden_size))\n"
        "        self.head =",
    ),
    (
        *RETURN,
        "        gate = self.narrow(x).softmax(-1)\n"
        "        x = x + self.wide(gate) * self.scales\n"
        "        inner = torch.einsum('bte,xef->xbtf', x, self.experts).relu()\n"
        "        parts = torch.einsum('xbtf,xfe->xbte', inner, self.back)\n"
        "        x = x + torch.einsum('btx,xbte->bte', gate, parts)\n"
        "        own = self.ways.index_select(0, input_ids.flatten()).unflatten(0, (rows, length))\n"
        "        x = x + (own @ x.unsqueeze(-1)).squeeze(-1)\n"
        "        return self.head(x)\n",
    ),
]
KEPT = {
    "scales": "read by Mul",
    "wide.weight": "row length 4 is not a multiple of 16",
}


@pytest.fixture
def routed(install: Callable[..., Path], tmp_path: Path) -> Path:
    """A decoder with two stacks of experts, a matrix for each token, and layers of width 4."""
    name = install_edited(install, "zoo-routed", EDITS)
    spec = registry().resolve(f"{name}-tiny")
    return persist.save_spec(spec, create.build(spec, seed=0, dtype="float32"), tmp_path / "routed")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_stacks_are_quantised_and_others_named(routed: Path, precision: str, zoo: Callable[..., Any]) -> None:
    """The graph is verified with the dequantised weights, and the output names those in float32."""
    done = zoo("quantize", routed, "--dtype", precision, "--max-kl", "5")
    assert done.status == 0, done.err
    for name, reason in KEPT.items():
        assert f"float32 is kept for {name}: {reason}" in done.out
    evidence = json.loads((routed / f"parity.{precision}.json").read_text())
    assert evidence["certificate"]["kept_float32"] == KEPT
    assert verify_model(routed, variant=precision).passed
    nodes = onnx.load(routed / f"model.{precision}.onnx", load_external_data=False).graph.node
    assert sum(node.op_type == "DequantizeLinear" for node in nodes) == 2
    lookups = [node for node in nodes if node.op_type == "GatherBlockQuantized"]
    assert "ways.table" in {name for node in lookups for name in node.input}
    packed = routed / f"model.{precision}.safetensors"
    sizes, stored, found = load_file(packed), load_file(routed / "model.safetensors"), dict(read_dequantized(packed))
    for name in ("experts", "back", "ways"):
        step = np.ptp(stored[name]) / 255
        np.testing.assert_allclose(found[name].reshape(stored[name].shape), stored[name], rtol=0, atol=step)
    assert all(sizes[name].nbytes == stored[name].size for name in ("experts", "back", "ways"))


@pytest.mark.slow
def test_biases_of_experts_stay_float32(exported_build: Callable[..., Path], tmp_path: Path) -> None:
    """They are looked up like their matrices, which are quantised."""
    stored = ModelDirectory.open(exported_build("mixtral-tiny", "mlp_bias=true", "num_layers=1", tokenizer=False))
    weights = make_reduced(stored, "int4", tmp_path).graphs["model"].graph.initializers
    for part in ("gate", "up", "down"):
        assert f"blocks.0.mlp.experts.{part}_bias" in weights
        assert f"blocks.0.mlp.experts.{part}" not in weights


@pytest.mark.slow
def test_wrong_stack_is_detected(routed: Path, tmp_path: Path) -> None:
    """The zero points of the first stack are shifted by a block."""
    stored = ModelDirectory.open(routed)
    variant = make_reduced(stored, "int8", tmp_path)
    value = variant.graphs["model"].graph.initializers["experts.zero_points.table"]
    right = value.const_value
    assert isinstance(right, ir.ExternalTensor)
    assert right.offset is not None
    value.const_value = ir.ExternalTensor(
        right.location, right.offset + 1, right.length, right.dtype,
        shape=right.shape, name=value.name or "", base_dir=right.base_dir,
    )  # fmt: skip
    assert any("logits" in failure for failure in compare_reduced(stored, variant).failures)


@pytest.mark.slow
def test_model_that_does_not_fit_at_all_is_refused(exported_build: Callable[..., Path], tmp_path: Path) -> None:
    settings = ("hidden_size=12", "num_heads=2", "intermediate_size=20")
    stored = ModelDirectory.open(exported_build("gpt-tiny", *settings))
    with pytest.raises(
        UsageError, match=r"no weights to quantise \(.*: row length 12 is not a multiple of 16.*float16"
    ):
        make_reduced(stored, "int4", tmp_path)
