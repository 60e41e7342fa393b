"""Plots of learned attention spans. H heads, L layers."""

from __future__ import annotations

import os

import numpy as np

from zoo.errors import UsageError
from zoo.nn import AdaptiveSpan
from zoo.plots.plot import COLOURS, Plot, draw_map, drawn, new_figure, printable
from zoo.plots.stored import StoredModel, as_floats

__all__ = ["spans"]

_SHOWN = 16
"""Maximum number of heads, or of layers, whose spans are written into the cells."""


@drawn
def spans(directory: str | os.PathLike[str]) -> Plot:
    """Plot the attention span that each head has learned, by layer, and the mean of each layer.

    Spans are those of the modules :class:`zoo.nn.AdaptiveSpan`: the number of tokens with full weight (Sukhbaatar et
    al. 2019, section 2.2).

    Args:
        directory: a model directory.

    Raises:
        UsageError: the model has no learned spans, or matplotlib is not installed.
        ArtifactError: the model directory is damaged.
    """
    model = StoredModel(directory)
    modules = model.find(AdaptiveSpan)
    if not modules:
        what = f"{model.spec.architecture.name} has no learned attention spans"
        raise UsageError(what, model.name, "choose a model with zoo.nn.AdaptiveSpan")
    for path, module in modules:
        model.fill(path, module)
    values = [as_floats(module.clamped()) for _, module in modules]
    heads = max(map(len, values))
    table = np.full((len(values), heads), np.nan)
    for layer, row in enumerate(values):
        table[layer, : len(row)] = row
    limit, ramp = max(module.limit for _, module in modules), modules[0][1].ramp
    title = f"{model.name}: attention spans of heads, at most {limit} tokens, ramp of {ramp}"
    figure = new_figure(title, max(2.2, 1.2 + 0.3 * min(len(values), 20)))
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    draw_map(left, table, "span (tokens)", low=0, gid="spans")
    if max(table.shape) <= _SHOWN:
        for layer, row in enumerate(values):
            for head, span in enumerate(row):
                colour = "white" if span < 0.55 * np.nanmax(table) else "black"
                left.text(head, layer, f"{span:.3g}", ha="center", va="center", color=colour)
        left.set_xticks(range(heads))
        left.set_yticks(range(len(values)), [printable(path.partition(".attention")[0]) for path, _ in modules])
    left.tick_params(length=0)
    right.tick_params(axis="y", length=0, labelleft=False)
    left.set(xlabel="head", ylabel="layer")
    means = [row.mean() for row in values]
    bars = right.barh(range(len(values)), means, 0.7, color=COLOURS[0])
    for bar in bars:
        bar.set_gid("mean")
    right.set(xlabel="mean span (tokens)")
    right.grid(axis="x")
    return Plot(title, figure)
