"""Comparisons at long inputs of large models, on small ones that count as large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zoo.artifact import Export, ModelDirectory
from zoo.contract import Graph
from zoo.probe import grid, positions, widened
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Arrays, Executor
from zoo.probe.positions import kept_positions
from zoo_export.export import export_model
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep

Large = Callable[[str], ModelDirectory]


@pytest.fixture
def large(exported_copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Large:
    """Return a built model that counts as large."""

    def build(name: str) -> ModelDirectory:
        stored = ModelDirectory.open(exported_copy(name))
        monkeypatch.setattr(grid, "CHEAP", 1)
        monkeypatch.setattr(grid, "LONG", 2)
        monkeypatch.setattr(positions, "_LARGE", 10 * stored.spec.config.vocab_size)
        monkeypatch.setattr(positions, "KEPT", 8)
        monkeypatch.setattr(widened, "_LARGE", 1000)
        monkeypatch.setattr(widened, "_DEFERRED", 100)
        monkeypatch.setattr(widened, "_EXPANSION", 1)
        return stored

    return build


class Changed:
    """An executor whose logits are changed at one position of a long text."""

    def __init__(self, executor: Executor, place: int, change: Callable[[Any], Any]) -> None:
        self.executor, self.place, self.change, self.dtype = executor, place, change, executor.dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        outputs = dict(self.executor(graph, feeds))
        logits = outputs["logits"].copy()
        if logits.shape[1] > self.place:
            logits[:, self.place, 5] = self.change(logits[:, self.place, 5])
        return {**outputs, "logits": logits}


@pytest.mark.slow
def test_evidence_says_what_was_left_out(large: Large) -> None:
    """Long inputs are compared with optimisations on, at some positions of the logits."""
    stored = large("gpt-tiny")
    report = export_model(stored.path, force=True)
    assert report.passed
    found = [item for item in report.evidence["grid"]["reduced"] if item["length"] > 10]
    assert max(item["past"] + item["length"] for item in found) == stored.spec.config.max_seq_len
    for item in found:
        assert 8 <= item["positions"]["logits"] < item["length"]
        assert item["levels"] == ["all"]
    short = [item for item in report.evidence["grid"]["reduced"] if item["past"] + item["length"] <= 10]
    assert not short


def test_fault_at_a_long_input(large: Large) -> None:
    """A number that is not finite is found at every position, a wrong one at those that are kept."""
    stored = large("gpt-tiny")
    export = Export(stored)
    subject = OnnxSubject(stored, export.read(), "cpu")
    graph = subject.graphs[0]
    point = Point(1, subject.stored.spec.config.max_seq_len - 3, 3, "none")
    sweep = Sweep(subject)
    kept = kept_positions(graph, graph.output_tensors()[0], sweep.evaluator.feeds(point), point)
    assert kept is not None
    places = kept.places.tolist()
    dropped = next(place for place in range(point.length) if place not in places)
    cases: list[tuple[int, Callable[[Any], Any], bool]] = [
        (places[3], lambda x: x * 1.01 + 0.01, False),
        (dropped, lambda x: x * 1.01 + 0.01, True),
        (dropped, lambda x: x * np.nan, False),
        (dropped, lambda x: x, True),
    ]
    for place, change, passes in cases:
        sweep = Sweep(subject)
        sweep.compare_at(point, {"all": Changed(sweep.runtimes["all"], place, change)})
        assert (not sweep.findings.failures()) == passes
