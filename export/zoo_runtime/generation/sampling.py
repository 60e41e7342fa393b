"""Greedy decoding and sampling for any decoder that returns logits.

B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from zoo.arrays import Array
from zoo_runtime.generation.choices import Choices, Continuation
from zoo_runtime.generation.stepper import Stepper

__all__ = ["continue_rows"]


def continue_rows(
    stepper: Stepper, ids: Array, mask: Array, rows: Sequence[Continuation], choose: Choices
) -> Iterator[Continuation]:
    """Generate until all rows have ended; yield each row after each of its tokens.

    Args:
        stepper: a decoder with an empty past.
        ids: (B, T), the prompts, padded on the left.
        mask: (B, T).
        rows: B continuations; those that have already ended stay unchanged.
        choose: picks a token from logits.
    """
    live = list(rows)
    logits = stepper.step(ids, mask)
    while any(row.open for row in live):
        tokens = choose(logits, live)
        for row, token in zip(live, tokens.tolist(), strict=True):
            if row.open:
                row.append(token)
                yield row
        left = [place for place, row in enumerate(live) if row.open]
        if not left:
            return
        if 2 * len(left) <= len(live):  # finished rows cost as much as others
            stepper.take(np.array(left))
            live, tokens = [live[place] for place in left], tokens[left]
        logits = stepper.step(tokens[:, None])
