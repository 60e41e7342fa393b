"""Plots of attention weights: heat maps of heads, and the weights of one query as lines between tokens.

H heads, T queries, S keys.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo.figures.attention import AttentionMap
from zoo.figures.attention_page import read_attention
from zoo.plots.plot import COLOURS, MAP, WIDTH, Plot, draw_map, drawn, layer_of, new_figure, printable
from zoo.plots.recorded_maps import Labels, array_maps, is_module, module_weights, select_names

__all__ = ["attention"]

_MOST = 400
"""Maximum number of heads in a plot."""
_LABELLED = 48
"""Maximum number of labels along an axis."""
_THINNEST = 0.02
"""Least weight that is drawn as a line."""
_WRAPPED = 28
"""Number of characters of a name beside a heat map after which it is wrapped."""


def attention(
    source: Any,
    *inputs: Any,
    names: Sequence[str] | str = (),
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    token: int | None = None,
    labels: Labels | Mapping[str, Labels] | None = None,
    row: int = 0,
    title: str | None = None,
    unverified: bool = False,
) -> Plot:
    """Plot attention weights of one input: of an exported model, of a module in memory, or given as arrays.

    Several heads are small heat maps, one head a large one with the tokens, or with every k-th of more than 48. With
    ``token``, the weights of that query are lines from it to the keys, in a column for each layer and a colour for each
    head.

    Args:
        source: a model directory with the variant ``attentions``, which ``zoo export --attentions`` creates and whose
            verified ONNX graph is read, as :func:`zoo.attention_page` does; or a ``torch.nn.Module`` built from the
            attention of :mod:`zoo.nn`, which is called in evaluation mode; or weights: an array or tensor (heads,
            queries, keys), with a batch before them or not, a list or a mapping by name of these, or what
            :func:`zoo.nn.recorded_attentions` yields.
        inputs: of a model directory, a text, token ids, or an image; or two texts. Of a module, the arguments of its
            call, or a mapping of them by name: tensors, arrays and lists; or a text, if :func:`zoo.load` returned the
            module with a tokenizer. Weights have none.
        names: names of attentions, in which ``*`` stands for any text, such as ``*.cross_attention``; all by default.
            Other characters stand for themselves. Those of a module are the paths of its submodules.
        layers: indices of layers, the first number of a name; all by default.
        heads: indices of heads; all by default.
        token: position of a query, from 0, or from the end if negative.
        labels: for a module or weights, the labels of the positions, strings: those of queries and keys alike, or a
            pair, (queries, keys), or one of these for each pattern of names, of which the first that matches counts.
            They must fit the attentions that ``names`` and ``layers`` choose. Positions are numbered by default.
        row: for a module or weights, the row of the batch.
        title: the title; by default it names the model, or the class of the module, and the attention.
        unverified: allow an export that is not verified. The title says so.

    Raises:
        UsageError: no task shows the attention of such models, the module computes no attention weights, an option does
            not fit the source, labels are not strings or do not fit the weights, there are too many heads or tokens, or
            matplotlib is not installed.
        ArtifactError: the model is not exported with its attention weights, or an input cannot be read.
        ParityError: the export is not verified.

    >>> from zoo.nn import MultiHeadAttention
    >>> from zoo.plots import attention
    >>> attention(MultiHeadAttention(8, num_heads=2), [[[0.0] * 8] * 3], labels=["to", "be", "seen"]).title
    'MultiHeadAttention: attention weights, from 0 (dark) to the largest of each head'
    """
    chosen = (names,) if isinstance(names, str) else tuple(names)
    if isinstance(source, str | os.PathLike):
        if labels is not None or row:
            raise UsageError("labels and row are for modules and weights", source, "leave them out")
        stored = ModelDirectory.open(Path(source))
        record = read_attention(stored, inputs, layers=layers, heads=heads, unverified=unverified)
        name = str(stored.description["name"]) + (" (not verified)" if unverified else "")
        kept = select_names([item.name for item in record.maps], chosen, ())
        maps = [item for item in record.maps if item.name in kept]
    else:
        if unverified:
            raise UsageError("only an export can be unverified", None, "leave it out")
        if is_module(source):
            name = type(source).__name__
            source, labels = module_weights(source, inputs, labels)
        elif inputs:
            raise UsageError("weights have no inputs", None, "give a model, or labels=...")
        else:
            name = ""
        maps = array_maps(source, names=chosen, layers=layers, heads=heads, row=row, labels=labels)
    count = sum(len(item.heads) for item in maps)
    if count > _MOST:
        raise UsageError(f"a plot shows at most {_MOST} heads, got {count}", name or None, "choose layers or heads")
    if token is not None:
        return _draw_lines(name, maps, token, title)
    return _draw_one(name, maps[0], title) if count == 1 else _draw_all(name, maps, title)


@drawn
def _draw_one(name: str, item: AttentionMap, title: str | None) -> Plot:
    """Draw one head with its tokens."""
    title = title or f"{_prefix(name)}attention, {item.name}, head {item.heads[0]}"
    queries, keys = item.queries.labels, item.keys.labels
    size = max(2.2, min(WIDTH - 1.5, 0.2 * max(len(queries), len(keys))))
    figure = new_figure(
        title, size * len(queries) / max(len(queries), len(keys)) + 1.4, width=max(4.2, size + 1.8, _width(title))
    )
    axes = figure.subplots()
    draw_map(axes, item.weights[0], "attention weight", low=0, gid="weights")
    for setter, axis_labels in ((axes.set_xticks, keys), (axes.set_yticks, queries)):
        places = _labelled(len(axis_labels))
        setter(places, [_label(axis_labels[place]) for place in places])
    axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0)
    axes.set(xlabel="key", ylabel="query")
    return Plot(title, figure)


@drawn
def _draw_all(name: str, maps: Sequence[AttentionMap], title: str | None) -> Plot:
    """Draw a small heat map for each head, in a row for each layer."""
    title = title or f"{_prefix(name)}attention weights, from 0 (dark) to the largest of each head"
    columns = max(len(item.heads) for item in maps)
    side = min(1.2, (WIDTH - 1) / columns)
    figure = new_figure(title, 0.6 + (side + 0.1) * len(maps), width=max(3.8, side * columns + 1, _width(title)))
    panels = figure.subplots(len(maps), columns, squeeze=False)
    has_kinds = len({layer_of(item.name)[0] for item in maps}) > 1
    for row, item in zip(panels, maps, strict=True):
        for axes in row[len(item.heads) :]:
            axes.set_visible(False)
        for axes, head, weights in zip(row, item.heads, item.weights, strict=False):
            axes.imshow(weights, cmap=MAP, vmin=0, aspect="auto", interpolation="nearest", gid=f"{item.name}-{head}")
            axes.set(xticks=[], yticks=[])
            if item is maps[0]:
                axes.set_title(f"head {head}" if columns <= 8 else str(head), loc="center")
        layer = layer_of(item.name)[1]
        row[0].set_ylabel(printable(_wrapped(item.name) if has_kinds or layer is None else f"layer {layer}"))
    return Plot(title, figure)


@drawn
def _draw_lines(name: str, maps: Sequence[AttentionMap], token: int, title: str | None) -> Plot:
    """Draw the weights of one query: queries on the left, keys on the right, lines as wide as their weights."""
    for item in maps:
        size = len(item.queries.labels)
        if not -size <= token < size:
            raise UsageError(f"no token {token} in {item.name}", name or None, f"choose from {-size} to {size - 1}")
        longest = max(size, len(item.keys.labels))
        if longest > _LABELLED:
            raise UsageError(
                f"lines are drawn for at most {_LABELLED} tokens, got {longest}", name or None, "leave out the token"
            )
    word = maps[0].queries.labels[token]
    title = title or f"{_prefix(name)}attention of token {token % len(maps[0].queries.labels)} ({_label(word)})"
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


def _labelled(count: int) -> list[int]:
    """Return the positions on an axis that have labels: every k-th, from 0."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=_LABELLED - 1, steps=[1, 2, 5, 10], integer=True).tick_values(0, count - 1)
    return sorted({round(tick) for tick in ticks if 0 <= tick < count})  # a single position has fractional ticks


def _prefix(name: str) -> str:
    return f"{name}: " if name else ""


def _width(title: str) -> float:
    """Return the width of a title in inches, at most that of a page."""
    return min(WIDTH, 0.085 * len(title))


def _wrapped(name: str) -> str:
    """Return the path of a module in lines that fit beside a heat map."""
    lines = [""]
    for part in re.split(r"(?<=\.)", name):
        if lines[-1] and len(lines[-1]) + len(part) > _WRAPPED:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _label(text: str) -> str:
    """Return a token's text, in which newlines, and spaces alone, can be seen."""
    shown = text if text.strip() else text.replace(" ", "\N{OPEN BOX}")
    return printable(shown.replace("\n", "\\n"))
