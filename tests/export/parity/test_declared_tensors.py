"""Tensors that a model declares fixed or positive: what noise they get, and what the evidence says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.errors import ParityError
from zoo_export.parity.compare import compare
from zoo_export.trace.make import make_graphs

Zoo = Callable[..., Result]
Build = Callable[..., None]
Edit = tuple[str, str]

CLASS = "class Sound(nn.Module):\n"
NORM = "        self.norm = nn.LayerNorm(c.hidden_size)\n\n    def forward(self, mels):"
FIRST = "x = F.gelu(self.first(mels.transpose(1, 2)))"


def tensor(declaration: str, made: str, used: str) -> tuple[Edit, ...]:
    """Return edits that add a tensor to the model, and declare it."""
    return (
        (CLASS, f"{CLASS}    {declaration}\n\n" if declaration else CLASS),
        (NORM, f"        {made}\n{NORM}"),
        (FIRST, f"{FIRST}\n        {used}"),
    )


SHUFFLE = 'self.register_buffer("order", torch.randperm(c.hidden_size) / c.hidden_size)'
SHUFFLED = "x = x[:, (self.order * x.shape[1]).round().long()]"
DECAY = "self.decay = nn.Parameter(torch.rand(c.hidden_size, 1) * 0.9 + 0.05)"
DECAYED = "x = x * torch.atanh(self.decay)"


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(tensor("", SHUFFLE, SHUFFLED), id="indices"),
        pytest.param(tensor("", DECAY, DECAYED), id="below 1", marks=pytest.mark.slow),
    ],
)
def test_without_a_declaration_noise_breaks_the_model(build_small: Build, zoo: Zoo, edits: tuple[Edit, ...]) -> None:
    build_small("sound-small", *edits)
    zoo("export", "model", "--onnx").failed(4)


@pytest.mark.slow
def test_fixed_tensor_keeps_its_values_and_is_reported(build_small: Build, zoo: Zoo) -> None:
    build_small("sound-small", *tensor('fixed_tensors = ("order",)', SHUFFLE, SHUFFLED))
    result = zoo("export", "model", "--onnx")
    assert (result.status, result.err) == (0, "")
    assert "tensors compared with their stored values only: order" in result.out
    assert json.loads(Path("model/parity.json").read_text())["not_perturbed"] == ["order"]
    assert "stored values only: order" in zoo("verify", "model").out
    assert zoo("verify", "model", "--json").json["not_perturbed"] == ["order"]


@pytest.mark.slow
def test_fixed_tensor_as_a_constant_is_refused(build_small: Build) -> None:
    """Noise on the weights would not show it."""
    build_small("sound-small", *tensor('fixed_tensors = ("order",)', SHUFFLE, SHUFFLED))
    stored = ModelDirectory.open("model")
    graphs = {}
    for name, data in make_graphs(stored).items():
        model = onnx.load_model_from_string(data)
        (found,) = (item for item in model.graph.initializer if item.name == "order")
        load_external_data_for_tensor(found, "model")
        found.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(found).copy(), "order"))
        graphs[name] = model.SerializeToString()
    with pytest.raises(ParityError, match="no graph reads order, which the model declares fixed"):
        compare(stored, graphs)


@pytest.mark.slow
def test_positive_tensor_stays_in_its_range(build_small: Build, zoo: Zoo) -> None:
    build_small("sound-small", *tensor('positive_tensors = {"decay": 1.0}', DECAY, DECAYED))
    result = zoo("export", "model", "--onnx")
    assert (result.status, result.err) == (0, "")
    assert json.loads(Path("model/parity.json").read_text())["not_perturbed"] == []


def test_trainable_tensor_cannot_be_fixed(build_small: Build, zoo: Zoo) -> None:
    build_small("sound-small", *tensor('fixed_tensors = ("decay",)', DECAY, DECAYED))
    zoo("export", "model", "--onnx").failed(5, "decay is declared fixed, but is trainable: Sound.fixed_tensors")
