"""Comparison with floating-point inputs of several magnitudes, and at many lengths where sizes are rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Result
from tests.export.parity.test_attacks import edited
from zoo.contract import Graph, floats, mask, token_ids
from zoo.probe.grid import MAGNITUDES, at_magnitudes
from zoo.probe.inputs import Point, make_feeds
from zoo.registry import registry
from zoo_export.coverage.points import many_lengths

LEVELS = {"off", "all", "perturbed"}
FEATURES = Graph(
    inputs=(floats("features", "batch", "sequence", 80), mask("attention_mask")),
    outputs=(floats("hidden", "batch", "sequence", 8),),
)
POINT = Point(2, 50, 0, "right")


def test_numbers_have_the_mean_and_deviation_of_their_point() -> None:
    standard = make_feeds((FEATURES,), POINT, 0, 64)
    for point in at_magnitudes((FEATURES,), POINT):
        feeds = make_feeds((FEATURES,), point, 0, 64)
        assert np.mean(feeds["features"]) == pytest.approx(point.mean, abs=0.05 * point.deviation)
        assert np.std(feeds["features"]) == pytest.approx(point.deviation, rel=0.05)
        np.testing.assert_array_equal(feeds["attention_mask"], standard["attention_mask"])
        assert f"mean {point.mean:g} and deviation {point.deviation:g}" in str(point)
        assert point.to_dict() == {**POINT.to_dict(), "mean": point.mean, "deviation": point.deviation}


def test_only_given_numbers_have_magnitudes() -> None:
    """The memory that a decoder reads is the output of its encoder, and its cache is a past."""
    reader = Graph(name="decoder", inputs=(token_ids("ids", 10), floats("hidden", "batch", "sequence", 8)), outputs=())
    assert [(point.mean, point.deviation) for point in at_magnitudes((FEATURES, reader), POINT)] == [*MAGNITUDES]
    for name in ("gpt-tiny", "t5-tiny", "seq2seq-tiny"):
        assert not at_magnitudes(registry().resolve(name).config.graphs(), POINT)


@pytest.mark.slow
def test_evidence_of_magnitudes(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    """Statistics of inputs lose digits in PyTorch, too, and pass with the tolerance that this gives."""
    build_small("sound-small", edited("F.layer_norm(mels, (8,)) + torch.var_mean(mels, -1, keepdim=True)[0]"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    assert "inputs compared: mean 0, deviation 1; mean 0, deviation 100; mean 100, deviation 1;" in exported.out
    found = json.loads(Path("model/parity.json").read_text())["grid"]["magnitudes"]
    assert [(item["mean"], item["deviation"]) for item in found] == [*MAGNITUDES]
    for item in found:
        assert item["left_out"] == {}
        assert set(item["error_of_limit"]) == LEVELS
        assert all(0 < part <= 1 for part in item["error_of_limit"].values())


@pytest.mark.slow
def test_magnitudes_at_which_the_model_overflows(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    build_small("sound-small", edited("mels.exp()"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    assert "left out, because PyTorch itself is inaccurate: mean 0, deviation 100;" in exported.out
    found = json.loads(Path("model/parity.json").read_text())["grid"]["magnitudes"]
    overflow, _, vanishing = found
    assert set(overflow["left_out"]) == LEVELS == set(vanishing["error_of_limit"])
    assert "last_hidden_state of model is not finite at" in overflow["left_out"]["all"]
    assert overflow["error_of_limit"] == vanishing["left_out"] == {}


@pytest.mark.slow
def test_magnitudes_at_which_the_model_fails(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    build_small("sound-small", edited("mels + torch.linspace(0, 1, 50, dtype=mels.dtype)[mels.long()]"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    assert "inputs compared: mean 0, deviation 1; left out, because PyTorch itself" in exported.out
    found = json.loads(Path("model/parity.json").read_text())["grid"]["magnitudes"]
    assert all("PyTorch fails (index " in reason for item in found for reason in item["left_out"].values())


@pytest.mark.slow
def test_lengths_of_graphs_that_round_sizes(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    build_small("sound-small", edited("mels[:, (torch.arange(mels.shape[1]) * 0.3).long()]"))
    assert zoo("export", "model", "--onnx").status == 0
    points = json.loads(Path("model/parity.json").read_text())["grid"]["points"]
    assert {point["length"] for point in points if point["batch"] == 1} == {*range(1, 65)}


def test_many_lengths() -> None:
    graphs = registry().resolve("gpt-tiny").config.graphs()
    points = many_lengths(graphs, 1000, 1)
    lengths = {point.length for point in points if not point.past}
    assert lengths > {*range(1, 65), 1000}
    assert len(lengths) == 64 + 32
    assert {point.past + 1 for point in points if point.past} == lengths - {1}
    few = many_lengths(graphs, 1000, 10**9)
    assert few == points[: len(few)]
    assert 100 < sum(point.tokens for point in few) <= 160
