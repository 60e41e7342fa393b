"""Whether two modules are built alike: submodules, tensors, ties, attributes and hooks, not the values of tensors."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

__all__ = ["all_tensors", "difference"]

_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""
_HOOKS = {"_forward_pre_hooks": "forward pre-hooks", "_forward_hooks": "forward hooks"}
"""Hooks that can change what a module computes."""
_DEPTH = 8
"""Depth of nested attributes that are compared."""


def difference(module: nn.Module, built: nn.Module) -> str | None:
    """Return the first difference of a module from one that was built again, as a phrase, or None.

    Values of tensors, modes and hooks of gradients are not compared, nor are attributes that are no data, beyond their
    class.
    """
    return next(_differences(module, built), None)


def _differences(module: nn.Module, built: nn.Module) -> Iterator[str]:
    parts, others = (dict(item.named_modules(remove_duplicate=False)) for item in (module, built))
    for path in sorted(parts.keys() ^ others.keys()):
        yield f"{'it has no' if path in others else 'it alone has the'} submodule {path}"
    for path, part in parts.items():
        if _name(part) != _name(other := others[path]):
            yield f"{path or 'it'} is {_name(part)}, but is built as {_name(other)}"
        yield from _attribute_differences(path, part, other)
        for kind, hooks in _HOOKS.items():
            added, others_hooks = (list(getattr(item, kind).values()) for item in (part, other))
            if not _equal(added, others_hooks, _DEPTH):
                counts = f"{len(added)}, but {len(others_hooks)} as built"
                yield f"the {hooks} of {path or 'the module'} are others ({counts})"
    yield from _tensor_differences(module, built)


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _tensor_differences(module: nn.Module, built: nn.Module) -> Iterator[str]:
    tensors, others = all_tensors(module), all_tensors(built)
    for name in sorted(tensors.keys() ^ others.keys()):
        yield f"{'it has no' if name in others else 'it alone has the'} tensor {name}"
    for name, tensor in tensors.items():
        for aspect in ("shape", "dtype"):
            value, other = getattr(tensor, aspect), getattr(others[name], aspect)
            if value != other:
                shown = [str(tuple(item) if aspect == "shape" else item) for item in (value, other)]
                yield f"{name} is {shown[0]}, but is built as {shown[1]}"
    ties, other_ties = _first_names(tensors), _first_names(others)
    for name, first in ties.items():
        if first != other_ties[name]:
            yield f"{name} is the tensor {first}, but is built as the tensor {other_ties[name]}"


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each tensor, which may have several, by each name."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _attribute_differences(path: str, part: nn.Module, other: nn.Module) -> Iterator[str]:
    values, others = (
        {name: value for name, value in vars(item).items() if name not in _OWN and not name.startswith("_zoo_")}
        for item in (part, other)
    )
    for name in [*values, *(name for name in others if name not in values)]:
        where = f"{path}.{name}".lstrip(".")
        if name not in others:
            yield f"{where} was set after it was made"
        elif name not in values:
            yield f"{where} was deleted after it was made"
        elif not _equal(values[name], others[name], _DEPTH):
            yield f"{where} is {_short(values[name])}, but is built as {_short(others[name])}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _captured(function: types.FunctionType) -> list[Any]:
    """Return what distinguishes functions of one name, such as lambdas: code, defaults and captured values."""
    code = function.__code__
    try:
        cells = inspect.getclosurevars(function).nonlocals
    except ValueError:  # a variable that is not set yet
        cells = {}
    return [function.__module__, code.co_code, code.co_names, function.__defaults__, cells]


def _equal(one: Any, other: Any, depth: int) -> bool:
    """Whether two attributes are equal as data. Objects of other classes are compared by their attributes."""
    if one is other or depth == 0:
        return True
    if isinstance(one, bool | int | float | complex | str | bytes):
        return type(one) is type(other) and (one == other or repr(one) == repr(other))
    if type(one).__qualname__ != type(other).__qualname__:
        return False
    if isinstance(one, nn.Module):
        return _name(one) == _name(other)
    if isinstance(one, Tensor):
        return one.shape == other.shape
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_equal(one[key], other[key], depth - 1) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_equal(a, b, depth - 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return one == other
    if isinstance(one, partial):
        return all(_equal(getattr(one, part), getattr(other, part), depth - 1) for part in ("func", "args", "keywords"))
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        return one.__qualname__ == other.__qualname__ and _equal(_captured(one), _captured(other), depth - 1)
    if isinstance(one, types.BuiltinFunctionType | type):
        return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
    if isinstance(one, types.MethodType):
        return one.__func__.__qualname__ == other.__func__.__qualname__
    attributes = (getattr(item, "__dict__", None) for item in (one, other))
    mine, theirs = attributes
    if mine is None or theirs is None:  # written in C, or with slots
        return "__eq__" not in vars(type(one)) or bool(one == other)
    return _equal(mine, theirs, depth - 1)
