"""Calls of classes on batches of whole images, which have no padding."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import pytorch_utils

__all__ = ["whole_images"]


@contextmanager
def whole_images(model: nn.Module) -> Iterator[None]:
    """Replace functions that a class uses by others with the same values for images without padding.

    - Attention has no mask, whose other outcomes no image would meet.
    - ``len`` returns a size that a trace can follow: with Python's, the graph of RT-DETR would hold for one batch size.
    - Positions are computed in each call: those that transformers keeps may come from a trace, or a call in float64.
    """
    module: Any = sys.modules[type(model).__module__]
    replaced: list[tuple[Any, str, Any]] = [(module, "len", _length)]
    if hasattr(module, "create_bidirectional_mask"):
        replaced.append((module, "create_bidirectional_mask", _no_mask))
    if hasattr(pytorch_utils, "is_torchdynamo_compiling"):
        replaced.append((pytorch_utils, "is_torchdynamo_compiling", _always))
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(_replacing(owner, name, function))
        yield


@contextmanager
def _replacing(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Give a module another global within a block, in place of its own or of a built-in one."""
    names = vars(owner)
    theirs = names.get(name)
    names[name] = function
    try:
        yield
    finally:
        if theirs is None:
            del names[name]
        else:
            names[name] = theirs


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else len(value)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _always() -> bool:
    return True
