"""Plots of models and of the evidence for their exports, for papers and pages.

Each function returns a :class:`Plot`, which shows itself in a notebook and is written as SVG or PNG. They need
matplotlib, the extra ``plot``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.plots.evidence import coverage, parity
    from zoo.plots.plot import Plot

__all__ = ["Plot", "coverage", "parity"]

_HOMES = {
    "Plot": "zoo.plots.plot",
    "coverage": "zoo.plots.evidence",
    "parity": "zoo.plots.evidence",
}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used: some need torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo.plots' has no attribute {name!r}")
