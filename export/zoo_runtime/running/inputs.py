"""Inputs of a session, with their results and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from zoo.errors import ZooError

__all__ = ["Answer", "Pair", "are_ids", "is_pair", "is_single", "label", "numbered", "result_of", "texts_of"]


@dataclass
class Answer:
    """One input with its result or error."""

    number: int
    """Counted from 1."""
    input: Any
    result: dict[str, Any] = field(default_factory=dict)
    error: ZooError | None = None
    """The reason why there is no result."""
    id: Any = None
    """The input's id in its file, if it comes from a file."""
    adapter: str | None = None
    """The name of the adapter to run it with; None for the model itself."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row of the input's file, if it is to be written with the result."""


class Pair(NamedTuple):
    """One input of two texts, or of two lists of token ids, for tasks that read pairs.

    Inside a list of inputs, any list or tuple of two is a pair. Passed alone, a plain list of two texts is two inputs,
    so a single pair must be a ``Pair``.
    """

    first: str | Sequence[int]
    """A text, or all token ids before the second part, such as BERT's ``[CLS] first [SEP]``."""
    second: str | Sequence[int] | Sequence[str]
    """A text, or all remaining token ids; or a list of texts, for tasks that compare them with the first."""


def is_single(inputs: object, *, chats: bool) -> bool:
    """Whether the argument of :meth:`zoo_runtime.Session.run` is one input, not a list of them.

    Args:
        inputs: the argument.
        chats: whether inputs are chats, lists of messages.
    """
    if not isinstance(inputs, list | tuple) or isinstance(inputs, Pair):
        return True
    parts = int | np.integer | Mapping if chats else int | np.integer
    return bool(inputs) and isinstance(inputs[0], parts)


def numbered(inputs: Iterable[Any], adapter: str | Iterable[str | None] | None) -> Iterator[Answer]:
    """Return inputs that have no results yet, with the adapter of all of them, or one for each."""
    adapters = repeat(adapter) if adapter is None or isinstance(adapter, str) else adapter
    pairs = enumerate(zip(inputs, adapters, strict=False), 1)
    return (Answer(number, value, adapter=name) for number, (value, name) in pairs)


def result_of(answer: Answer) -> dict[str, Any]:
    """Return the result of an input, or raise its error."""
    if answer.error is not None:
        raise answer.error
    return answer.result


def are_ids(value: object) -> bool:
    """Whether an input is a list of token ids."""
    return isinstance(value, list | tuple) and all(
        isinstance(token, int | np.integer) and not isinstance(token, bool) for token in value
    )


def is_pair(value: object) -> bool:
    """Whether an input is a pair of texts or of token id lists."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and (all(isinstance(part, str) for part in value) or all(are_ids(part) for part in value))
    )


def texts_of(value: object) -> tuple[str, ...]:
    """Return the texts of an input: one, a pair, or a pair of one and a list; empty for token ids and other inputs."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Pair) and isinstance(value.first, str) and isinstance(value.second, list | tuple):
        return (value.first, *value.second) if all(isinstance(text, str) for text in value.second) else ()
    return tuple(value) if is_pair(value) and isinstance(value[0], str) else ()  # type: ignore[index, arg-type]


def label(answer: Answer) -> str:
    """Name of an input in human-readable output."""
    return ", ".join(map(repr, texts_of(answer.input))) or f"input {answer.number}"
