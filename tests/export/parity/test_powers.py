"""Comparison at powers of 2 and 10, where a graph computes floating-point numbers from integer inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo.contract import Graph, TensorSpec, token_ids
from zoo.probe.grid import at_powers
from zoo.probe.inputs import make_feeds

Build = Callable[..., None]
Zoo = Callable[..., Result]

IDS = token_ids("ids", 30000)
AGE = TensorSpec(name="age", dims=("batch",), dtype="int64", upper=1_000_000)
EMBED = "x = self.embedding(input_ids)\n        for block in self.blocks:\n            x = block(x, mask, bias=bias)"


@pytest.mark.parametrize("tensors", [(IDS,), (AGE,), (IDS, AGE)], ids=["ids", "age", "both"])
def test_all_powers_and_their_neighbours_are_among_the_inputs(tensors: tuple[TensorSpec, ...]) -> None:
    graph = Graph(inputs=tensors, outputs=())
    (point,) = at_powers((graph,), {"ids", "age"}, 128)
    assert "inputs with powers of 2 and 10" in str(point)
    assert point.to_dict()["values"] == "powers"
    feeds = make_feeds((graph,), point, 0, 128)
    for tensor in tensors:
        found, upper = {*feeds[tensor.name].ravel().tolist()}, tensor.upper or 0
        near = {power + change for power in (1, 2, 8192, 16384, 10, 100, 1000, 10000) for change in (-1, 0, 1)}
        assert near <= found
        assert (999_999 in found) == (upper == 1_000_000)
        assert max(found) < upper
    assert not at_powers((graph,), set(), 128)


def bucket(function: str) -> tuple[str, str]:
    """Return the edit that has the model embed a function of the ids."""
    return EMBED, EMBED.replace("self.embedding(input_ids)", function)


@pytest.mark.slow
def test_logarithms_of_integers_are_rounded_as_by_the_model(build_small: Build, zoo: Zoo) -> None:
    """A graph divides two natural logarithms, which is below 15 for 32768."""
    vocabulary = ("vocab_size: int = 30000", "vocab_size: int = 40000")
    edit = bucket("self.embedding(torch.log2(input_ids.clamp(min=1).float()).floor().long())")
    build_small("encoder-small", vocabulary, edit)
    zoo("export", "model", "--onnx").failed(4, "not equal to the model", "inputs with powers of 2 and 10")


@pytest.mark.slow
def test_numbers_computed_from_integers_are_verified(build_small: Build, zoo: Zoo) -> None:
    build_small("encoder-small", bucket("self.embedding(input_ids) + torch.log1p(input_ids.float()).unsqueeze(-1)"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    points = json.loads(Path("model/parity.json").read_text())["grid"]["points"]
    assert [point.get("values") for point in points].count("powers") == 1


@pytest.mark.slow
def test_ids_that_are_looked_up_have_no_powers(build_small: Build, zoo: Zoo) -> None:
    build_small("encoder-small")
    assert zoo("export", "model", "--onnx").status == 0
    points = json.loads(Path("model/parity.json").read_text())["grid"]["points"]
    assert not any("values" in point for point in points)
