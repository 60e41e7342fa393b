"""Modules that a user's own code builds, for architectures that wrap them: factories, calls by name, graphs as data.

Importing this package does not import torch; the names that build or call modules do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo.factories import check_reference
from zoo.modules.graph_data import graph_data, read_graphs

if TYPE_CHECKING:
    from zoo.modules.calls import call_by_name, named_results
    from zoo.modules.factory import SharedModule, build_module, store_buffers

__all__ = [
    "SharedModule",
    "build_module",
    "call_by_name",
    "check_reference",
    "graph_data",
    "named_results",
    "read_graphs",
    "store_buffers",
]

_HOMES = {
    **dict.fromkeys(("call_by_name", "named_results"), "zoo.modules.calls"),
    **dict.fromkeys(("SharedModule", "build_module", "store_buffers"), "zoo.modules.factory"),
}


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import the modules that need torch on first use."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo.modules' has no attribute {name!r}")
