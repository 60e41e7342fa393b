"""Numbers of the evidence as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.artifact import Measured

__all__ = ["NONE", "count", "number", "plain", "point_text", "share", "shares", "worst_by_level"]

NONE = "-"


def number(value: Any) -> str:
    """Format an error or a limit. Raises ``TypeError`` or ``ValueError`` for what is no number."""
    return f"{value:.1e}" if value else "0"


def count(value: Any) -> str:
    """Format a whole number."""
    return f"{int(value):,}"


def share(part: float | None) -> str:
    """Format a part of a limit as a percentage; that of a limit of 0 is left out."""
    return NONE if part is None else f"{100 * part:.0f} %"


def shares(item: Measured) -> tuple[float | None, float | None]:
    """Return the error and the local error of an output as parts of their limits."""
    pairs = (("max_abs_error", "limit"), ("local_error", "local_limit"))
    return tuple(  # type: ignore[return-value]
        float(item.errors[error] / item.errors[limit]) if item.errors.get(limit) else None for error, limit in pairs
    )


def worst_by_level(outputs: Sequence[Measured]) -> list[Measured]:
    """Return, for each graph and level, the output that is nearest to one of its limits."""
    groups: dict[tuple[bool, str, str], list[Measured]] = {}
    for item in outputs:
        groups.setdefault((item.in_float32, item.graph, item.level), []).append(item)
    return [max(group, key=lambda item: max(part or 0.0 for part in shares(item))) for group in groups.values()]


def point_text(point: Mapping[str, Any]) -> str:
    """Describe an input: rows, tokens, tokens before them, padding and further sizes."""
    batch, length, past = (int(point[key]) for key in ("batch", "length", "past"))
    text = f"{batch} row{'s' * (batch != 1)}, {length} token{'s' * (length != 1)}"
    text += f" after {past}" if past else ""
    padding = str(point["padding"])
    text += "" if padding == "none" else f", {padding}" if padding == "empty row" else f", padding {padding}"
    known = {"batch", "length", "past", "padding"}
    return text + "".join(f", {key} {plain(value)}" for key, value in point.items() if key not in known)


def plain(value: Any) -> str:
    """Return JSON data as one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
