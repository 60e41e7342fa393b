"""Running exported models on ONNX Runtime. Imports neither torch nor onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_runtime.files.vector_search import Match, search_vectors
    from zoo_runtime.generation.options import Generation
    from zoo_runtime.generation.stepper import Stepper
    from zoo_runtime.onnx_runtime.providers import open_session
    from zoo_runtime.plots import plot_answers
    from zoo_runtime.running.inputs import Answer, Pair
    from zoo_runtime.running.loading import load_session
    from zoo_runtime.running.runner import Runner
    from zoo_runtime.running.session import Session
    from zoo_runtime.running.text_runner import TextRunner, Tokens

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
    "Answer": "zoo_runtime.running.inputs",
    "Generation": "zoo_runtime.generation.options",
    "Match": "zoo_runtime.files.vector_search",
    "Pair": "zoo_runtime.running.inputs",
    "Runner": "zoo_runtime.running.runner",
    "Session": "zoo_runtime.running.session",
    "Stepper": "zoo_runtime.generation.stepper",
    "TextRunner": "zoo_runtime.running.text_runner",
    "Tokens": "zoo_runtime.running.text_runner",
    "load_session": "zoo_runtime.running.loading",
    "open_session": "zoo_runtime.onnx_runtime.providers",
    "plot_answers": "zoo_runtime.plots",
    "search_vectors": "zoo_runtime.files.vector_search",
}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, so that importing the package stays cheap."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo_runtime' has no attribute {name!r}")
