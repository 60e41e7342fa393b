"""The curves of ``zoo bench``: time and memory against length, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.cli.options import check_figure_option
from zoo.cli.output import echo, message
from zoo.cli.report import columns, emit_json
from zoo_export.cli.results import measuring

__all__ = ["BUSY", "growth_rows", "show_curves", "table_rows"]

BUSY = 0.1
"""Fraction of time spent waiting for a core above which a measurement is unreliable."""
Row = tuple[str, ...]
_PANELS = {"MS": ("best_seconds", 1e3, "time_ratio"), "MB": ("memory", 1e-6, "memory_ratio")}
"""Tables by title: key of the value, factor to the table's unit, key of the ratio to the baseline."""


def show_curves(
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    figure: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure curves and print them. ``options`` are passed to :func:`zoo_export.bench.curves.bench_curves`."""
    check_figure_option(figure, force=force)
    from zoo_export.bench.curves import bench_curves

    with measuring() as watchers:
        result = bench_curves(names, lengths, **watchers, **options)
    waited = [point["waited"] for model in result["models"] for point in model["points"] if point["waited"] is not None]
    busy = sum(part > BUSY for part in waited)
    if busy:
        problem = (
            f"threads waited for a free core for more than {BUSY:.0%} of the time at {busy} of {len(waited)} points"
        )
        message("warning", f"{problem}: repeat it on an idle machine")
    if figure is not None:
        from zoo_export.bench.plot import plot_bench

        plot_bench(result).write(figure, force=force)
    if as_json:
        emit_json("bench-curves", result)
        return
    threads = f", threads: {result['threads']}" if result["threads"] else ""
    echo(f"one text at a time, float32 on cpu{threads}, {result['cpu']}")
    compared = max((length for length in result["compared_to"].values() if length), default=None)
    if compared:
        beyond = ", longer texts only timed" if compared < lengths[-1] else ""
        echo(f"presets: graphs verified against their models on up to {compared} tokens{beyond}")
    for title in _PANELS:
        rows = table_rows(result, title)
        echo()
        columns(rows, right=range(len(rows[0])))
    echo()
    columns(growth_rows(result), right=range(1, 5))
    for model in result["models"]:
        for point in model["points"]:
            if point["failure"]:
                echo(f"{model['name']}, {point['length']} tokens: {point['failure']}")


def table_rows(result: Mapping[str, Any], title: str) -> list[Row]:
    """Return a table of ``MS`` or ``MB`` with a header, one row per length and one column per model.

    Cells include the ratio to the baseline.
    """
    key, unit, ratio = _PANELS[title]
    rows = [(title, *(model["name"] for model in result["models"]))]
    for place, length in enumerate(result["lengths"]):
        cells = [
            _cell(point[key], unit, None if model["name"] == result["baseline"] else point[ratio])
            for model in result["models"]
            for point in [model["points"][place]]
        ]
        rows.append((str(length), *cells))
    return rows


def _cell(value: float | None, unit: float, ratio: float | None) -> str:
    if value is None:
        return "-"
    number = value * unit
    shown = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    if ratio is None:
        return shown
    times = f"({ratio:.0f}x)" if ratio >= 100 else f"({ratio:.2g}x)"
    return f"{shown} {times:>8}"


def growth_rows(result: Mapping[str, Any]) -> list[Row]:
    """Return a table with one row per model: growth exponents, and the lengths from which it beats the baseline."""
    header = ("MODEL", "TIME GROWS", "MEMORY GROWS", "FASTER FROM", "SMALLER FROM")
    return [header, *(tuple(_growth_cells(model, result["baseline"])) for model in result["models"])]


def _growth_cells(model: Mapping[str, Any], baseline: str) -> Iterator[str]:
    yield model["name"]
    for key in ("time_growth", "memory_growth"):
        yield "-" if model[key] is None else f"n^{model[key]:.2f}"
    for key in ("faster_from", "smaller_from"):
        yield "baseline" if model["name"] == baseline else str(model[key] or "never")
