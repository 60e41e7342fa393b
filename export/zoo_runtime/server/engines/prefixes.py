"""A cache for the pasts of common beginnings of prompts.

A prompt is read in chunks of the size of ``prefill``, from its first token on. What such a call adds to a row depends
on the tokens so far alone: neither on the tokens that follow nor on other rows. So a text that begins with the same
whole chunks continues with copies of what an earlier text has read, to the same bits as if it had read them itself.
Parts of chunks and single tokens are read by calls of other sizes, which round otherwise: they are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from zoo.arrays import Array
from zoo.errors import UsageError
from zoo_runtime.serving.rows import Rows

__all__ = ["PrefixCache"]

_Key = tuple[int, bytes]
"""Number of the preceding chunk, and the tokens of this one."""
_ROOT = 0


@dataclass(frozen=True)
class _Chunk:
    number: int
    before: _Key | None
    arrays: Sequence[Array]

    @property
    def size(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class PrefixCache:
    """Whole chunks of prompts, of which the least recently used make room for new ones.

    Args:
        rows: the rows that texts are read in.
        limit: memory for the arrays, in bytes.

    Raises:
        UsageError: the rows are not in the memory of the CPU, or have other inputs, on which a past depends, too.
    """

    def __init__(self, rows: Rows, limit: int) -> None:
        if rows.device != "cpu":
            raise UsageError(
                f"prefixes cannot be kept for rows on {rows.device}", None, "leave out --prefix-cache-bytes"
            )
        if rows.constants:
            raise UsageError("prefixes cannot be kept for rows with other inputs", ", ".join(sorted(rows.constants)))
        self.rows = rows
        self.limit = limit
        self.used = 0
        """Bytes of the arrays."""
        self.reused = 0
        """Number of tokens that were not read, because an earlier text has read them."""
        self._chunks: OrderedDict[_Key, _Chunk] = OrderedDict()
        """The least recently used is first. A chunk is used later than those that follow it, which leave before it."""
        self._numbers = count(_ROOT + 1)
        self._ends: dict[int, _Key | None] = {}
        """The last chunk of each row whose next chunk may be kept."""

    def start(self, row: int, prompt: Sequence[int], *, reuse: bool = True) -> int:
        """Continue a row, which has just been started, with the longest known beginning of a prompt.

        Args:
            row: the row.
            prompt: its prompt.
            reuse: False if all tokens are to be read, for the logits of each.

        Returns:
            Its number of tokens. At least one token is left to be read, for its logits.
        """
        self._ends.pop(row, None)
        self._ends[row] = None
        matches = list(self._known(prompt)) if reuse else []
        if matches:
            self.rows.restore_parts(row, [self._chunks[key].arrays for key in matches])
            self._ends[row] = matches[-1]
            self._touch(matches[-1])
        self.reused += len(matches) * self.rows.chunk
        return len(matches) * self.rows.chunk

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Keep what a row has just read in one call, if that was a whole chunk that follows a kept one."""
        size = self.rows.chunk
        begun = int(self.rows.lengths[row]) - len(tokens)
        if row not in self._ends:
            return
        if len(tokens) != size or begun % size or size < 2 or not self.rows.is_sound(row):
            del self._ends[row]
            return
        before = self._ends[row]
        if before is not None and before not in self._chunks:  # it has made room for others
            del self._ends[row]
            return
        key = (_ROOT if before is None else self._chunks[before].number, _packed(tokens))
        if key not in self._chunks:
            chunk = _Chunk(next(self._numbers), before, self.rows.save_part(row, begun))
            if chunk.size > self.limit:
                del self._ends[row]
                return
            self._chunks[key] = chunk
            self.used += chunk.size
        self._touch(key)
        while self.used > self.limit:
            self.used -= self._chunks.popitem(last=False)[1].size
        self._ends[row] = key

    def move(self, source: int, target: int) -> None:
        """Note that the text of a row continues in another one: see :meth:`zoo_runtime.serving.rows.Rows.move`."""
        self._ends.pop(target, None)
        if source in self._ends:
            self._ends[target] = self._ends.pop(source)

    def _known(self, prompt: Sequence[int]) -> Iterator[_Key]:
        """Yield the keys of the kept chunks with which a prompt begins."""
        size = self.rows.chunk
        number = _ROOT
        for start in range(0, len(prompt) - size, size):
            key = (number, _packed(prompt[start : start + size]))
            if key not in self._chunks:
                return
            number = self._chunks[key].number
            yield key

    def _touch(self, key: _Key | None) -> None:
        """Mark a chunk as used, and then each one before it."""
        while key is not None and key in self._chunks:
            self._chunks.move_to_end(key)
            key = self._chunks[key].before


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()
