"""Batches of inputs of one length, where they have the bits of single inputs.

Nothing guarantees that: kernels choose the order of additions by the sizes of a product. But the order depends on sizes
only, not on numbers. So a batch of each size and length is compared with its inputs alone when it first occurs, on all
numbers that the graph returns, and such batches are used from then on if all bits were the same.

This holds if no operator chooses sizes by numbers, as a mixture of experts does, or scales by the largest value of the
batch, as int8 does. Graphs with such operators are not batched.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.classification import TextClassification
from zoo_runtime.tasks.encoders import Embed, FillMask

__all__ = ["MOST", "Batches", "is_dependent"]

MOST = 8
"""Largest number of inputs in a batch. The others are powers of two, so that there are few sizes to compare."""
_TASKS = (Embed, FillMask, TextClassification)
"""Tasks whose result for an input depends on nothing but the graph's outputs for it."""
_DEPENDENT = ("NonZero", "Compress", "Unique", "If", "Loop", "Scan", "DynamicQuantizeLinear")
"""Operators whose sizes or scales depend on numbers."""


class Batches:
    """Decides which inputs are answered together.

    Args:
        session: the model.
    """

    def __init__(self, session: Session) -> None:
        plain = session.export.variant in ("", "cpu") and session.export.dtype == "float32"
        self._possible = session.provider == "cpu" and plain and len(session.graphs) == 1 and not is_dependent(session)
        self._same: dict[tuple[str, int, int], bool] = {}
        """Whether batches of a graph, a size and a length have the bits of single inputs."""

    def key(self, runner: Runner[Any], item: Any) -> Hashable | None:
        """Return what inputs that are answered together have in common; None for an input that is answered alone."""
        return (id(runner), runner.size(item)) if self._possible and type(runner) in _TASKS else None

    def answer(self, runner: Runner[Any], items: Sequence[Any]) -> Sequence[Any]:
        """Return the results of inputs with one key."""
        if len(items) == 1:
            return runner.answer(items)
        assert isinstance(runner, _TASKS)
        kind = (runner.graph.name, len(items), runner.size(items[0]))
        if self._same.get(kind):
            return runner.answer(items)
        results = [result for item in items for result in runner.answer([item])]
        if kind not in self._same and len({tuple(item.ids) for item in items}) == len(items):
            self._same[kind] = _have_same_bits(runner, items)
        return results


def _have_same_bits(runner: Embed | FillMask | TextClassification, items: Sequence[Tokens]) -> bool:
    """Return whether a graph's outputs for a batch have the bits of those for its inputs alone."""
    together = runner.compute(items)
    for place, item in enumerate(items):
        for name, array in runner.compute([item]).items():
            if array[0].tobytes() != np.ascontiguousarray(together[name][place]).tobytes():
                return False
    return True


def is_dependent(session: Session) -> bool:
    """Return whether a graph has an operator whose sizes or scales depend on numbers."""
    data = b"".join((session.path / name).read_bytes() for name in session.export.graph_files.values())
    # In the file, the name of an operator follows the tag of its field, 4, and its length.
    return any(bytes([4 << 3 | 2, len(kind)]) + kind.encode() in data for kind in _DEPENDENT)
