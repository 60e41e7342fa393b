"""The guard against regressions of cost: its table is complete and quoted, and what exceeds it fails."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def guard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guard", ROOT / "benchmarks" / "guard.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_complete_and_quoted(guard: ModuleType) -> None:
    table = guard.read_table()
    assert list(table) == list(guard.FIGURES)
    assert f"{guard.MARKERS[0]}\n{guard.rows(table)}\n{guard.MARKERS[1]}" in guard.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("seconds", "megabytes", "fails"), [(1.1, 110, False), (1.2, 100, True), (1.0, 120, True), (0.1, 10, False)]
)
def test_cost_beyond_the_margin_fails(
    guard: ModuleType, seconds: float, megabytes: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured by a machine on which the calibration takes 2 s."""
    cost = guard.Cost(2 * seconds, megabytes)
    monkeypatch.setattr(guard, "FIGURES", {"step": lambda _: cost})
    monkeypatch.setattr(guard, "prepare", lambda _: None)
    monkeypatch.setattr(guard, "calibrate", lambda _: 2.0)
    monkeypatch.setattr(guard, "PAUSE", 0.0)
    monkeypatch.setattr(guard, "read_table", lambda: {"step": guard.Cost(1.0, 100)})
    monkeypatch.setattr(sys, "argv", ["guard.py"])
    if fails:
        with pytest.raises(SystemExit, match="1"):
            guard.main()
    else:
        guard.main()


def test_least_of_several_measurements_counts(guard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter([guard.Cost(3.0, 90), guard.Cost(1.1, 110)])  # a third measurement would fail
    monkeypatch.setattr(guard, "FIGURES", {"step": lambda _: next(costs)})
    monkeypatch.setattr(guard, "prepare", lambda _: None)
    monkeypatch.setattr(guard, "calibrate", lambda _: 1.0)
    monkeypatch.setattr(guard, "PAUSE", 0.0)
    assert guard.measure(["step"], {"step": guard.Cost(1.0, 100)}, 2) == {"step": guard.Cost(1.1, 90)}


def test_seconds_are_compared_with_calibrations_of_the_same_time(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round is slower than the one before, and a calibration is disturbed."""
    costs = iter([guard.Cost(2.4, 100), guard.Cost(4.4, 100)])
    calibrations = iter([2.0, 2.0, 4.0, 9.0])
    monkeypatch.setattr(guard, "FIGURES", {"step": lambda _: next(costs)})
    monkeypatch.setattr(guard, "prepare", lambda _: None)
    monkeypatch.setattr(guard, "calibrate", lambda _: next(calibrations))
    monkeypatch.setattr(guard, "PAUSE", 0.0)
    assert guard.measure(["step"], {"step": guard.Cost(1.0, 100)}, 3) == {"step": guard.Cost(1.1, 100)}
