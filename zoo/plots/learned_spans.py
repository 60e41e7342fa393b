"""Plots of learned attention spans. H heads, L layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch

from zoo.errors import UsageError
from zoo.nn import AdaptiveSpan
from zoo.plots.plot import COLOURS, STYLES, Plot, draw_map, drawn, new_figure, printable
from zoo.plots.stored import StoredModel, as_floats

__all__ = ["span_masks", "spans"]

_SHOWN = 16
"""Maximum number of heads, or of layers, whose spans are written into the cells."""
_PANELS = 4
"""Number of layers whose masks are drawn by default."""


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
    modules = _filled(model)
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


@drawn
def span_masks(directory: str | os.PathLike[str], *, layers: Sequence[int] = (), heads: Sequence[int] = ()) -> Plot:
    """Plot the mask m_z(x) of each head over the distance x of a key: 1 within its span z, then a ramp down to 0.

    Sukhbaatar et al. 2019, section 2.2 and figure 2.

    Args:
        directory: a model directory.
        layers: numbers of layers with learned spans, from 0; by default the first few.
        heads: numbers of heads, from 0; by default all.

    Raises:
        UsageError: the model has no learned spans, or no such layer or head, or matplotlib is not installed.
        ArtifactError: the model directory is damaged.
    """
    model = StoredModel(directory)
    modules = _filled(model)
    chosen = list(dict.fromkeys(layers)) or list(range(min(len(modules), _PANELS)))
    counts = {layer: len(modules[layer][1].length) for layer in chosen if 0 <= layer < len(modules)}
    for layer in chosen:
        if layer not in counts:
            raise UsageError(f"there is no layer {layer}", model.name, f"choose from 0 to {len(modules) - 1}")
    for head in heads:
        if not 0 <= head < min(counts.values()):
            raise UsageError(f"there is no head {head}", model.name, f"choose from 0 to {min(counts.values()) - 1}")
    longest = max(module.limit + module.ramp for _, module in modules)
    distances = torch.arange(longest + 1)
    title = f"{model.name}: masks of attention spans, ramp of {modules[0][1].ramp}"
    figure = new_figure(title, 0.5 + 1.9 * len(chosen))
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in zip(chosen, panels, strict=True):
        path, module = modules[layer]
        masks, ends = as_floats(module(distances)), as_floats(module.clamped())  # (H, S), (H)
        for head, colour, style in zip(heads or range(len(masks)), cycle(COLOURS), cycle(STYLES), strict=False):
            axes.plot(distances.numpy(), masks[head], color=colour, linestyle=style, linewidth=1.2,
                      label=f"{head} (z = {ends[head]:.3g})", gid=f"mask-{layer}-{head}")  # fmt: skip
        axes.set_title(printable(path.partition(".attention")[0]))
        axes.set(ylabel="mask m_z(x)", ylim=(-0.05, 1.05))
        axes.grid()
        axes.legend(title="head", loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + (len(masks) - 1) // _SHOWN)
    panels[-1].set_xlabel("distance x of the key (tokens)")
    return Plot(title, figure)


def _filled(model: StoredModel) -> list[tuple[str, AdaptiveSpan]]:
    """Return the modules with learned spans, with their weights, by path. Raises :class:`UsageError` without any."""
    modules = [*model.find(AdaptiveSpan)]
    if not modules:
        what = f"{model.spec.architecture.name} has no learned attention spans"
        raise UsageError(what, model.name, "choose a model with zoo.nn.AdaptiveSpan")
    for path, module in modules:
        model.fill(path, module)
    return modules
