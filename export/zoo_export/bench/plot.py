"""Drawing what :mod:`zoo_export.bench` measured. It needs matplotlib, the extra ``plot``."""

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
"""One a curve, so that colours need not be told apart."""


def check_plot(path: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` where a drawing cannot be made: before anything is measured for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError("unknown kind of drawing", path, f"name it *{' or *'.join(SUFFIXES)}")
    check_file_target(path, force=force)
    if find_spec("matplotlib") is None:
        raise UsageError("drawing needs matplotlib", None, "pip install attention-zoo[plot]")


def draw_plot(result: Mapping[str, Any], path: Path) -> None:
    """Write a bar for each backend in each case: tokens a second, and a mark at what the machine can do at most.

    Args:
        result: of :func:`zoo_export.bench.bench_model`.
        path: .png or .svg. It is replaced if it exists, and appears when it is complete.

    Raises:
        StorageError: the file system refuses.
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
    axes.plot([speed for speed, _ in most], [row for _, row in most], "k|", markersize=24, label="limit of the machine")
    axes.set_yticks(range(len(cases)), [f"{c['graph']} {c['phase']}\n{c['batch']} x {c['length']}" for c in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("tokens a second, and what part that is of the limit")
    axes.set_title(f"{result['model']} on {result['provider']}, {result['cpu']}", fontsize="medium")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    with new_file(path, force=True) as file:
        figure.savefig(file, format=path.suffix.lower()[1:])


def draw_curves(result: Mapping[str, Any], path: Path) -> None:
    """Write time and memory against length, both on logarithmic axes, with lines that grow with n and with n^2.

    Args:
        result: of :func:`zoo_export.bench.curves.bench_curves`.
        path: .png or .svg. It is replaced if it exists, and appears when it is complete.

    Raises:
        StorageError: the file system refuses.
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
    # Text stays text, and the same figures give the same file.
    with new_file(path, force=True) as file, rc_context({"svg.fonttype": "none", "svg.hashsalt": "zoo"}):
        kind = path.suffix.lower()[1:]
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
