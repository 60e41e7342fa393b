"""Plots of confusion matrices: how often each class is answered for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from zoo.errors import UsageError
from zoo.plots.plot import MAP, WIDTH, Plot, drawn, new_figure, printable, shortened

__all__ = ["confusion"]

MOST = 1000
"""Maximum number of classes in a plot."""
_NAMED = 40
"""Number of classes up to which they are named."""
_COUNTED = 20
"""Number of classes up to which counts are written into cells."""
_LONGEST = 24
"""Maximum number of characters of a name."""
_DARK = 0.5
"""Share of a row below which its cell is dark, so that the count in it is white."""


@drawn
def confusion(title: str, names: Sequence[str], counts: Mapping[str, Iterable[tuple[str, str, int]]]) -> Plot:
    """Plot confusion matrices side by side: a row for each label, a column for each answer.

    Colours are shares of a row, so that the diagonal shows the recall of a class. Rows without targets are white.

    Args:
        title: the title, with the name of the model.
        names: the classes, in order.
        counts: for each matrix, by its name, the label, the answer and the number of targets that have both; pairs
            that do not occur are left out.

    Raises:
        UsageError: there are no classes or more than 1,000, or matplotlib is not installed.
    """
    if not 0 < len(names) <= MOST:
        raise UsageError(f"a plot shows 1 to {MOST:,} classes, got {len(names):,}", None, "evaluate without a figure")
    side = min(WIDTH, max(2.4, 0.9 + 0.3 * min(len(names), _COUNTED)))
    width = max(3.6, len(counts) * side + 0.8)
    figure = new_figure(title, side + 0.6, width=width)
    panels = figure.subplots(1, len(counts), squeeze=False)[0]
    places = {name: place for place, name in enumerate(names)}
    for axes, (name, pairs) in zip(panels, counts.items(), strict=True):
        matrix = np.zeros((len(names), len(names)), np.int64)
        for label, answer, count in pairs:
            matrix[places[label], places[answer]] += count
        totals = matrix.sum(1, keepdims=True)
        shares = np.where(totals > 0, matrix / np.maximum(totals, 1), np.nan)
        image = axes.imshow(
            shares, cmap=MAP, vmin=0, vmax=1, interpolation="nearest", aspect="equal", gid=f"confusion-{name}"
        )
        axes.set(xlabel="answer (class)", ylabel="label (class)", title=printable(name))
        if len(names) <= _NAMED:
            shown = [shortened(item, _LONGEST) for item in names]
            axes.set_xticks(range(len(names)), shown, rotation=90 if max(map(len, shown)) > 3 else 0)
            axes.set_yticks(range(len(names)), shown)
        if len(names) <= _COUNTED:
            for row, column in np.argwhere(matrix):
                colour = "white" if shares[row, column] < _DARK else "black"
                axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", color=colour, fontsize=7)
    bar = figure.colorbar(image, ax=list(panels), label="share of the label's inputs", aspect=16)
    bar.outline.set_visible(False)
    return Plot(title, figure)
