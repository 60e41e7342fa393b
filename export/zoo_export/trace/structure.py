"""Comparison of modules by what a trace of them depends on, except the values of their tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["named_tensors", "structure"]


_PLAIN = vars(nn.Module())
"""Attributes of every module."""


def structure(module: nn.Module) -> Hashable:
    """Key under which modules may share one trace."""
    order: dict[int, int] = {}
    sharing = tuple(order.setdefault(id(tensor), len(order)) for _, tensor in named_tensors(module))
    return _kind(module), sharing


def _kind(module: nn.Module) -> Hashable:
    tensors = {**module._parameters, **module._buffers}
    values = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
    return (
        type(module),
        tuple((name, None if t is None else (type(t), t.shape, t.dtype)) for name, t in tensors.items()),
        tuple((key, _token(value)) for key, value in values.items() if key not in _PLAIN or value != _PLAIN[key]),
        tuple((name, None if child is None else _kind(child)) for name, child in module._modules.items()),
    )


def _token(value: Any) -> Hashable:
    """Key that is equal for values with the same effect on a trace; unhashable objects only equal themselves."""
    if isinstance(value, list | tuple):
        return type(value), tuple(_token(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((_token(key), _token(item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
