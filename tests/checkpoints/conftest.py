"""Checkpoints are compared with one thread: their models are too small to share."""

from tests.export.conftest import one_thread

__all__ = ["one_thread"]
