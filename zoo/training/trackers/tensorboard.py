"""TensorBoard: event files in ``runs/NAME`` beside the model directory. Importing this module imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping

from zoo.training.tracking import TrackedRun, import_package

__all__ = ["start"]

SummaryWriter = import_package("torch.utils.tensorboard", "tensorboard").SummaryWriter


class _Events:
    def __init__(self, run: TrackedRun) -> None:
        first = run.step + 1  # hides what was logged after the checkpoint, or by an earlier run of this name
        self._writer = SummaryWriter(str(run.directory / "runs" / run.name), purge_step=first)
        text = json.dumps(run.configuration, indent=2, default=str)
        self._writer.add_text("configuration", f"```\n{text}\n```", run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run may be killed at any time

    def finish(self, status: str) -> None:
        self._writer.close()


def start(run: TrackedRun) -> _Events:
    """Open an event file."""
    return _Events(run)
