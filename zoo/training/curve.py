"""The record of a run: a table on the model card, and the curve of the loss, which needs matplotlib."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError, UsageError
from zoo.plots.plot import COLOURS, Plot, drawn, new_figure
from zoo.reading import read_text

__all__ = ["CURVE", "MISSING", "draw_curve", "plot_loss", "training_section"]

CURVE = "loss.svg"
MISSING = f'{CURVE} will be left out, because plots need matplotlib: pip install "attention-zoo[plot]"'
_FEW = 50
"""Number of records up to which no moving mean is drawn."""
_PART = 25
"""Number of windows of the moving mean in a run."""


def plot_loss(directory: str | os.PathLike[str]) -> Plot:
    """Plot the loss by step of a finished training run, from its training.json and metrics.jsonl.

    Raises:
        UsageError: the directory has no record of a training run, or matplotlib is not installed.
        ArtifactError: the record cannot be read.
    """
    from zoo.training.metrics import METRICS, read_metrics
    from zoo.training.plan import PLAN

    folder = Path(directory)
    if not (folder / PLAN).is_file() or not (folder / METRICS).is_file():
        raise UsageError("has no record of a training run", folder, "name a directory that zoo train wrote")
    metrics = read_metrics(folder / METRICS)
    try:
        record = json.loads(read_text(folder / PLAN))
        return _draw(record, metrics)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"not the record of a finished run ({error!r})", folder / PLAN) from error


def draw_curve(record: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Write the plot of a run to a file, and return whether there is anything to draw, and matplotlib to do it."""
    if find_spec("matplotlib") is None or not metrics:
        return False
    _draw(record, metrics).write(file)
    return True


@drawn
def _draw(record: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> Plot:
    """Draw the losses of recorded steps, their moving mean if there are many, those of evaluations, and the rate."""
    import numpy as np

    title = f"{record['model']}: loss of {record['objective']} on {record['data']}"
    figure = new_figure(title, 4.5, width=6)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, losses = np.array([row["step"] for row in metrics]), np.array([row["loss"] for row in metrics])
    many = len(steps) >= _FEW
    axes.plot(steps, losses, label="training, single steps, not smoothed", color=COLOURS[0], gid="training",
              linewidth=0.6 if many else 1, alpha=0.5 if many else 1)  # fmt: skip
    if many:
        size = len(steps) // _PART
        means = np.convolve(losses, np.ones(size) / size, "valid")
        name = f"training, mean of {size} recorded steps"
        axes.plot(steps[size - 1 :], means, label=name, color=COLOURS[0], linewidth=1.4, gid="mean")
    evaluated = [row for row in metrics if "evaluation" in row]
    if evaluated:
        values = [row["evaluation"]["loss"] for row in evaluated]
        axes.plot([row["step"] for row in evaluated], values, "o-", label="evaluation", color=COLOURS[1], markersize=3,
                  linewidth=1, gid="evaluation")  # fmt: skip
    best = record.get("best")
    if best and record["settings"].get("keep") == "best":
        axes.axvline(best["step"], color="0.5", linewidth=0.8, linestyle=":", label=f"kept: step {best['step']:,}")
    axes.set_ylabel(f"loss ({record.get('loss_unit', 'mean per target')})")
    axes.grid(visible=True)
    axes.legend()
    rates = [row["learning_rate"] for row in metrics]
    below.plot(steps, rates, color=COLOURS[2], linewidth=1.2, gid="learning-rate")
    below.set(xlabel=f"step (of {record['settings']['batch_size']:,} examples)", ylabel="learning rate")
    below.set_ylim(bottom=0)
    below.grid(visible=True)
    figure.align_ylabels((axes, below))
    return Plot(title, figure)


def training_section(record: Mapping[str, Any], *, curve: bool) -> str:
    """Return the section of a model card about training, from the record of the run."""
    settings, best = record["settings"], record["best"]
    rows = {
        "data": f"{record['data']}, {record['rows']['rows']:,} rows",
        "objective": record["objective"],
        "steps": f"{record['steps']:,} of {settings['batch_size']} examples",
        "optimiser": f"{settings['optimizer']}, learning rate {settings['learning_rate']:g}, {settings['schedule']}",
        "seed": settings["seed"],
        **({"changed": "; ".join(record["changes"])} if record["changes"] else {}),
        "last training loss": f"{record['loss']:.4f}" if record["loss"] is not None else "-",
        "best evaluation": f"loss {best['loss']:.4f} at step {best['step']:,}" if best else "none",
        "machine": record["machine"],
        "speed": f"{speed:,.0f} targets/s" if (speed := record["targets_per_second"]) is not None else "-",
        "versions": f"zoo {record['zoo']}, torch {record['torch']}, Python {record['python']}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    drawn = f"\n![Loss by step]({CURVE})\n" if curve else ""
    return f"\n## Training\n\n| | |\n| --- | --- |\n{table}\n{drawn}"
