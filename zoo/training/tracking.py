"""Trackers of experiments: they receive the metrics of a run while it trains. Torch-free."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zoo import plugins
from zoo.errors import MissingPackageError, ZooError, ZooWarning
from zoo.plugins import Plugin
from zoo.registry import load_reference

__all__ = ["TrackedRun", "Trackers", "Tracking", "import_package", "metrics_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run that starts or continues, as a tracker is told of it."""

    name: str
    """The name of the model directory."""
    identity: str
    """Hexadecimal digits that differ between runs; a run that is continued keeps them."""
    configuration: Mapping[str, Any]
    """Plain data: the model, the objective, the data and all settings."""
    directory: Path
    """The directory that holds the model directory, for the files of trackers."""
    step: int
    """Number of steps done; greater than 0 if the run continues. Later steps may have been logged before."""


class Tracking(Protocol):
    """The record of one run in a tracker, as the tracker's function returns it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers, such as ``train/loss``, after a step."""

    def finish(self, status: str) -> None:
        """End the record: ``finished``, or ``failed`` if the run can be continued."""


class Trackers:
    """The trackers of a run. One that raises while training goes on is dropped with a warning.

    Args:
        names: of trackers of plugins.

    Raises:
        UsageError: there is no such tracker.
        MissingPackageError: a tracker needs a package that is not installed.
        PluginError: a tracker cannot be loaded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        providers = [plugins.active().tracker(name) for name in dict.fromkeys(names)]
        self._factories: list[tuple[Plugin, str, Callable[[TrackedRun], Tracking]]] = [
            (owner, tracker.name, load_reference(tracker.start, owner)) for owner, tracker in providers
        ]
        self._running: list[tuple[Plugin, str, Tracking]] = []

    def start(self, run: TrackedRun) -> None:
        """Start all trackers. Raises :class:`zoo.PluginError` if one cannot start."""
        for owner, name, factory in self._factories:
            with plugins.blame(owner, f"cannot start the tracker {name}"):
                self._running.append((owner, name, factory(run)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give numbers to all trackers."""
        self._tell(lambda tracking: tracking.log(step, values))

    def finish(self, status: str) -> None:
        """End all trackers."""
        self._tell(lambda tracking: tracking.finish(status))
        self._running = []

    def _tell(self, what: Callable[[Tracking], None]) -> None:
        remaining = []
        for owner, name, tracking in self._running:
            try:
                with plugins.blame(owner, f"the tracker {name} failed and is left out from now on"):
                    what(tracking)
                remaining.append((owner, name, tracking))
            except ZooError as error:
                warnings.warn(str(error), ZooWarning, stacklevel=2)
        self._running = remaining


def import_package(module: str, tracker: str) -> Any:
    """Import the package of a built-in tracker.

    Raises :class:`MissingPackageError` if it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f'pip install "attention-zoo[{tracker}]"'
        raise MissingPackageError(f"{tracker} is not installed", f"--tracker {tracker}", remedy) from error


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics.jsonl by tracked name: ``train/loss``, ``evaluation/loss``, ..."""
    evaluation = {**row.get("evaluation", {})}
    evaluation |= evaluation.pop("terms", {})
    parts = {"train": {key: row[key] for key in row if key not in ("step", "evaluation")}, "evaluation": evaluation}
    return {
        f"{part}/{key}": float(value)
        for part, values in parts.items() for key, value in values.items() if value is not None
    }  # fmt: skip
