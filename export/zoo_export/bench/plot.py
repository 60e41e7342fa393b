"""Plots of the results of :mod:`zoo_export.bench`. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo.errors import UsageError
from zoo.storage import check_file_target, new_file

__all__ = ["check_plot", "draw_curves", "draw_plot"]

SUFFIXES = (".png", ".svg")
_MARKERS = "osDv^<>P"
"""A marker per curve, so that curves are distinguishable without colour."""


def check_plot(path: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` if a plot cannot be written; called before measuring."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError("unsupported plot format", path, f"name it *{' or *'.join(SUFFIXES)}")
    check_file_target(path, force=force)
    if find_spec("matplotlib") is None:
        raise UsageError("plotting needs matplotlib", None, "pip install attention-zoo[plot]")


def draw_plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot tokens per second, with a bar per backend and case and a mark at the machine's limit.

    Args:
        result: the result of :func:`zoo_export.bench.bench_model`.
        path: .png or .svg file, written atomically; an existing file is replaced.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    cases = result["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["backends"]))
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(cases) * (len(names) + 1)), layout="constrained")
    axes = figure.subplots()
    height = 1 / (len(names) + 1)
    for place, name in enumerate(names):
        found = [(row, case["backends"][name]) for row, case in enumerate(cases) if name in case["backends"]]
        rows = [row + (place - (len(names) - 1) / 2) * height for row, _ in found]
        bars = axes.barh(rows, [item["tokens_per_second"] for _, item in found], height, label=name)
        axes.bar_label(bars, [f"{item['of_limit']:.0%}" if item["of_limit"] else "" for _, item in found], padding=3)
    firsts = ((row, case["backends"]["onnxruntime"]) for row, case in enumerate(cases))
    most = [(item["tokens_per_second"] / item["of_limit"], row) for row, item in firsts if item["of_limit"]]
    axes.plot([speed for speed, _ in most], [row for _, row in most], "k|", markersize=24, label="machine limit")
    axes.set_yticks(range(len(cases)), [f"{c['graph']} {c['phase']}\n{c['batch']} x {c['length']}" for c in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("tokens per second (and percentage of the machine limit)")
    axes.set_title(f"{result['model']} on {result['provider']}, {result['cpu']}", fontsize="medium")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    with new_file(path, force=True) as file:
        figure.savefig(file, format=path.suffix.lower()[1:])


def draw_curves(result: Mapping[str, Any], path: Path) -> None:
    """Plot time and memory against length on logarithmic axes, with reference lines for n and n^2.

    Args:
        result: the result of :func:`zoo_export.bench.curves.bench_curves`.
        path: .png or .svg file, written atomically; an existing file is replaced.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    lengths = result["lengths"]
    for axes, key, unit, label in zip(
        panels, ("best_seconds", "memory"), (1e3, 1e-6), ("milliseconds", "megabytes"), strict=True
    ):
        for number, model in enumerate(result["models"]):
            found = [(point["length"], point[key] * unit) for point in model["points"] if point[key]]
            if found:
                own = model["name"] == result["baseline"]
                style = "k-" if own else f"C{number}-"
                axes.plot(*zip(*found, strict=True), style, marker=_MARKERS[number % len(_MARKERS)], markersize=4,
                          linewidth=2.5 if own else 1.2, label=model["name"])  # fmt: skip
        start, stop = lengths[0], lengths[-1]
        low = min((value for line in axes.get_lines() for value in line.get_ydata()), default=1.0)
        for power, style in ((1, ":"), (2, "--")):
            ends = (low / 2, low / 2 * (stop / start) ** power)
            axes.plot((start, stop), ends, style, color="grey", linewidth=1, label=f"n^{power}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("tokens, n")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.suptitle(f"one text at a time, {result['cpu']}", fontsize="medium")
    # Keep text as text, and make the file reproducible.
    with new_file(path, force=True) as file, rc_context({"svg.fonttype": "none", "svg.hashsalt": "zoo"}):
        kind = path.suffix.lower()[1:]
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
