"""Contradictions in the evidence of a verified export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zoo.artifact import measured_outputs
from zoo.errors import ArtifactError

__all__ = ["contradictions"]

_VERDICTS = ("answers", "certificate", "comparisons", "graphs", "greedy_decoding", "in_float32", "laws")
"""Fields in which nothing may have failed; ``tried`` has the precisions that were not chosen."""
_BOUNDS = (("mean_kl_divergence", "max_mean_kl_divergence", 1), ("mean_cosine", "min_mean_cosine", -1))
"""Measures of a certificate with their bounds, and 1 where the bound is the largest value that is allowed."""


def contradictions(evidence: Mapping[str, Any], *, compares_outputs: bool) -> Iterator[str]:
    """Yield each contradiction in the evidence of a verified export, in an order that equal evidence has, too.

    Args:
        evidence: the content of the file.
        compares_outputs: whether such an export is compared output by output.

    Raises:
        ArtifactError: the evidence is not what an export writes.
    """
    outputs = measured_outputs(evidence)
    if compares_outputs and not (outputs and isinstance(evidence.get("grid"), dict) and evidence["grid"].get("points")):
        yield "it says verified, but has no comparison of outputs"
    for item in outputs:
        where = f"{item.name} at level {item.level}"
        if item.share < 0:
            yield f"the error of {where} is negative"
        if item.share > 1 and "graph_jumps" not in item.errors:
            yield f"it says verified, but the error of {where} exceeds its limit"
        if item.errors.get("passed") is not True:
            yield f"it says verified, but not that {where} passed"
        if item.errors.get("finite", True) is not True:
            yield f"it says verified, but {where} is not finite"
    yield from _other_tokens(evidence)
    for key in _VERDICTS:
        yield from _failures(evidence.get(key), key)
    yield from _losses(evidence)


def _other_tokens(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield the levels at which the likeliest tokens differ without a near-tie."""
    try:
        for level, item in (evidence.get("logits") or {}).items():
            if item["argmax_disagreements"]:
                yield f"it says verified, but likeliest tokens differ at level {level}"
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError("not the tokens that an export writes", "parity.json: logits") from error


def _failures(value: Any, where: str) -> Iterator[str]:
    """Yield the places where something did not pass, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            place = f"{where}.{key}"
            if (key == "passed" and item is not True) or (where == "laws" and item == "failed"):
                yield f"it says verified, but {place} is {item}"
            yield from _failures(item, place)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _failures(item, f"{where}[{number}]")


def _losses(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield the measures of a smaller precision that are beyond their bounds."""
    certificate = evidence.get("certificate")
    if certificate is None:
        return
    try:
        for output, measures in certificate["outputs"].items():
            for name, bound, sign in _BOUNDS:
                if name in measures and not sign * (measures[name] - certificate[bound]) <= 0:
                    yield f"it says verified, but the {name} of {output} is beyond {bound}"
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError("not the loss that an export writes", "parity.json: certificate") from error
