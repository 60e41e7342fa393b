"""Globals of modules, replaced for the length of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

__all__ = ["Replacement", "replaced"]

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""A module, the name of a global of it or of a built-in function, and what makes another value of its value, which is
None for a built-in function."""
_REPLACING = threading.RLock()
"""Held while globals are replaced, which all threads see."""


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Give globals other values within a block."""
    with _REPLACING if replacements else nullcontext():
        before: list[tuple[Any, str, Any]] = []
        for module, name, make in replacements:
            names: Any = vars(module)
            before.append((names, name, names.get(name)))
            names[name] = make(names.get(name))
        try:
            yield
        finally:
            for names, name, value in before:
                if value is None:
                    del names[name]
                else:
                    names[name] = value
