"""Calls of classes on batches of whole images, without what depends on values of a mask of padding."""

from __future__ import annotations

import sys
from builtins import len as builtin_len
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["whole_images"]


@contextmanager
def whole_images(model: nn.Module) -> Iterator[None]:
    """Replace functions in the module of a class by others with the same values for images without padding.

    Attention has no mask, whose other outcomes no image would meet. ``len`` returns a size that a trace can follow:
    with Python's, the graph of RT-DETR would hold for one batch size.
    """
    functions = vars(sys.modules[type(model).__module__])
    theirs = {name: functions[name] for name in _REPLACEMENTS if name in functions}
    functions.update({name: _REPLACEMENTS[name] for name in (*theirs, "len")})
    try:
        yield
    finally:
        del functions["len"]
        functions.update(theirs)


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else builtin_len(value)


def _no_mask(**_: Any) -> None:
    return None


_REPLACEMENTS: dict[str, Callable[..., Any]] = {"create_bidirectional_mask": _no_mask, "len": _length}
