"""Plots of positional encodings: tables, rotations and relative biases.

N positions, E dimensions, D head size, H heads, M maximum distance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch

from zoo.arrays import Array
from zoo.contract import standard_fields
from zoo.errors import UsageError
from zoo.nn import RelativePositionBias, RotaryPositions, SinusoidalPositions, TensorToTensorPositions
from zoo.plots.plot import COLOURS, STYLES, Plot, draw_map, drawn, new_figure, printable
from zoo.plots.stored import StoredModel, as_floats
from zoo.registry import ModelSpec

__all__ = ["positions"]

_LENGTH = 256
"""Maximum number of positions of an encoding that is computed."""
_CURVES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)
"""The dimensions drawn as curves, as parts of all. Frequencies fall exponentially, so most are among the first."""
_MOST = 4
"""Maximum number of encodings in a plot."""


@dataclass(frozen=True)
class _Encoding:
    """One encoding as a table."""

    name: str
    title: str
    values: Array
    """(rows, positions)"""
    row: str
    """What a row stands for."""
    value: str
    """What a value stands for."""
    column: str = "position"
    start: int = 0
    """The first column."""
    curves: Sequence[int] = ()
    """The rows to draw as curves."""
    steps: bool = False
    """Whether values change in steps."""


def positions(source: str | os.PathLike[str] | ModelSpec, dimensions: Sequence[int] = ()) -> Plot:
    """Plot the positional encodings of a model, each as a heat map over all dimensions and as curves of a few.

    Shown are sinusoids, rotary positions and relative position biases of :mod:`zoo.nn`, and learned tables that modules
    declare as ``position_tensors``, a tuple of names of tensors whose rows are positions.

    Args:
        source: a model directory; or the description of a preset, for encodings without weights.
        dimensions: the rows of the heat maps to draw as curves: dimensions, pairs or heads, from 0; by default a few at
            different frequencies.

    Raises:
        UsageError: the model has no such encodings, they have weights and the preset has none, none has a dimension, or
            matplotlib is not installed.
        ArtifactError: the model directory is damaged.
    """
    model = StoredModel(source)
    encodings = _merged([*_computed(model), *_learned(model)])
    if not encodings:
        remedy = "declare learned ones as position_tensors of a module"
        raise UsageError(f"{model.spec.architecture.name} has no positional encodings", model.name, remedy)
    if dimensions:
        most = max(len(item.values) for item in encodings)
        if wrong := [row for row in dimensions if not 0 <= row < most]:
            raise UsageError(f"no encoding has a dimension {wrong[0]}", model.name, f"choose from 0 to {most - 1}")
        encodings = [
            replace(item, curves=[row for row in dict.fromkeys(dimensions) if row < len(item.values)])
            for item in encodings
        ]
    return _draw(model.name, encodings)


def _merged(found: Sequence[_Encoding]) -> list[_Encoding]:
    """Merge equal encodings, as those of an encoder and a decoder; the names are joined."""
    groups: dict[tuple[str, tuple[int, ...], bytes], list[_Encoding]] = {}
    for item in found:
        groups.setdefault((item.title, item.values.shape, item.values.tobytes()), []).append(item)
    return [replace(items[0], name=", ".join(item.name for item in items)) for items in groups.values()]


def _computed(model: StoredModel) -> Iterator[_Encoding]:
    """Yield the encodings that modules compute."""
    length = min(standard_fields(model.spec.config).max_seq_len or _LENGTH, _LENGTH)
    places = torch.arange(length).unsqueeze(0)
    for kind in (SinusoidalPositions, TensorToTensorPositions):
        for path, module in model.find(kind):
            table = as_floats(module(places, torch.float32)[0].T)  # (E, N)
            yield _Encoding(path, "sinusoids", table, "dimension", "value", curves=_rows(len(table)))
    for path, rotary in model.find(RotaryPositions):
        cosines, _ = rotary(places, torch.float32)  # (1, 1, N, D)
        table = as_floats((cosines / rotary.magnitude)[0, 0, :, : cosines.shape[-1] // 2].T)  # (D / 2, N)
        yield _Encoding(path, "rotary", table, "pair", "cosine of the angle", curves=_rows(len(table)))
    for path, bias in model.find(RelativePositionBias):
        model.fill(path, bias)
        most = bias.max_distance
        table = as_floats(bias(2 * most + 1, 2 * most + 1)[0, :, most])  # (H, 2 M + 1): the query in the middle
        table = table[:, : most + 1] if bias.causal else table
        curves = range(min(len(table), len(_CURVES)))
        column = "position of the key relative to the query"
        yield _Encoding(path, "relative bias", table, "head", "bias", column, -most, curves=curves, steps=True)


def _learned(model: StoredModel) -> Iterator[_Encoding]:
    """Yield the declared tables."""
    for name in model.position_tensors():
        table = as_floats(model.read(name)).squeeze()
        if table.ndim != 2:
            what = f"{name} has shape {table.shape}; a table of positions has two dimensions"
            raise UsageError(what, model.name, "change position_tensors")
        yield _Encoding(name, "learned", table.T, "dimension", "value", curves=_rows(table.shape[1]))


def _rows(size: int) -> list[int]:
    """Return the even rows nearest to the parts in ``_CURVES``."""
    return list(dict.fromkeys(2 * int(size * part / 2) for part in _CURVES))


@drawn
def _draw(name: str, found: Sequence[_Encoding]) -> Plot:
    title = f"{name}: positional encodings"
    shown = found[:_MOST]
    if len(found) > len(shown):
        title += f" ({len(shown)} of {len(found)})"
    figure = new_figure(title, 0.3 + 3.3 * len(shown))
    parts = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for part, item in zip(parts, shown, strict=True):
        above, below = part.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        size = float(np.abs(item.values).max(initial=0)) or 1.0
        draw_map(above, item.values, item.value, low=-size, high=size, first=(item.start, 0), gid=f"map-{item.name}")
        above.set_ylabel(item.row)
        above.set_title(printable(f"{item.name or 'model'}: {item.title}"))
        places = np.arange(item.values.shape[1]) + item.start
        for row, colour, style in zip(item.curves, cycle(COLOURS), cycle(STYLES), strict=False):
            below.plot(
                places, item.values[row], color=colour, linestyle=style, linewidth=1, label=str(row),
                drawstyle="steps-mid" if item.steps else "default",
                gid=f"curve-{item.name}-{row}",
            )  # fmt: skip
        below.set(xlabel=item.column, ylabel=item.value)
        below.grid(axis="y")
        part.align_ylabels((above, below))
        if item.curves:
            below.legend(title=item.row, loc="center left", bbox_to_anchor=(1, 0.5))
    return Plot(title, figure)
