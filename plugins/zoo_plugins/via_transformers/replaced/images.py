"""Calls of classes on batches of whole images, which have no padding."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import pytorch_utils

from zoo_plugins.via_transformers.replaced.globals import Replacement, replaced

__all__ = ["whole_images"]


def whole_images(model: nn.Module) -> AbstractContextManager[None]:
    """Replace functions that a class uses by others with the same values for images without padding.

    - Attention has no mask, whose other outcomes no image would meet.
    - ``len`` returns a size that a trace can follow: with Python's, the graph of RT-DETR would hold for one batch size.
    - Checks that tensors fit together, which read their values, are left out.
    - Positions are computed in each call: those that transformers keeps may come from a trace, or a call in float64.
    """
    module: Any = sys.modules[type(model).__module__]
    replacements: list[Replacement] = [(module, "len", lambda _: _length)]
    if hasattr(module, "create_bidirectional_mask"):
        replacements.append((module, "create_bidirectional_mask", lambda _: _nothing))
    if hasattr(module, "torch_compilable_check"):
        replacements.append((module, "torch_compilable_check", lambda _: _nothing))
    if hasattr(pytorch_utils, "is_torchdynamo_compiling"):
        replacements.append((pytorch_utils, "is_torchdynamo_compiling", lambda _: _always))
    return replaced(replacements)


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else len(value)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _always() -> bool:
    return True
