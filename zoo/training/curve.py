"""The record of a run on the model card: a table, and the curve of the loss if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["CURVE", "draw_curve", "training_section"]

CURVE = "loss.svg"


def draw_curve(metrics: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Draw the losses of training and of evaluations by step, and return whether matplotlib is there to do it."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    evaluated = [row for row in metrics if "evaluation" in row]
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row["step"] for row in metrics], [row["loss"] for row in metrics], label="training", linewidth=1)
    if evaluated:
        losses = [row["evaluation"]["loss"] for row in evaluated]
        axes.plot([row["step"] for row in evaluated], losses, label="evaluation", marker="o", markersize=3)
        axes.legend()
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zoo"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return True


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
