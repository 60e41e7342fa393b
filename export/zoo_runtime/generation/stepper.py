"""The stepping interface of decoders: token by token, with a past that can be reordered, shortened and saved.

B rows, T new tokens, V vocabulary, H width of an embedding.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol, Self

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError, UsageError

__all__ = [
    "Array",
    "Stepper",
    "check_mask",
    "check_padding",
    "check_roll_back",
    "check_rows",
    "check_saved",
    "check_tokens",
]


class Stepper(Protocol):
    """A decoder that reads a batch of texts in steps, and returns the logits of their next tokens.

    Created by :meth:`zoo_runtime.Session.stepper`. Everything that tasks need to sample, to search with beams and to
    stream can be written with these methods, for every kind of past. A stepper belongs to one thread.
    """

    @property
    def rows(self) -> int:
        """B, which :meth:`take` may change."""
        ...

    @property
    def length(self) -> int:
        """Number of positions in the past, including padding."""
        ...

    @property
    def room(self) -> int | None:
        """Number of positions that still fit; None if the model declares no limit."""
        ...

    @property
    def can_roll_back(self) -> bool:
        """Whether :meth:`roll_back` is supported: the past consists of keys and values of all positions."""
        ...

    def step(self, tokens: Array, mask: Array | None = None, *, every: bool = False) -> Array:
        """Read tokens, and return the logits of the last position, (B, V) in float32, for the tokens that follow.

        The arrays that are returned are valid until the next step.

        Args:
            tokens: token ids (B, T), or embeddings (B, T, H) for a graph that reads those.
            mask: (B, T), 0 for padding; all 1 by default. Ignored by graphs without a mask. If a model supports padding
                on the left alone, a row has padding before its first token only, in this step and in later ones.
            every: return the logits of all positions, (B, T, V).

        Raises:
            UsageError: the tokens or the mask have the wrong shape or type, padding is in a place that the model does
                not support, the tokens do not fit in the positions, or the stepper is closed.
            ArtifactError: a token is not in the vocabulary.
        """
        ...

    def take(self, rows: Array) -> None:
        """Continue with the given rows, in the given order. Rows may repeat, and others are dropped.

        Raises :class:`zoo.UsageError` if one does not exist, or there is none.
        """
        ...

    def roll_back(self, count: int) -> None:
        """Forget the last ``count`` positions of every row.

        Raises :class:`zoo.UsageError` if there are fewer, or the past holds states, or windows limit it: use
        :meth:`save`.
        """
        ...

    def save(self) -> Any:
        """Return the past, to be restored later, any number of times. States are not copied, keys and values may be."""
        ...

    def restore(self, saved: Any) -> None:
        """Return to a past of this stepper that :meth:`save` returned, including its rows.

        Raises :class:`zoo.UsageError` for anything else.
        """
        ...

    def close(self) -> None:
        """Release the past. Also done at the end of a ``with`` block."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


# Checks of arguments.


def check_tokens(tokens: Any, rows: int, *, name: str, width: int | None, upper: int | None, where: str) -> Array:
    """Return the tokens of a step as an array: ids (B, T), or embeddings (B, T, H) of a given width.

    Raises:
        UsageError: they have another shape or type.
        ArtifactError: an id is not below ``upper``.
    """
    array = _as_array(tokens, name, where)
    shape = (rows, *array.shape[1:2], *([] if width is None else [width]))
    if array.shape != shape or not all(array.shape[1:2]) or array.ndim < 2:
        kind = "token ids (rows, tokens)" if width is None else "embeddings (rows, tokens, width)"
        raise UsageError(f"{name} must be {kind} of {rows} rows, got {array.shape}", where)
    if array.dtype.kind not in ("iu" if width is None else "fiu"):
        kind = "integers" if width is None else "numbers"
        raise UsageError(f"{name} must be {kind}, got {array.dtype}", where)
    if width is None and upper is not None and (array.min() < 0 or array.max() >= upper):
        row, place = np.argwhere((array < 0) | (array >= upper))[0]
        raise ArtifactError(f"token {array[row, place]} is not in the vocabulary of {upper}", f"row {row}")
    return array


def check_mask(mask: Any, shape: tuple[int, int]) -> Array:
    """Return the mask of a step as an array of integers, (B, T).

    Raises :class:`UsageError` for another shape, and for other values than 1 for a token and 0 for padding.
    """
    array = _as_array(mask, "the mask", None)
    if array.shape != shape:
        raise UsageError(f"the mask must be {shape} like the tokens, got {array.shape}")
    if array.dtype.kind not in "biu" or not ((array == 0) | (array == 1)).all():
        raise UsageError("the mask must be 1 for tokens and 0 for padding")
    return array.astype(np.int64)


def check_padding(mask: Array, started: Array) -> None:
    """Raise :class:`UsageError` for padding after a row's first token, where models with padding on the left have none.

    Args:
        mask: see :func:`check_mask`, (B, T).
        started: (B,), whether each row has a token in its past.
    """
    before = np.maximum.accumulate(np.concatenate((started[:, None], mask > 0), axis=1), axis=1)[:, 1:]
    if late := np.flatnonzero((before & (mask == 0)).any(axis=1)).tolist():
        problem = f"row {late[0]} has padding after its first token, where the model does not support it"
        raise UsageError(problem, None, "read rows of different lengths in steppers of their own")


def check_rows(rows: Any, count: int, where: str) -> Array:
    """Return numbers of rows as an array, (N,).

    Raises :class:`UsageError` unless there is one, and all are from 0 to ``count`` - 1.
    """
    array = _as_array(rows, "rows", where)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise UsageError(f"rows must be a list of one or more numbers of rows, got {rows!r}"[:200], where)
    if array.min() < 0 or array.max() >= count:
        wrong = array[(array < 0) | (array >= count)][0]
        raise UsageError(f"there is no row {wrong}: the stepper has {count}", where, "count rows from 0")
    return array


def check_roll_back(count: Any, stepper: Stepper, where: str) -> int:
    """Return the number of positions to forget.

    Raises :class:`UsageError` unless it is from 0 to the stepper's length, and 0 if the past cannot be shortened.
    """
    try:
        number = operator.index(count)
    except TypeError:
        raise UsageError(f"the number of positions to roll back must be an integer, got {count!r}", where) from None
    if number < 0:
        raise UsageError(f"the number of positions to roll back must be at least 0, got {number}", where)
    if number > stepper.length:
        raise UsageError(f"cannot roll back {number} of {stepper.length} positions", where)
    if number and not stepper.can_roll_back:
        problem = "the past holds states, or the last positions of a window, which cannot be rolled back"
        raise UsageError(problem, where, "save the past before, and restore it")
    return number


def check_saved(saved: Any, owner: object, where: str) -> None:
    """Raise :class:`UsageError` unless a past was saved by the stepper that is to restore it."""
    if getattr(saved, "owner", None) is not owner:
        raise UsageError("not a past that this stepper has saved", where, "give what its save() returned")


def _as_array(value: Any, name: str, where: str | None) -> Array:
    try:
        return np.asarray(value)
    except ValueError:
        raise UsageError(f"{name} must be rows of equal length", where) from None
