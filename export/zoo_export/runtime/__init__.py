"""Running exported models: sessions, tasks and generation. Nothing here imports torch."""

from zoo_export.runtime.generation import Generation
from zoo_export.runtime.runner import Answer, Pair, Runner, TextRunner, Tokens
from zoo_export.runtime.session import Session, load_session

__all__ = ["Answer", "Generation", "Pair", "Runner", "Session", "TextRunner", "Tokens", "load_session"]
