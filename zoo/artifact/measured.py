"""The files and the errors of outputs, as parity.json records them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.errors import ArtifactError

__all__ = ["LEVEL_NAMES", "Measured", "deciding", "digests_of", "measured_outputs", "worst_of"]

LEVEL_NAMES = {
    "off": "optimisations off",
    "all": "optimisations on",
    "exact": "products in float32",
    "perturbed": "other weights",
    "faint": "other weights, scaled by 1/8",
    "perturbed_exact": "other weights, products in float32",
}
"""The levels of a comparison, in words."""
_EXACT = frozenset({"exact", "perturbed_exact"})
"""The levels of a quantised graph at which it may differ from its reference by rounding in float32 alone."""


@dataclass(frozen=True)
class Measured:
    """The errors of one output at one level."""

    graph: str
    output: str
    level: str
    errors: Mapping[str, Any]
    """The fields of parity.json: ``max_abs_error``, ``limit``, ``worst_point``, ..."""
    in_float32: bool = False
    """Whether the graph of a half precision was widened to float32."""

    @property
    def share(self) -> float:
        """The error as a part of its limit: above 1, the output fails."""
        error, limit = self.errors["max_abs_error"], self.errors["limit"]
        return float(error / limit) if limit else 0.0

    @property
    def name(self) -> str:
        """The output, with its graph unless that is the only one."""
        return self.output if self.graph == "model" else f"{self.graph} {self.output}"

    @property
    def how(self) -> str:
        """How the graph was run, where its limit is one of rounding in float32 although its precision is lower."""
        if self.in_float32:
            return "computed in float32"
        return LEVEL_NAMES["exact"] if self.level in _EXACT else ""


def digests_of(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the SHA-256 of each exported file as the evidence lists them."""
    listed = evidence.get("files")
    return listed if isinstance(listed, dict) else {}


def measured_outputs(evidence: Mapping[str, Any]) -> list[Measured]:
    """Return the errors of every output of every graph at every level; none of an export that was compared otherwise.

    Raises :class:`ArtifactError` if the evidence is not what an export writes.
    """
    try:
        found = [*_each(evidence.get("graphs", {}), False), *_each(evidence.get("in_float32", {}), True)]
        for item in found:
            float(item.share)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError("not the errors of outputs that an export writes", "parity.json: graphs") from error
    return found


def _each(graphs: Mapping[str, Any], in_float32: bool) -> Iterator[Measured]:
    for graph, part in graphs.items():
        for output, levels in part["outputs"].items():
            for level, errors in levels.items():
                yield Measured(graph, output, level, errors, in_float32)


def deciding(outputs: Iterable[Measured]) -> list[Measured]:
    """Return the comparisons with the strictest limits, on which the verdict depends.

    Where the activations of a quantised graph are rounded to int8, or a graph computes in a half precision, PyTorch's
    own error is that of the precision, and so is the limit. Comparisons that leave only rounding in float32 show
    smaller faults.
    """
    every = list(outputs)
    strict = [item for item in every if item.in_float32] or [item for item in every if item.level in _EXACT]
    return strict or every


def worst_of(outputs: Iterable[Measured]) -> Measured | None:
    """Return the output that is nearest to its limit, of those on which the verdict depends; None if there are none."""
    return max(deciding(outputs), key=lambda item: item.share, default=None)
