"""Contradictions in the evidence of a verified export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.artifact.layout import export_file
from zoo.artifact.measured import Measured, digests_of, measured_outputs
from zoo.artifact.variants import PREFILL, variant_of
from zoo.errors import ArtifactError

__all__ = ["contradictions"]

_VERDICTS = ("answers", "certificate", "comparisons", "graphs", "greedy_decoding", "in_float32", "laws")
"""Fields in which nothing may have failed; ``tried`` has the precisions that were not chosen."""
_BOUNDS = (("mean_kl_divergence", "max_mean_kl_divergence", 1), ("mean_cosine", "min_mean_cosine", -1))
"""Measures of a certificate with their bounds, and 1 where the bound is the largest value that is allowed."""


def contradictions(evidence: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield each contradiction in the evidence of a verified export, in an order that equal evidence has, too.

    Args:
        evidence: the content of the file.
        name: the name of the file, which says how the export was compared.

    Raises:
        ArtifactError: the evidence is not what an export writes.
    """
    outputs = measured_outputs(evidence)
    yield from _missing(evidence, name, outputs)
    for item in outputs:
        yield from _beyond_limits(item, f"{item.name} at level {item.level}")
    yield from _other_tokens(evidence)
    for key in _VERDICTS:
        yield from _failures(evidence.get(key), key)
    yield from _losses(evidence)


def _missing(evidence: Mapping[str, Any], name: str, outputs: Sequence[Measured]) -> Iterator[str]:
    """Yield what was not compared, although exports with such evidence are compared output by output."""
    stem, _, variant = name.removesuffix(".json").partition(".")
    if stem == "evidence":
        runtime, _, variant = variant.partition(".")
        if not runtime.startswith("web-"):
            return  # by a third party, whose comparisons have their own form
    interface = variant_of(variant).interface
    if interface == "loop":
        return
    grid = evidence.get("grid")
    if not (outputs and isinstance(grid, dict) and grid.get("points")):
        yield "it says verified, but has no comparison of outputs"
    graphs = {item.graph for item in outputs} | ({PREFILL} if interface == "rows" else set())  # compared with the other
    compared = {export_file(graph, variant, "onnx") for graph in graphs}
    for file in digests_of(evidence):
        if file.endswith(".onnx") and file not in compared:
            yield f"it says verified, but has no comparison of {file}"


def _beyond_limits(item: Measured, where: str) -> Iterator[str]:
    """Yield what does not fit to a comparison that passed."""
    errors = item.errors
    kinds = ("local_error", "local_limit") if "local_error" in errors else ()
    try:
        numbers = [float(errors[key]) for key in ("max_abs_error", "limit", *kinds)]
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ArtifactError("not the errors of outputs that an export writes", "parity.json: graphs") from error
    measured = list(zip(numbers[::2], numbers[1::2], strict=True))
    if any(number < 0 for number in numbers):
        yield f"an error or a limit of {where} is negative"
    if "graph_jumps" not in errors and not all(error <= limit for error, limit in measured):
        yield f"it says verified, but the error of {where} exceeds its limit"
    if errors.get("passed") is not True:
        yield f"it says verified, but not that {where} passed"
    if errors.get("finite", True) is not True:
        yield f"it says verified, but {where} is not finite"


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
