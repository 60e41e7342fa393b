"""Rotary positions in real numbers, as ONNX has no operations on most complex ones.

B batch, T tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["rotate", "use_real_rotations"]

_HEADS = {"modeling_deepseek_v2": 1, "modeling_llama4": 2}
"""The files that rotate by complex numbers, and there the axis of heads."""


def use_real_rotations(model: nn.Module) -> None:
    """Let modules that return complex rotations, (B, T, D/2), return cosines and sines instead, (B, T, D/2, 2)."""
    for module in model.modules():
        if _file(type(module)) in _HEADS and hasattr(module, "inv_freq"):
            module.register_forward_hook(_waves, with_kwargs=True)


def _waves(module: Any, args: tuple[Any, ...], options: Mapping[str, Any], _: Tensor) -> Tensor:
    positions = options["position_ids"] if "position_ids" in options else args[1]  # (B, T)
    angles = positions[..., None].float() * module.inv_freq.float()
    waves: Tensor = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)) * module.attention_scaling
    return waves


def rotate(theirs: Callable[..., Any], q: Tensor, k: Tensor, waves: Tensor) -> Any:
    """Rotate pairs of neighbours in queries and keys, (B, H, T, D) or (B, T, H, D), by :func:`use_real_rotations`."""
    if (axis := _HEADS.get(_file(theirs))) is None:
        return theirs(q, k, waves)
    cos, sin = (part.unsqueeze(axis) for part in waves.unbind(-1))
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2).type_as(x)


def _file(item: Any) -> str:
    """Return the name of the file that has a class or function."""
    return str(item.__module__).rpartition(".")[2]
