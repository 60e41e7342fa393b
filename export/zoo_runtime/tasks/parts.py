"""Base class of tasks that run the model several times for one input, such as once for each window of a long text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zoo.arrays import Array
from zoo_runtime.running.batching import batches
from zoo_runtime.running.text_runner import TextRunner, Tokens

__all__ = ["Parts", "PartsRunner"]


@dataclass(frozen=True)
class Parts(Tokens):
    """An input that takes several rows of a batch. ``ids`` are those of the longest."""

    rows: tuple[Tokens, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens that the model reads."""
        return sum(len(row.ids) for row in self.rows)


class PartsRunner(TextRunner):
    """Base class of tasks whose items are :class:`Parts`."""

    def compute_rows(self, items: Sequence[Any]) -> list[list[dict[str, Array]]]:
        """Return the outputs ``needs`` of each row of each item, in batches of at most ``batch_size`` rows."""
        rows = [replace(row, adapter=item.adapter) for item in items for row in item.rows]
        outputs_of: list[dict[str, Array]] = [{} for _ in rows]
        sizes = [(place, len(row.ids)) for place, row in enumerate(rows)]
        for batch in batches(sizes, self.batch_size, self.fits):
            outputs = self.compute([rows[place] for place in batch])
            for number, place in enumerate(batch):
                outputs_of[place] = {name: outputs[name][number] for name in self.needs}
        taken = iter(outputs_of)
        return [[next(taken) for _ in item.rows] for item in items]
