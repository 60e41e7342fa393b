"""ONNX export, parity and inference for the models of :mod:`zoo`, from their declared graphs alone.

Exporting and verifying import torch; opening a session and running a model do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_export.exporter import export_model
    from zoo_export.parity import verify_model
    from zoo_export.runtime import Answer, Generation, Pair, Runner, Session, TextRunner, Tokens, load_session
    from zoo_export.runtime_parity import compare_runtime
    from zoo_export.session import open_session

__all__ = [
    "Answer",
    "Generation",
    "Pair",
    "Runner",
    "Session",
    "TextRunner",
    "Tokens",
    "compare_runtime",
    "export_model",
    "load_session",
    "open_session",
    "verify_model",
]

_HOMES = dict.fromkeys(
    ("Answer", "Generation", "Pair", "Runner", "Session", "TextRunner", "Tokens", "load_session"), "runtime"
)
_HOMES |= {
    "compare_runtime": "runtime_parity",
    "export_model": "exporter",
    "open_session": "session",
    "verify_model": "parity",
}


def __getattr__(name: str) -> Any:
    """Import a function's module when the function is asked for."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"zoo_export.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'zoo_export' has no attribute {name!r}")
