"""The stepping interface on the profile ``serving``: the rows of a batch, each at its own length.

B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from zoo.arrays import Array
from zoo.errors import UsageError
from zoo_runtime.generation.stepper import check_mask, check_roll_back, check_rows, check_saved, check_tokens
from zoo_runtime.serving.rows import Rows, RowState

__all__ = ["RowDecoder"]


@dataclass(frozen=True)
class _Saved:
    """The past of a :class:`RowDecoder` at some length."""

    owner: object
    """Identifies the decoder."""
    read: Array
    states: Sequence[RowState]


class RowDecoder:
    """Decoder of one batch, a :class:`zoo_runtime.Stepper`.

    A row's padding is not stored, and takes none of its room. A row without room for its new tokens takes no part in a
    step, and its logits are NaN.

    Args:
        rows: the buffers, borrowed until the decoder is closed or no longer used.
        free: where to return them.
        count: B.
        constants: the inputs that stay the same at every step, by name, (B, ...).

    Raises:
        UsageError: the export has fewer rows, or an input is missing.
        ArtifactError: an input is longer than its buffer.
    """

    def __init__(self, rows: Rows, free: list[Rows], count: int, constants: Mapping[str, Array]) -> None:
        self._rows = rows
        self._release = weakref.finalize(self, free.append, rows)
        self._check_count(count)
        self.positions = rows.limit
        """Maximum length of a row, or None."""
        self._owner = object()
        self._places = list(range(count))
        """The row of the buffers of each row of the batch."""
        self._read = np.zeros((count, 0), bool)
        """Mask of the positions of each row that hold tokens, (B, length)."""
        for row, place in enumerate(self._places):
            rows.start(place, {name: array[row] for name, array in constants.items()})

    @property
    def rows(self) -> int:
        """B."""
        return len(self._places)

    @property
    def length(self) -> int:
        """Number of positions that were read, including padding."""
        return self._read.shape[1]

    @property
    def room(self) -> int | None:
        """Number of tokens that still fit into the emptiest row; None without a limit."""
        return None if self.positions is None else self.positions - int(self._rows.lengths[self._places].min())

    @property
    def can_roll_back(self) -> bool:
        """Whether the past consists of keys and values only."""
        return self._rows.partial

    def step(self, tokens: Array, mask: Array | None = None, *, every: bool = False) -> Array:
        """Read tokens, (B, T); return the logits of each row's last token, (B, V), or of all, (B, T, V), in float32.

        Logits of padding are NaN. See :meth:`zoo_runtime.Stepper.step`.

        Raises:
            UsageError: the tokens have the wrong shape, fit into no row, or the decoder is closed.
            ArtifactError: a token is not in the vocabulary.
        """
        self._check_open()
        name = self._rows.ids_name
        upper = self._rows.upper
        where = self._where
        tokens = check_tokens(tokens, self.rows, name=name, width=None, upper=upper, where=where)
        shape = (self.rows, tokens.shape[1])
        seen = np.ones(shape, bool) if mask is None else check_mask(mask, shape) > 0
        counts = seen.sum(1)
        if self.positions is not None:
            left = self.positions - self._rows.lengths[self._places]
            if (counts > left).all():
                problem = f"{counts.min()} tokens do not fit in the {left.max()} positions left of {self.positions}"
                raise UsageError(problem, self._where)
            seen = seen & (counts <= left)[:, None]
        new = {place: row[places] for place, row, places in zip(self._places, tokens, seen, strict=True)}
        by_row = self._rows.extend(new, every=every)
        self._read = np.concatenate((self._read, seen), 1)
        logits = np.full((*(shape if every else shape[:1]), self._rows.vocabulary), np.nan, np.float32)
        for row, place in enumerate(self._places):
            if (result := by_row.get(place)) is not None:
                assert isinstance(result, np.ndarray)  # errors have been raised
                logits[row, seen[row] if every else ...] = result if every else result[-1]
        return logits

    def take(self, rows: Array) -> None:
        """Continue with the given rows, in the given order. Rows may repeat.

        Raises :class:`UsageError` if the export has fewer rows.
        """
        self._check_open()
        rows = check_rows(rows, self.rows, self._where)
        self._check_count(len(rows))
        sources = [self._places[row] for row in rows]
        free = [place for place in range(self._rows.count) if place not in sources]
        self._places = []
        for source in sources:
            place = source
            if source in self._places:
                place = free.pop(0)
                self._rows.copy(source, place)
            self._places.append(place)
        self._read = self._read[rows]

    def roll_back(self, count: int) -> None:
        """Forget the last positions of every row. Raises :class:`UsageError` if the past holds states."""
        self._check_open()
        count = check_roll_back(count, self, self._where)
        length = self.length - count
        for place, forgotten in zip(self._places, self._read[:, length:].sum(1).tolist(), strict=True):
            self._rows.shorten(place, forgotten)
        self._read = self._read[:, :length]

    def save(self) -> _Saved:
        """Return a copy of the past."""
        self._check_open()
        return _Saved(self._owner, self._read, [self._rows.save(place) for place in self._places])

    def restore(self, saved: _Saved) -> None:
        """Return to a saved past and its rows."""
        self._check_open()
        check_saved(saved, self._owner, self._where)
        self._read = saved.read
        self._places = list(range(len(saved.states)))
        for place, state in zip(self._places, saved.states, strict=True):
            self._rows.restore(place, state)

    def close(self) -> None:
        """Return the buffers."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return f"graph {self._rows.graph.name}"

    def _check_open(self) -> None:
        if not self._release.alive:
            raise UsageError("the stepper is closed", self._where, "open another")

    def _check_count(self, count: int) -> None:
        if count > self._rows.count:
            remedy = "give fewer inputs or beams, or export with a larger --fix batch=N"
            raise UsageError(f"the export has {self._rows.count} rows, not {count}", self._where, remedy)
