"""The stepping interface of decoders: token by token, with a past that can be reordered, shortened and saved.

B rows, T new tokens, V vocabulary, H width of an embedding.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np

__all__ = ["Array", "Stepper"]

Array = np.ndarray[Any, Any]


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
        """Whether :meth:`roll_back` is supported: the past consists of keys and values only."""
        ...

    def step(self, tokens: Array, mask: Array | None = None, *, every: bool = False) -> Array:
        """Read tokens, and return the logits of the last position, (B, V) in float32, for the tokens that follow.

        The arrays that are returned are valid until the next step.

        Args:
            tokens: token ids (B, T), or embeddings (B, T, H) for a graph that reads those.
            mask: (B, T), 0 for padding; all 1 by default. Ignored by graphs without a mask.
            every: return the logits of all positions, (B, T, V).

        Raises:
            UsageError: the tokens have the wrong shape, do not fit in the positions, or the stepper is closed.
        """
        ...

    def take(self, rows: Array) -> None:
        """Continue with the given rows, in the given order. Rows may repeat, and others are dropped."""
        ...

    def roll_back(self, count: int) -> None:
        """Forget the last ``count`` positions of every row.

        Raises :class:`zoo.UsageError` if there are fewer, or the past holds states: use :meth:`save`.
        """
        ...

    def save(self) -> Any:
        """Return the past, to be restored later, any number of times. States are not copied, keys and values may be."""
        ...

    def restore(self, saved: Any) -> None:
        """Return to a past of this stepper that :meth:`save` returned, including its rows."""
        ...

    def close(self) -> None:
        """Release the past. Also done at the end of a ``with`` block."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
