"""Running exported models on ONNX Runtime. Imports neither torch nor onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_runtime.generation.options import Generation
    from zoo_runtime.plots import plot_answers
    from zoo_runtime.providers import open_session
    from zoo_runtime.runner import Answer, Pair, Runner, TextRunner, Tokens
    from zoo_runtime.session import Session, load_session
    from zoo_runtime.stepper import Stepper
    from zoo_runtime.vectors import Match, search_vectors

__all__ = [
    "Answer",
    "Generation",
    "Match",
    "Pair",
    "Runner",
    "Session",
    "Stepper",
    "TextRunner",
    "Tokens",
    "load_session",
    "open_session",
    "plot_answers",
    "search_vectors",
]

_HOMES = {
    "Answer": "zoo_runtime.runner",
    "Generation": "zoo_runtime.generation.options",
    "Match": "zoo_runtime.vectors",
    "Pair": "zoo_runtime.runner",
    "Runner": "zoo_runtime.runner",
    "Session": "zoo_runtime.session",
    "Stepper": "zoo_runtime.stepper",
    "TextRunner": "zoo_runtime.runner",
    "Tokens": "zoo_runtime.runner",
    "load_session": "zoo_runtime.session",
    "open_session": "zoo_runtime.providers",
    "plot_answers": "zoo_runtime.plots",
    "search_vectors": "zoo_runtime.vectors",
}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, so that importing the package stays cheap."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo_runtime' has no attribute {name!r}")
