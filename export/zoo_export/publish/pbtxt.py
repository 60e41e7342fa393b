"""The text format of protocol buffers, as far as configurations of Triton need it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["Block", "Word", "to_pbtxt"]

Block = dict[str, Any]
"""A message: fields by name. A list is a repeated field, and a dictionary a message."""


class Word(str):
    """A value that is written without quotes, such as that of an enumeration."""


def to_pbtxt(message: Block) -> str:
    """Return a message in the text format.

    >>> print(to_pbtxt({"name": "gpt", "input": [{"data_type": Word("TYPE_INT64"), "dims": [-1, 16]}]}))
    name: "gpt"
    input {
      data_type: TYPE_INT64
      dims: [-1, 16]
    }
    <BLANKLINE>
    """
    return "".join(f"{line}\n" for line in _lines(message))


def _lines(message: Block) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
            yield f"{name}: [{', '.join(map(_scalar, value))}]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                yield f"{name}: {_scalar(item)}"
            elif not item:
                yield f"{name} {{}}"
            else:
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(item))
                yield "}"


def _scalar(value: Any) -> str:
    return value if isinstance(value, Word) else json.dumps(value)
