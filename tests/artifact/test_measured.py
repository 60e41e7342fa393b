"""The errors of outputs in evidence, and the comparison on which the verdict depends."""

from __future__ import annotations

from typing import Any

import pytest

from zoo.artifact import measured_outputs, worst_of
from zoo.errors import ArtifactError

Levels = dict[str, tuple[float, float]]


def graph_of(**outputs: Levels) -> dict[str, Any]:
    """Return a graph's entry with an error and a limit for each level of each output."""
    return {
        "outputs": {
            name: {level: {"max_abs_error": error, "limit": limit} for level, (error, limit) in levels.items()}
            for name, levels in outputs.items()
        }
    }


def test_worst_output_is_nearest_to_its_limit() -> None:
    evidence = {"graphs": {
        "encoder": graph_of(state={"off": (1.0, 4.0), "faint": (0.0, 0.0)}),
        "decoder": graph_of(logits={"off": (3.0, 9.0)}, other={"off": (2.0, 2.5)}),
    }}  # fmt: skip
    outputs = measured_outputs(evidence)
    assert [(item.name, item.level, item.share) for item in outputs] == [
        ("encoder state", "off", 0.25), ("encoder state", "faint", 0.0), ("decoder logits", "off", 1 / 3),
        ("decoder other", "off", 0.8),
    ]  # fmt: skip
    worst = worst_of(outputs)
    assert worst is not None
    assert (worst.name, worst.how) == ("decoder other", "")


def test_quantised_graph_is_decided_by_exact_products() -> None:
    """Its limits are loose where activations are rounded: their rounding is PyTorch's own error."""
    loose, strict = (4.6, 9.2), (1.7e-5, 7.0e-5)
    levels = {"exact": strict, "off": loose, "all": loose, "perturbed": loose, "perturbed_exact": (1e-6, 7e-5)}
    worst = worst_of(measured_outputs({"graphs": {"model": graph_of(logits=levels)}}))
    assert worst is not None
    assert (worst.level, worst.errors["limit"], worst.how) == ("exact", 7.0e-5, "products in float32")


def test_half_precision_is_decided_in_float32() -> None:
    evidence = {
        "graphs": {"model": graph_of(logits={"off": (3e-3, 4e-3)})},
        "in_float32": {"model": graph_of(logits={"perturbed": (1e-6, 4e-6), "faint": (1e-8, 1e-6)})},
    }
    worst = worst_of(measured_outputs(evidence))
    assert worst is not None
    assert (worst.level, worst.errors["limit"], worst.how) == ("perturbed", 4e-6, "computed in float32")


def test_evidence_without_outputs_has_no_worst_one() -> None:
    assert worst_of(measured_outputs({"comparisons": {}})) is None


@pytest.mark.parametrize("graphs", [
    [], {"model": {}}, {"model": {"outputs": {"logits": []}}}, {"model": graph_of(logits={"off": ("1", 2.0)})},  # type: ignore[dict-item]
    {"model": graph_of(logits={"off": (10**400, 3)})},
])  # fmt: skip
def test_malformed_evidence_is_refused(graphs: Any) -> None:
    with pytest.raises(ArtifactError, match="not the errors of outputs"):
        measured_outputs({"graphs": graphs})
