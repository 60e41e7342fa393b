"""Modules and parameters that torch does not know, because a module keeps them in a plain list or another object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from zoo.config import Config

__all__ = ["unregistered"]

_INTERNAL = vars(nn.Module()).keys()
_DEPTH = 4
"""How deep containers are searched, in containers."""


def unregistered(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each attribute that holds modules or parameters that are not registered, and what to do.

    They would be neither stored nor loaded, trained, moved to another device nor exported as weights. Modules without
    tensors, and those whose tensors are registered elsewhere, are not hidden.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name in _INTERNAL or isinstance(value, nn.Module | nn.Parameter):
                continue
            for item in _held(value, _DEPTH):
                tensors = [*item.parameters(), *item.buffers()] if isinstance(item, nn.Module) else [item]
                if any(id(tensor) not in known for tensor in tensors):
                    kind = "Module" if isinstance(item, nn.Module) else "Parameter"
                    what = "parameters of the modules" if kind == "Module" else "parameters"
                    where = f"{path}.{name}".strip(".")
                    yield f"{what} in {where} (a {type(value).__name__}) are not registered", _remedy(value, kind)
                    break


def _remedy(value: object, kind: str) -> str:
    """Return what to use instead of a container; ``kind`` is what it holds."""
    if isinstance(value, dict):
        return f"use nn.{kind}Dict"
    if isinstance(value, list | tuple | set | frozenset):
        return f"use nn.{kind}List"
    return f"make them attributes of the module, or use nn.{kind}List"


def _held(value: Any, depth: int) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that an object holds."""
    if isinstance(value, nn.Module | nn.Parameter):
        yield value
    elif depth:
        inner: Any = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            inner = value
        elif is_dataclass(value) and not isinstance(value, type | Config):
            inner = (getattr(value, item.name, None) for item in fields(value))
        for item in inner:
            yield from _held(item, depth - 1)
