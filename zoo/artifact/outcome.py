"""The outcome of a comparison in short: at how many inputs, the outputs nearest to their limits, the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.artifact.measured import Measured, measured_outputs, worst_of
from zoo.errors import ArtifactError

__all__ = ["compared_at", "loss_of", "worst_by_graph"]

_MALFORMED = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


def compared_at(evidence: Mapping[str, Any]) -> str:
    """Return at how many inputs, or generated tokens, an export was compared; empty if the evidence says nothing.

    Raises :class:`ArtifactError` if the evidence is not what an export writes.
    """
    try:
        if "comparisons" in evidence:
            levels = [level for part in evidence["comparisons"].values() for level in part["levels"].values()]
            tokens, ties = (sum(int(level[key]) for level in levels) for key in ("tokens", "near_ties"))
            return f"{tokens:,} tokens, {ties:,} near-ties"
        grid = evidence.get("grid")
        if not grid:
            return ""
        left = f" ({int(grid['left_out']):,} of the full grid left out)" if grid["left_out"] else ""
        return f"{len(grid['points']):,} inputs{left}"
    except _MALFORMED as error:
        raise ArtifactError("not the inputs that an export writes", "parity.json: grid") from error


def worst_by_graph(evidence: Mapping[str, Any]) -> dict[str, Measured]:
    """Return, for each graph, the output nearest to its limit in the comparisons on which the verdict depends.

    Raises :class:`ArtifactError` if the evidence is not what an export writes.
    """
    outputs: dict[str, list[Measured]] = {}
    for item in measured_outputs(evidence):
        outputs.setdefault(item.graph, []).append(item)
    found = {graph: worst_of(items) for graph, items in outputs.items()}
    return {graph: item for graph, item in found.items() if item is not None}


def loss_of(evidence: Mapping[str, Any]) -> str:
    """Return what a precision costs, with the bound: the largest mean divergence, or the smallest mean cosine.

    Empty for an export in the model's own precision.

    Raises :class:`ArtifactError` if the evidence is not what an export writes.
    """
    try:
        certificate = evidence.get("certificate")
        if not certificate:
            return ""
        outputs = list(certificate["outputs"].values())
        texts = []
        if kl := [item["mean_kl_divergence"] for item in outputs if "mean_kl_divergence" in item]:
            texts.append(f"mean KL divergence {max(kl):.1e} nats, at most {certificate['max_mean_kl_divergence']:g}")
        if cosines := [item["mean_cosine"] for item in outputs if "mean_cosine" in item]:
            texts.append(f"mean cosine {min(cosines):.4f}, at least {certificate['min_mean_cosine']:g}")
        return "; ".join(texts)
    except _MALFORMED as error:
        raise ArtifactError("not the loss that an export writes", "parity.json: certificate") from error
