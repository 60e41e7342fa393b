"""Plots of the results of :mod:`zoo_export.bench`. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.errors import UsageError
from zoo.plots.plot import COLOURS, MARKERS, WIDTH, Plot, drawn, log_axis, new_figure, printable

__all__ = ["plot_bench"]

_BASELINE = COLOURS[6]
"""The colour of a curve's baseline and of the machine's limits."""


def plot_bench(result: Mapping[str, Any]) -> Plot:
    """Plot speed against length, or time and memory of curves.

    Args:
        result: the result of ``bench_model`` or of ``bench_curves``,
            or the JSON of ``zoo bench``.

    Raises:
        UsageError: it is neither, or matplotlib is not installed.
    """
    if "models" in result:
        return _draw_curves(result)
    if not result.get("cases"):
        raise UsageError("no measurements to plot", None, "give a result of zoo bench")
    if len({case["length"] for case in result["cases"]}) > 1:
        return _draw_speeds(result)
    return _draw_bars(result)


def _title(result: Mapping[str, Any]) -> str:
    variant = f" ({result['variant']})" if result["variant"] else ""
    threads = f", threads: {result['threads']}" if result.get("threads") else ""
    return f"{result['model']}{variant}: speed on {result['provider']}{threads}, {result['cpu']}"


def _backends(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for case in cases for name in case["backends"]))


@drawn
def _draw_speeds(result: Mapping[str, Any]) -> Plot:
    """Draw a panel for each graph and phase, and a curve for each backend and batch, with the machine's limit."""
    cases = result["cases"]
    names, batches = _backends(cases), sorted({case["batch"] for case in cases})
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for case in cases:
        groups.setdefault((case["graph"], case["phase"]), []).append(case)
    rows = -(-len(groups) // 2)
    figure = new_figure(_title(result), 0.9 + 2.5 * rows)
    panels = list(figure.subplots(rows, min(2, len(groups)), squeeze=False).flat)
    for axes, ((graph, phase), cases_of_panel) in zip(panels, groups.items(), strict=False):
        for line, batch in zip(("-", "--", "-.", ":") * len(batches), batches, strict=False):
            several = f", batch {batch}" if len(batches) > 1 else ""
            for number, name in enumerate(names):
                speeds = [
                    (case["length"], case["backends"][name]["tokens_per_second"])
                    for case in cases_of_panel
                    if case["batch"] == batch and name in case["backends"]
                ]
                if speeds:
                    axes.plot(*zip(*speeds, strict=True), line, marker=MARKERS[number % len(MARKERS)],
                              color=COLOURS[number % len(COLOURS)], markersize=4, linewidth=1, label=f"{name}{several}",
                              gid=f"{graph}-{phase}-{batch}-{name}")  # fmt: skip
            limits = [
                (case["length"], _limit(case)) for case in cases_of_panel if case["batch"] == batch and _limit(case)
            ]
            if limits:
                axes.plot(*zip(*limits, strict=True), line, marker="_", color=_BASELINE, linewidth=0.8,
                          label=f"machine limit{several}", gid=f"{graph}-{phase}-{batch}-limit")  # fmt: skip
        lengths = sorted({case["length"] for case in cases_of_panel})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        log_axis(axes.yaxis)
        axes.set(xlabel="tokens before it" if phase == "decode" else "tokens in the call", ylabel="tokens per second")
        axes.set_title(printable(f"{graph}: {phase}"))
        axes.grid()
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    _legend(figure, panels[: len(groups)])
    return Plot(_title(result), figure)


def _limit(case: Mapping[str, Any]) -> float | None:
    """Return the most tokens per second that the machine allows, or None if unknown."""
    if case["limit"]["bound"] is None:
        return None
    return float(case["batch"] * (1 if case["phase"] == "decode" else case["length"]) / case["limit"]["seconds"])


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=4)


@drawn
def _draw_bars(result: Mapping[str, Any]) -> Plot:
    """Draw a bar for each backend and case, and a mark at the machine's limit."""
    cases = result["cases"]
    names = _backends(cases)
    figure = new_figure(_title(result), 1.5 + 0.25 * len(cases) * (len(names) + 1))
    axes = figure.subplots()
    height = 1 / (len(names) + 1)
    for number, name in enumerate(names):
        found = [(row, case["backends"][name]) for row, case in enumerate(cases) if name in case["backends"]]
        rows = [row + (number - (len(names) - 1) / 2) * height for row, _ in found]
        bars = axes.barh(rows, [item["tokens_per_second"] for _, item in found], height, label=name,
                         color=COLOURS[number % len(COLOURS)])  # fmt: skip
        for bar in bars:
            bar.set_gid(f"speed-{name}")
        axes.bar_label(bars, [f"{item['of_limit']:.0%}" if item["of_limit"] else "" for _, item in found], padding=3)
    limits = [(limit, row) for row, case in enumerate(cases) if (limit := _limit(case))]
    axes.plot([speed for speed, _ in limits], [row for _, row in limits], "|", color=_BASELINE, markersize=24,
              label="machine limit", gid="limit")  # fmt: skip
    axes.set_yticks(range(len(cases)), [f"{c['graph']} {c['phase']}\n{c['batch']} x {c['length']}" for c in cases])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    log_axis(axes.xaxis)
    axes.set_xlabel("tokens per second (and percentage of the machine limit)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return Plot(_title(result), figure)


@drawn
def _draw_curves(result: Mapping[str, Any]) -> Plot:
    """Draw time and memory against length on logarithmic axes, with reference lines for n and n^2."""
    title = f"time and memory of {len(result['models'])} models, one text at a time, {result['cpu']}"
    figure = new_figure(title, 0.6 + 3.2 + 0.17 * -(-len(result["models"]) // 4), width=1.25 * WIDTH)
    panels = figure.subplots(1, 2)
    lengths = result["lengths"]
    for axes, key, unit, label in zip(
        panels, ("best_seconds", "memory"), (1e3, 1e-6), ("time (milliseconds)", "memory (megabytes)"), strict=True
    ):
        for number, model in enumerate(result["models"]):
            points = [(point["length"], point[key] * unit) for point in model["points"] if point[key]]
            if points:
                is_baseline = model["name"] == result["baseline"]
                axes.plot(*zip(*points, strict=True), "-", color=_BASELINE if is_baseline else COLOURS[number % 6],
                          marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=2.5 if is_baseline else 1.2,
                          label=model["name"], gid=f"{key}-{model['name']}")  # fmt: skip
        low = min((value for line in axes.get_lines() for value in line.get_ydata()), default=1.0)
        for power, style in ((1, ":"), (2, "--")):
            ends = (low / 2, low / 2 * (lengths[-1] / lengths[0]) ** power)
            axes.plot((lengths[0], lengths[-1]), ends, style, color="grey", linewidth=1, label=f"n^{power}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
        axes.minorticks_off()
        log_axis(axes.yaxis)
        axes.set(xlabel="tokens, n", ylabel=label)
        axes.grid()
    _legend(figure, panels)
    return Plot(title, figure)
