"""Plots of probabilities, such as those of the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zoo.errors import UsageError
from zoo.plots.plot import COLOURS, WIDTH, Plot, drawn, new_figure, shortened

__all__ = ["MOST", "Distribution", "distributions"]

MOST = 12
"""Maximum number of distributions in a plot."""
_COLUMNS = 3
_LONGEST = 40
"""Maximum number of characters of a title or label."""
_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Probabilities for one input."""

    title: str
    """The input."""
    items: Sequence[tuple[str, float]]
    """The name and the probability of each outcome, in the order in which they are drawn."""
    exclusive: bool = True
    """Whether exactly one outcome occurs, so that the probabilities of all outcomes add up to 1."""


@drawn
def distributions(title: str, found: Sequence[Distribution]) -> Plot:
    """Plot distributions as bars, one panel each. What their sum lacks to 1 is written below.

    Args:
        title: the title, with the name of the model.
        found: the distributions.

    Raises:
        UsageError: there are none or more than 12, one is empty or not of probabilities, or matplotlib is not
            installed.
    """
    if not 0 < len(found) <= MOST:
        raise UsageError(f"a plot shows 1 to {MOST} distributions, got {len(found)}", None, "give other inputs")
    for item in found:
        values = [value for _, value in item.items]
        if not values or not all(0 <= value <= 1 + _ROUNDING for value in values):
            raise UsageError("not a distribution of probabilities", item.title)
    columns = min(_COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    most = max(len(item.items) for item in found)
    figure = new_figure(title, 0.5 + rows * (0.8 + 0.17 * most), width=WIDTH if columns > 1 else WIDTH / 2)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, item in zip(panels, found, strict=False):
        _draw(axes, item)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    return Plot(title, figure)


def _draw(axes: Any, item: Distribution) -> None:
    labels, values = [_short(name) for name, _ in item.items], [value for _, value in item.items]
    bars = axes.barh(range(len(values)), values, 0.75, color=COLOURS[0])
    for bar in bars:
        bar.set_gid("probability")
    axes.bar_label(bars, [_percent(value) for value in values], padding=2)
    axes.set_yticks(range(len(values)), labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.25 * max(values) or 1)
    axes.locator_params(axis="x", nbins=4)
    rest = 1 - sum(values)
    axes.set_xlabel(
        f"probability (all others: {_percent(rest)})" if item.exclusive and rest > _ROUNDING else "probability"
    )
    axes.set_title(_short(item.title))


def _percent(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _short(text: str) -> str:
    return shortened(text.replace("\n", "\\n"), _LONGEST)
