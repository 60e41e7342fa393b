"""Plots of the evidence of an export: errors against allowed errors, and what the comparison covered.

Nothing is computed but ratios: every number is read from parity.json.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import LEVEL_NAMES, OPENVINO, Export, ModelDirectory, abridged
from zoo.errors import ArtifactError, UsageError
from zoo.plots.plot import COLOURS, MARKERS, Plot, drawn, layer_of, log_axis, mark_zero, new_figure, printable

__all__ = ["coverage", "draw_coverage", "draw_parity", "parity"]

_RULES = {
    "largest absolute error": ("max_abs_error", "limit"),
    "error / largest value of its row or channel": ("local_error", "local_limit"),
}
"""The two parts of the rule: panel title, key of the error, key of the allowed error."""
_ALLOWED = "allowed"
_MANY = 14
"""Number of rows from which the layers of an output share a row."""
_PADDINGS = {
    "none": ("o", "no padding"),
    "left": ("<", "padding on the left"),
    "right": (">", "padding on the right"),
    "empty row": ("x", "a row of padding alone"),
}
_COLUMNS = 26
"""Maximum number of labelled columns."""


@dataclass(frozen=True)
class _ErrorRow:
    """Errors of one output, or the worst of several layers."""

    label: str
    errors: Mapping[str, Mapping[str, Any]]
    """Those of each level."""


def parity(directory: str | os.PathLike[str], variant: str = "") -> Plot:
    """Plot the largest error of every output of a verified export beside the allowed error.

    Args:
        directory: a model directory.
        variant: the variant of the export; the plain one by default.

    Raises:
        ArtifactError: there is no such export, or its evidence is malformed.
        ParityError: the export is not verified.
        UsageError: the evidence has no errors, or matplotlib is not installed.
    """
    return draw_parity(_evidence(directory, variant), _title(directory, variant))


def coverage(directory: str | os.PathLike[str], variant: str = "") -> Plot:
    """Plot the inputs that a verified export was compared at, and the outcomes of conditions that they show.

    Arguments and errors are those of :func:`parity`.
    """
    return draw_coverage(_evidence(directory, variant), _title(directory, variant))


def _runtime(evidence: Mapping[str, Any]) -> str:
    """Return the runtime of a comparison, its version, and the provider."""
    provider, numbers = evidence.get("provider", "cpu"), evidence.get("versions", {})
    if provider == OPENVINO:
        return f"OpenVINO {numbers.get(OPENVINO, '')}".rstrip()
    return f"ONNX Runtime {numbers.get('onnxruntime', '')}".rstrip() + f" on {provider}"


@drawn
def draw_parity(evidence: Mapping[str, Any], name: str) -> Plot:
    """Plot the errors in the content of a parity.json. ``name`` is that of the model."""
    rows = _rows(evidence)
    levels = list(dict.fromkeys(level for row in rows for level in row.errors))
    every = [errors for row in rows for errors in row.errors.values()]
    panels = [(label, *keys) for label, keys in _RULES.items() if any(keys[0] in errors for errors in every)]
    title = f"{name}: error of {_runtime(evidence)}, and allowed error"
    figure = new_figure(title, 1.3 + 0.115 * len(rows) * (len(levels) + 1))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (label, *keys) in zip(axes, panels, strict=True):
        _draw_errors(panel, rows, levels, *keys)
        panel.set_xlabel(label)
    axes[0].set_yticks(range(len(rows)), [printable(row.label) for row in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    handles, labels = axes[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: labels[place] == _ALLOWED)
    figure.legend([handles[n] for n in order], [labels[n] for n in order], loc="outside lower left", ncols=3)
    return Plot(title, figure)


def _draw_errors(axes: Any, rows: Sequence[_ErrorRow], levels: Sequence[str], key: str, limit: str) -> None:
    """Draw a line for each row and level, from the error to the allowed error. Zeros lie on a dotted line."""
    values = [errors[name] for row in rows for errors in row.errors.values() for name in (key, limit) if name in errors]
    zero = min((value for value in values if value > 0), default=1e-12) / 4
    for number, level in enumerate(levels):
        points = [(place, row.errors[level]) for place, row in enumerate(rows) if key in row.errors.get(level, {})]
        if not points:
            continue
        heights = [place + (number + 1) / (len(levels) + 1) - 0.5 for place, _ in points]
        errors, limits = ([errors[name] or zero for _, errors in points] for name in (key, limit))
        axes.hlines(heights, errors, limits, color="0.75", linewidth=0.8)
        label = "_" if any(line.get_label() == _ALLOWED for line in axes.get_lines()) else _ALLOWED
        axes.plot(limits, heights, "|", color="black", markersize=5, label=label, gid=f"{limit}-{level}")
        axes.plot(
            errors, heights, MARKERS[number % len(MARKERS)], color=COLOURS[number % len(COLOURS)], markersize=3.5,
            label=LEVEL_NAMES.get(level, level), gid=f"{key}-{level}",
        )  # fmt: skip
    log_axis(axes.xaxis)
    if 0 in values:
        mark_zero(axes, zero)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    for place in range(1, len(rows)):
        axes.axhline(place - 0.5, color="0.9", linewidth=0.6)


@drawn
def draw_coverage(evidence: Mapping[str, Any], name: str) -> Plot:
    """Plot the grid in the content of a parity.json. ``name`` is that of the model."""
    grid = evidence.get("grid", {})
    try:
        points = [(int(p["batch"]), int(p["past"]), int(p["length"]), str(p["padding"])) for p in grid["points"]]
        parts = {
            graph: (int(part["outcomes"]), int(part["impossible"]), int(part["conditions"]), list(part["unseen"]))
            for graph, part in grid.get("coverage", {}).items()
            if part["conditions"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError("the evidence has no grid of compared inputs", name, "verify it again") from error
    title = f"{name}: compared inputs, and outcomes of conditions that they show"
    heights = [0.28 * len({item[0] for item in points}) + 0.2] + ([0.26 * len(parts) + 0.1] if parts else [])
    figure = new_figure(title, (2.7 if parts else 1.8) + sum(heights))
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_points(panels[0], points)
    left = f" ({grid['left_out']} of the full grid left out)" if grid.get("left_out") else ""
    panels[0].set_title(f"{len(points)} inputs{left}", pad=20 if left else None)  # a long one is above the legend
    if parts:
        _draw_outcomes(panels[1], parts)
    else:
        panels[0].set_xlabel(f"{panels[0].get_xlabel()}\n\nThe graphs have no conditions.")
    return Plot(title, figure)


def _draw_points(axes: Any, points: Sequence[tuple[int, int, int, str]]) -> None:
    """Draw a cell for each batch, past and length, with a marker for each kind of padding."""
    columns, batches = sorted({item[1:3] for item in points}), sorted({item[0] for item in points})
    places = {"none": (-0.2, -0.2), "left": (0.2, -0.2), "right": (-0.2, 0.2), "empty row": (0.2, 0.2)}
    size = 4 if len(columns) <= _COLUMNS else 2
    for number, (padding, (marker, label)) in enumerate(_PADDINGS.items()):
        items = [item for item in points if item[3] == padding]
        if items:
            right, down = places[padding]
            x = [columns.index(item[1:3]) + right for item in items]
            y = [batches.index(item[0]) + down for item in items]
            axes.plot(x, y, marker, color=COLOURS[number], markersize=size, label=label, gid=f"padding-{padding}")
    every = math.ceil(len(columns) / _COLUMNS)
    shown = range(0, len(columns), every)
    axes.set_xticks(shown, [f"{columns[n][1]}\n{columns[n][0] or '-'}" for n in shown])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(batches) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.set_xticks([n - 0.5 for n in range(1, len(columns))], minor=True)
    axes.set_yticks([n - 0.5 for n in range(1, len(batches))], minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor")
    axes.set_xlabel("tokens in the call (above), tokens before it (below)")
    axes.set_ylabel("rows (batch)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, handletextpad=0.1, columnspacing=1)


def _draw_outcomes(axes: Any, parts: Mapping[str, tuple[int, int, int, Sequence[str]]]) -> None:
    """Draw a bar for each graph: outcomes that the inputs show, those that they do not, and impossible ones."""
    bars = {
        "shown": [outcomes - len(unseen) for outcomes, _, _, unseen in parts.values()],
        "not shown": [len(unseen) for *_, unseen in parts.values()],
        "cannot occur": [impossible for _, impossible, _, _ in parts.values()],
    }
    start = np.zeros(len(parts))
    for (label, values), colour, hatch in zip(
        bars.items(), (COLOURS[0], COLOURS[1], "0.85"), ("", "//", ".."), strict=True
    ):
        drawn = axes.barh(
            range(len(parts)), values, 0.6, start, color=colour, hatch=hatch, edgecolor="white", label=label
        )
        for patch in drawn:
            patch.set_gid(f"outcomes-{label}")
        axes.bar_label(drawn, [str(value or "") for value in values], label_type="center",
                       color="black" if label == "cannot occur" else "white")  # fmt: skip
        start += values
    axes.set_yticks(range(len(parts)), [f"{printable(graph)}: {part[2]} conditions" for graph, part in parts.items()])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("outcomes of conditions")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    unseen = [line for *_, lines in parts.values() for line in lines]
    if unseen:
        axes.annotate(printable(f"not shown: {abridged(unseen)}"), (0, 0), (0, -34), xycoords="axes fraction",
                      textcoords="offset points", va="top", annotation_clip=False)  # fmt: skip


def _rows(evidence: Mapping[str, Any]) -> list[_ErrorRow]:
    """Return the rows of a parity plot; those of equally named outputs of several layers are one if there are many."""
    graphs = evidence.get("graphs")
    if not isinstance(graphs, Mapping) or not graphs:
        raise UsageError("the evidence has no errors of outputs", None, "choose an export whose outputs were compared")
    try:
        rows = list(_each_output(graphs))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError("the evidence has no errors of outputs", None, "verify the export again") from error
    if len(rows) <= _MANY:
        return rows
    groups: dict[str, list[_ErrorRow]] = {}
    for row in rows:
        groups.setdefault(layer_of(row.label)[0], []).append(row)
    return [
        items[0]
        if len(items) == 1
        else _ErrorRow(f"{label}\nworst of {len(items)}", _worst([row.errors for row in items]))
        for label, items in groups.items()
    ]


def _each_output(graphs: Mapping[str, Any]) -> Iterator[_ErrorRow]:
    for graph, part in graphs.items():
        for output, levels in part["outputs"].items():
            for errors in levels.values():
                if not all(math.isfinite(errors[key]) for key in ("max_abs_error", "limit")):
                    raise ValueError("not finite")
            yield _ErrorRow(output if len(graphs) == 1 else f"{graph} {output}", levels)


def _worst(several: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return, for each level and part of the rule, the error that is the largest part of its limit, and the limit."""
    worst: dict[str, dict[str, Any]] = {}
    for level in dict.fromkeys(level for errors in several for level in errors):
        for key, limit in _RULES.values():
            measured = [errors[level] for errors in several if key in errors.get(level, {})]
            if measured:
                largest = max(measured, key=lambda item: item[key] / item[limit] if item[limit] else 0.0)
                worst.setdefault(level, {}).update({key: largest[key], limit: largest[limit]})
    return worst


def _evidence(directory: str | os.PathLike[str], variant: str) -> Mapping[str, Any]:
    """Return the evidence of an export. Raises an error unless it is verified."""
    export = Export(ModelDirectory.open(Path(directory)), variant)
    export.check()
    export.check_verified()
    return export.evidence


def _title(directory: str | os.PathLike[str], variant: str) -> str:
    name = str(ModelDirectory.open(Path(directory)).description["name"])
    return f"{name} ({variant})" if variant else name
