"""Plain data from another process or from a cache, read as values of annotated types."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

__all__ = ["read_plain"]

T = TypeVar("T")


def read_plain(kind: type[T], value: Any, where: str = "the value") -> T:
    """Return parsed JSON as a value of a type.

    Args:
        kind: a dataclass or ``tuple[T, ...]``, of these and ``Mapping[str, T]``, ``str``, ``int``, ``float``, ``bool``,
            literals, ``Any``, and unions of these and None.
        value: the parsed JSON. Only lists and whole numbers are converted, where tuples and floats are expected.
        where: the name of the value in messages.

    Raises:
        ValueError: the value is not of that type, or has a number that is not finite where a float is expected.

    >>> read_plain(tuple[str, ...], ["a", "b"])
    ('a', 'b')
    >>> read_plain(tuple[int | None, ...], [1, True], "sizes")
    Traceback (most recent call last):
        ...
    ValueError: an item of sizes must be int or None, got bool
    """
    read: T = _read(kind, value, where)
    return read


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for alternative in arguments:
            if _is_like(alternative, value):
                return _read(alternative, value, where)
    elif origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif _is_like(kind, value):
        if dataclasses.is_dataclass(kind):
            return _read_fields(kind, value, where)
        if origin is tuple:
            return tuple(_read(arguments[0], item, f"an item of {where}") for item in value)
        if origin is not None:
            return {
                _read(str, key, where): _read(arguments[1], item, f"{where} of {key!r}") for key, item in value.items()
            }
        if kind is float and not abs(value) <= sys.float_info.max:
            raise ValueError(f"{where} must be finite")
        return float(value) if kind is float else value
    raise ValueError(f"{where} must be {_name(kind)}, got {type(value).__name__}")


def _is_like(kind: Any, value: Any) -> bool:
    """Return whether a value has the outer type of ``kind``."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is not None or dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    return type(value) in ((int, float) if kind is float else (kind,))


def _read_fields(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    required, fields = _fields(kind)
    if not required <= value.keys() <= fields.keys():
        wrong = min((required - value.keys()) | (value.keys() - fields.keys()))
        raise ValueError(f"{where} {'lacks' if wrong in required else 'has an unknown'} field {wrong!r}")
    return kind(**{name: _read(fields[name], item, f"{name} of {where}") for name, item in value.items()})


@cache
def _fields(kind: Any) -> tuple[frozenset[str], Mapping[str, Any]]:
    """Return the names of the fields without a default, and the type of every field."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    required = (f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing)
    return frozenset(required), {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _name(kind: Any) -> str:
    arguments: Sequence[Any] = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(_name, arguments))
    if kind is type(None):
        return "None"
    return "a mapping" if dataclasses.is_dataclass(kind) else getattr(kind, "__name__", str(kind))
