"""Weights & Biases. Its environment variables apply: WANDB_PROJECT, WANDB_MODE=offline and so on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zoo.training.tracking import TrackedRun, import_package

__all__ = ["start"]

wandb = import_package("wandb", "wandb")


class _Run:
    def __init__(self, run: TrackedRun) -> None:
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "zoo"),
            name=run.name,
            id=run.identity,
            resume="allow" if run.step else None,
            config=dict(run.configuration),
            dir=str(run.directory),
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "finished"))


def start(run: TrackedRun) -> _Run:
    """Start or continue a run of the project ``zoo``, or of WANDB_PROJECT."""
    return _Run(run)
