"""timm, imported without a torchvision that works: its build in package registries does not match every torch."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

__all__ = ["add_operators", "import_timm"]

_MODULES = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


class _Stand(ModuleType):
    """A module of torchvision, of which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def import_timm() -> Any:
    """Import timm, or skip. Without torchvision, of which its models need a class for ``isinstance`` alone, timm cannot
    prepare images.
    """
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install --no-deps -c constraints.txt timm")
    if "timm" in sys.modules:
        return sys.modules["timm"]
    add_operators()
    if importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    stands = {f"torchvision{name}": _Stand(f"torchvision{name}") for name in _MODULES}
    stands["torchvision"].ops = stands["torchvision.ops"]
    stands["torchvision"].transforms = stands["torchvision.transforms"]
    stands["torchvision.transforms"].functional = stands["torchvision.transforms.functional"]
    stands["torchvision.transforms.functional"].InterpolationMode = _InterpolationMode
    stands["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    sys.modules |= stands
    try:
        return importlib.import_module("timm")
    finally:
        for name in stands:  # other libraries must not find it
            del sys.modules[name]


def add_operators() -> None:
    """Declare the operators that a torchvision lacks that was built for another torch, so that it can be imported."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor a, Tensor b, float t) -> Tensor")
