"""Plots of models and of the evidence for their exports, for papers and pages.

Each function returns a :class:`Plot`, which shows itself in a notebook and is written as SVG or PNG. They need
matplotlib, the extra ``plot``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.plots.attention_maps import attention
    from zoo.plots.bars import Distribution, distributions
    from zoo.plots.confusions import confusion
    from zoo.plots.encodings import positions
    from zoo.plots.evidence import coverage, parity
    from zoo.plots.key_search import memory
    from zoo.plots.learned_spans import span_masks, spans
    from zoo.plots.plot import Plot

__all__ = [
    "Distribution",
    "Plot",
    "attention",
    "confusion",
    "coverage",
    "distributions",
    "memory",
    "parity",
    "positions",
    "span_masks",
    "spans",
]

_HOMES = {
    "Plot": "zoo.plots.plot",
    "attention": "zoo.plots.attention_maps",
    "Distribution": "zoo.plots.bars",
    "distributions": "zoo.plots.bars",
    "confusion": "zoo.plots.confusions",
    "coverage": "zoo.plots.evidence",
    "memory": "zoo.plots.key_search",
    "parity": "zoo.plots.evidence",
    "positions": "zoo.plots.encodings",
    "span_masks": "zoo.plots.learned_spans",
    "spans": "zoo.plots.learned_spans",
}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used: some need torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo.plots' has no attribute {name!r}")
