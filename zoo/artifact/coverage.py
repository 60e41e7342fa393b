"""Coverage of conditions, as parity.json records it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.errors import ArtifactError

__all__ = ["abridged", "coverage_summary"]

_SHOWN = 3


def coverage_summary(evidence: Mapping[str, Any]) -> str | None:
    """Return how many outcomes of conditions a comparison of ONNX graphs shows, and which it does not.

    None if it looked at no conditions. Raises :class:`ArtifactError` if the evidence is not what an export writes.
    """
    try:
        parts = evidence.get("grid", {}).get("coverage", {}).values()
        conditions, outcomes = (sum(int(part[key]) for part in parts) for key in ("conditions", "outcomes"))
        unseen = [str(line) for part in parts for line in part["unseen"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            "not the coverage of conditions that an export writes", "parity.json: grid.coverage"
        ) from error
    if not conditions:
        return None
    rest = f"; not seen: {abridged(unseen)}" if unseen else ""
    return f"{outcomes - len(unseen)} of {outcomes} outcomes of {conditions} conditions seen{rest}"


def abridged(lines: Sequence[str]) -> str:
    """Return the first few different items of a list, with their numbers, and the number of others."""
    counts = Counter(lines)
    shown = [f"{line} ({count} times)" if count > 1 else line for line, count in list(counts.items())[:_SHOWN]]
    others = len(lines) - sum(list(counts.values())[:_SHOWN])
    return ", ".join(shown) + (f" and {others} more" if others else "")
