"""The copy task: repeat a random sequence (Graves, Wayne and Danihelka 2014, Neural Turing Machines, section 4.1)."""

from __future__ import annotations

import string
from collections.abc import Iterator

from zoo.training.data.order import generator

__all__ = ["rows"]

_SPLITS = {"train": (0, 20_000), "validation": (1, 500), "test": (2, 1_000)}
"""The key and the number of rows of each split."""
_LENGTHS = (1, 21)


def rows(split: str) -> Iterator[dict[str, str]]:
    """Yield texts of 1 to 20 random letters, and the same as target."""
    key, count = _SPLITS[split]
    for index in range(count):
        random = generator(key, index)
        text = "".join(random.choice(list(string.ascii_lowercase), int(random.integers(*_LENGTHS))))
        yield {"text": text, "target": text}
