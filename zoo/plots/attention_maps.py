"""Plots of attention weights: heat maps of heads, and the weights of one query as lines between tokens.

H heads, T queries, S keys.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo.figures.attention import AttentionMap
from zoo.figures.attention_page import read_attention
from zoo.plots.plot import COLOURS, MAP, WIDTH, Plot, draw_map, drawn, new_figure, printable

__all__ = ["attention"]

_MOST = 400
"""Maximum number of heads in a plot."""
_LABELLED = 48
"""Maximum number of tokens along a labelled axis."""
_THINNEST = 0.02
"""Least weight that is drawn as a line."""


def attention(
    directory: str | os.PathLike[str],
    *inputs: Any,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    token: int | None = None,
    unverified: bool = False,
) -> Plot:
    """Plot attention weights of one input, read from the verified ONNX graph, as :func:`zoo.attention_page` does.

    Several heads are small heat maps, one head a large one with the tokens. With ``token``, the weights of that query
    are lines from it to the keys, in a column for each layer and a colour for each head.

    Args:
        directory: a model directory with the variant ``attentions``, which ``zoo export --attentions`` creates.
        inputs: a text, token ids, or an image; or two texts.
        layers: indices of layers; all by default.
        heads: indices of heads; all by default.
        token: position of a query, from 0, or from the end if negative.
        unverified: allow an export that is not verified. The title says so.

    Raises:
        UsageError: no task shows the attention of such models, there are too many heads or tokens, or matplotlib is
            not installed.
        ArtifactError: the model is not exported with its attention weights, or an input cannot be read.
        ParityError: the export is not verified.
    """
    stored = ModelDirectory.open(Path(directory))
    record = read_attention(stored, inputs, layers=layers, heads=heads, unverified=unverified)
    name = str(stored.description["name"]) + (" (not verified)" if unverified else "")
    count = sum(len(item.heads) for item in record.maps)
    if count > _MOST:
        raise UsageError(f"a plot shows at most {_MOST} heads, got {count}", name, "choose layers or heads")
    if token is not None:
        return _draw_lines(name, record.maps, token)
    return _draw_one(name, record.maps[0]) if count == 1 else _draw_all(name, record.maps)


@drawn
def _draw_one(name: str, item: AttentionMap) -> Plot:
    """Draw one head with its tokens."""
    title = f"{name}: attention, {item.name}, head {item.heads[0]}"
    queries, keys = item.queries.labels, item.keys.labels
    size = max(2.2, min(WIDTH - 1.5, 0.2 * max(len(queries), len(keys))))
    figure = new_figure(title, size * len(queries) / max(len(queries), len(keys)) + 1.4, width=max(4.2, size + 1.8))
    axes = figure.subplots()
    draw_map(axes, item.weights[0], "attention weight", low=0, gid="weights")
    for setter, axis_labels in ((axes.set_xticks, keys), (axes.set_yticks, queries)):
        if len(axis_labels) <= _LABELLED:
            setter(range(len(axis_labels)), [_label(label) for label in axis_labels])
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0)
    axes.set(xlabel="key", ylabel="query")
    return Plot(title, figure)


@drawn
def _draw_all(name: str, maps: Sequence[AttentionMap]) -> Plot:
    """Draw a small heat map for each head, in a row for each layer."""
    title = f"{name}: attention weights, from 0 (dark) to the largest of each head"
    columns = max(len(item.heads) for item in maps)
    side = min(1.2, (WIDTH - 1) / columns)
    figure = new_figure(title, 0.6 + (side + 0.1) * len(maps), width=max(3.8, side * columns + 1))
    panels = figure.subplots(len(maps), columns, squeeze=False)
    for row, item in zip(panels, maps, strict=True):
        for axes in row[len(item.heads) :]:
            axes.set_visible(False)
        for axes, head, weights in zip(row, item.heads, item.weights, strict=False):
            axes.imshow(weights, cmap=MAP, vmin=0, aspect="auto", interpolation="nearest", gid=f"{item.name}-{head}")
            axes.set(xticks=[], yticks=[])
            if item is maps[0]:
                axes.set_title(f"head {head}" if columns <= 8 else str(head), loc="center")
        row[0].set_ylabel(printable(item.name if len({one.group for one in maps}) > 1 else f"layer {item.layer}"))
    return Plot(title, figure)


@drawn
def _draw_lines(name: str, maps: Sequence[AttentionMap], token: int) -> Plot:
    """Draw the weights of one query: queries on the left, keys on the right, lines as wide as their weights."""
    for item in maps:
        size = len(item.queries.labels)
        if not -size <= token < size:
            raise UsageError(f"no token {token} in {item.name}", name, f"choose from {-size} to {size - 1}")
        longest = max(size, len(item.keys.labels))
        if longest > _LABELLED:
            raise UsageError(
                f"lines are drawn for at most {_LABELLED} tokens, got {longest}", name, "leave out the token"
            )
    word = maps[0].queries.labels[token]
    title = f"{name}: attention of token {token % len(maps[0].queries.labels)} ({_label(word)})"
    columns = min(3, len(maps))
    rows = math.ceil(len(maps) / columns)
    longest = max(max(len(item.queries.labels), len(item.keys.labels)) for item in maps)
    figure = new_figure(title, 0.8 + rows * (0.4 + 0.155 * longest), width=WIDTH * (0.3 + 0.7 * columns / 3))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, item in zip(panels, maps, strict=False):
        _draw_query(axes, item, token % len(item.queries.labels))
    for axes in panels[len(maps) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in panels[: len(maps)]:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=3 * columns)
    return Plot(title, figure)


def _draw_query(axes: Any, item: AttentionMap, query: int) -> None:
    count = len(item.heads)
    for number, (head, weights) in enumerate(zip(item.heads, item.weights[:, query], strict=True)):
        colour, shift = COLOURS[number % len(COLOURS)], 0.5 * (number - (count - 1) / 2) / max(count, 4)
        axes.plot([], [], color=colour, linewidth=2, label=f"head {head}")
        for key in np.flatnonzero(weights >= _THINNEST):
            axes.plot((0, 1), (query, key + shift), color=colour, linewidth=4 * float(weights[key]), alpha=0.85,
                      solid_capstyle="butt", gid=f"{item.name}-{head}-{key}")  # fmt: skip
    for x, labels, align in ((-0.03, item.queries.labels, "right"), (1.03, item.keys.labels, "left")):
        for place, label in enumerate(labels):
            is_marked = place == query and x < 0
            axes.text(x, place, _label(label), ha=align, va="center", weight="bold" if is_marked else "normal",
                      color="black" if is_marked or x > 0 else "0.45")  # fmt: skip
    axes.set_ylim(max(len(item.queries.labels), len(item.keys.labels)) - 0.5, -0.5)
    axes.set_xlim(-0.9, 1.9)
    axes.set_axis_off()
    axes.set_title(printable(item.name), loc="center")


def _label(text: str) -> str:
    """Return a token's text, in which newlines, and spaces alone, can be seen."""
    shown = text if text.strip() else text.replace(" ", "\N{OPEN BOX}")
    return printable(shown.replace("\n", "\\n"))
