"""Trackio. Its environment variables apply; the project is ``zoo``, or TRACKIO_PROJECT."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zoo.training.tracking import TrackedRun, import_package

__all__ = ["start"]

trackio = import_package("trackio", "trackio")


class _Run:
    def __init__(self, run: TrackedRun) -> None:
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "zoo"),
            name=f"{run.name}-{run.identity[:8]}",
            config=dict(run.configuration),
            resume="allow",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        self._run.finish()


def start(run: TrackedRun) -> _Run:
    """Start a run, or continue the one of the same name."""
    return _Run(run)
