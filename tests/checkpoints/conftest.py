"""Fixtures for checkpoint tests: a single thread, since the models are tiny, and timm if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.exported import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def operators() -> Iterator[None]:
    """Register stubs for operators missing from a torchvision that does not match torch, so that it can be imported."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor a, Tensor b, float t) -> Tensor")
    yield


@pytest.fixture
def timm(operators: None) -> Any:
    """Import timm, or skip."""
    if not all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        pytest.skip("timm and torchvision are not installed")
    return importlib.import_module("timm")
