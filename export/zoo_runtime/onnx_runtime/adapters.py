"""Names and numbers of the low-rank adapters in the graphs of the variant ``adapters``."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.errors import UsageError, close_to
from zoo.terminal import shown

__all__ = ["ADAPTER_IDS", "BASE", "number_of"]

ADAPTER_IDS = "adapter_ids"
"""Graph input (batch,), int64: the number of each row's adapter; 0 is the model without one."""
BASE = "base"
"""Name of number 0."""


def number_of(name: str | None, names: Sequence[str], where: object) -> int:
    """Return the number of an adapter; 0 for None and for ``base``.

    Raises :class:`UsageError` if there is no adapter of this name.
    """
    if name in (None, BASE):
        return 0
    if not names:
        remedy = "open the variant adapters, created by zoo export --onnx --adapter DIR"
        raise UsageError(f"no adapter {shown(name)}: this export has none", where, remedy)
    if name not in names:
        guess = close_to(str(name), names)
        choices = f"known: {', '.join(names)}"
        raise UsageError(f"no adapter {shown(name)}", where, f"{guess} {choices}" if guess else choices)
    return names.index(name) + 1
