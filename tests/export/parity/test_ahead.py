"""The order of a comparison: graphs with weights of their own run first, and the reference at short points together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.errors import ParityError
from zoo.probe import widened
from zoo_export.parity.ahead import Sessions
from zoo_export.parity.answers import Questions
from zoo_export.parity.references import References
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep
from zoo_export.trace.make import make_graphs

Zoo = Callable[..., Result]


@pytest.fixture
def subject(zoo: Zoo) -> OnnxSubject:
    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    stored = ModelDirectory.open(Path("model"))
    return OnnxSubject(stored, make_graphs(stored), "cpu")


def outcome(subject: OnnxSubject, monkeypatch: pytest.MonkeyPatch, *, apart: bool = True) -> tuple[Any, ...]:
    """Return what a sweep finds."""
    monkeypatch.setattr(OnnxSubject, "_can_close", apart)
    sweep = Sweep(subject)
    sweep.run()
    findings = sweep.findings
    logits = {key: item.to_dict() for key, item in findings.distributions.items()}
    return sweep.points, findings.outputs(subject.graphs[0]), logits, findings.greedy, sweep.failures()


@pytest.mark.slow
def test_order_changes_no_result(subject: OnnxSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = outcome(subject, monkeypatch)
    other = OnnxSubject(subject.stored, subject.files, "cpu")
    assert outcome(other, monkeypatch, apart=False) == ahead


@pytest.mark.slow
def test_sessions_are_closed_before_pytorch_runs(subject: OnnxSubject) -> None:
    """Also those that tasks have used."""
    sweep = Sweep(subject)
    sessions: Any = sweep.runtimes["all"]
    sessions = sessions.sessions
    assert isinstance(sessions, Sessions)
    seen = weakref.ref(sessions["model"])
    questions = Questions(subject, sweep.runtimes)
    assert seen() is not None
    sweep.prepare()
    gc.collect()
    assert seen() is None
    answers = questions.compare()
    assert not answers.failures
    assert any(item["compared"] for item in answers.evidence.values())


def test_error_of_pytorch_is_reported_before_one_of_the_graph(
    subject: OnnxSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(what: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise ValueError(what)

        return call

    sweep = Sweep(subject)
    runtime = sweep.runtimes["all"]
    monkeypatch.setattr(type(runtime), "__call__", fails("the graph's own"))
    with pytest.raises(ParityError, match="the graph's own"):
        sweep.run()
    sweep = Sweep(subject)
    monkeypatch.setattr(type(subject.models.reference), "__call__", fails("the model's own"))
    with pytest.raises(ParityError, match="the model's own"):
        sweep.run()


@pytest.mark.slow
def test_reference_together_is_the_reference_alone(subject: OnnxSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = outcome(subject, monkeypatch)
    monkeypatch.setattr(widened, "_LARGE", 64)
    taken, take = list[bool](), References.take
    monkeypatch.setattr(
        References, "take", lambda self, point: (found := take(self, point), taken.append(bool(found)))[0]
    )
    together = outcome(OnnxSubject(subject.stored, subject.files, "cpu"), monkeypatch)
    assert sum(taken) > 0.9 * len(taken) > 50
    assert together[0] == alone[0]
    assert not together[-1]
    for name, levels in alone[1].items():
        for level, errors in levels.items():
            for key in ("max_abs_error", "torch_max_abs_error", "limit", "local_error", "local_limit"):
                assert together[1][name][level][key] == pytest.approx(errors[key], rel=1e-4, abs=1e-12)
