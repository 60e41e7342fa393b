"""Long answers in JSON: limited, and encoded in parts, between which other threads run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zoo_runtime.files.results import plain
from zoo_runtime.server.request_error import RequestError

__all__ = ["MOST_NUMBERS", "encode_json"]

MOST_NUMBERS = 2**20
"""Maximum count of the numbers of an answer in JSON, which has about 20 bytes for each."""
_AT_ONCE = 4096


def encode_json(body: Mapping[str, Any], remedy: str | None = None) -> bytes:
    """Return a body in JSON. Arrays become lists, and other types strings.

    Args:
        body: the body.
        remedy: how a client can get an answer with fewer numbers; None if they are limited already.

    Raises:
        RequestError: it has more than :data:`MOST_NUMBERS` numbers, counted before they are encoded.
    """
    if remedy is not None and (count := _numbers(body)) > MOST_NUMBERS:
        problem = f"the answer has {count} numbers, and in JSON at most {MOST_NUMBERS} are allowed: {remedy}"
        raise RequestError(400, problem, "answer_too_large")
    return "".join(_parts(body)).encode()


def _numbers(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_numbers, value)) if _has_parts(value) else len(value)
    return isinstance(value, int | float)


def _parts(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in parts. A call of the encoder keeps other threads from running, so each is short."""
    if isinstance(value, Mapping):
        for place, (name, content) in enumerate(value.items()):
            yield f"{',' if place else '{'}{_dumped(str(name))}:"
            yield from _parts(content)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple | np.ndarray) and _has_parts(value):
        for place, content in enumerate(value):
            yield "," if place else "["
            yield from _parts(content)
        yield "]"
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        for start in range(0, len(value), _AT_ONCE):
            yield ("," if start else "[") + _dumped(plain(value[start : start + _AT_ONCE], nulls=False))[1:-1]
        yield "]" if len(value) else "[]"
    else:
        yield _dumped(plain(value, nulls=False))


def _has_parts(value: Any) -> bool:
    """Return whether the items of a list are lists or objects."""
    return value.ndim > 1 and len(value) > 0 if isinstance(value, np.ndarray) else any(map(_is_part, value))


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple | np.ndarray)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
