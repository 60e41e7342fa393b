"""Positions at which large outputs are compared."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.contract import Graph
from zoo.probe import positions
from zoo.probe.inputs import Padding, Point, make_feeds
from zoo.probe.positions import KEPT, kept_positions, valid_positions
from zoo.registry import registry

LENGTH = 1021


def graph_of(name: str) -> Graph:
    """Return the graph of a small model with a large vocabulary."""
    return registry().resolve(name, ["vocab_size=60000", "max_seq_len=1024"]).graphs[0]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("batch", [1, 2])
def test_positions_of_large_logits(padding: Padding, batch: int) -> None:
    """All ends are among them, and most are valid."""
    graph, point = graph_of("gpt-tiny"), Point(batch, LENGTH, 3, padding)
    feeds = make_feeds((graph,), point, 0, 1024)
    logits = graph.output_tensors()[0]
    kept = kept_positions(graph, logits, feeds, point)
    assert kept is not None
    assert (kept.axis, kept.whole, kept.shape) == (1, (batch, LENGTH, 60000), (batch, KEPT, 60000))
    chosen = set(kept.places.tolist())
    assert kept.places.tolist() == sorted(chosen)
    assert {0, 1, LENGTH // 2, 63, 64, 65, 511, 512, 513, LENGTH - 2, LENGTH - 1} <= chosen
    valid = np.broadcast_to(valid_positions(graph, logits, feeds, point)[..., 0], (batch, LENGTH))
    ends = np.flatnonzero(np.diff(valid.any(0)))
    assert {*ends.tolist(), *(ends + 1).tolist()} <= chosen
    assert valid.any(0)[kept.places].sum() > 0.75 * KEPT
    again = kept_positions(graph, logits, feeds, point)
    assert again is not None
    assert np.array_equal(again.places, kept.places)


def test_other_outputs_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, caches, and attention weights, which have two lengths."""
    graph, small = graph_of("gpt-tiny"), Point(1, 200, 0, "none")
    feeds = make_feeds((graph,), small, 0, 1024)
    assert all(kept_positions(graph, tensor, feeds, small) is None for tensor in graph.output_tensors())
    monkeypatch.setattr(positions, "_LARGE", 100)
    large = [tensor for tensor in graph.output_tensors() if kept_positions(graph, tensor, feeds, small)]
    assert [tensor.name for tensor in large] == ["logits"]
    spec = registry().resolve("bert-tiny")
    (weights,) = (graph.with_attentions() for graph in spec.graphs)
    point = Point(2, 64, 0, "none")
    assert all(
        kept_positions(weights, tensor, make_feeds((weights,), point, 0, 64), point) is None
        for tensor in weights.recorded()
    )
