"""Fixtures for checkpoint tests: a single thread, since the models are tiny, and timm if it is installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exported import one_thread
from tests.timm_library import add_operators, import_timm

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def operators() -> None:
    """Let a torchvision that does not match torch be imported, by timm and transformers."""
    add_operators()


@pytest.fixture
def timm() -> Any:
    """Import timm, or skip."""
    return import_timm()
