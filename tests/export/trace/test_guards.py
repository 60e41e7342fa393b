"""Branches of a model's code on sizes: refused if the graph would be wrong at another declared size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.export.parity.small_plugin import DISTRIBUTION, MODEL, PLUGIN, source
from zoo.errors import ParityError
from zoo.testing import find_subject
from zoo_export.trace.graph import trace_graph

Install = Callable[..., Path]

PLACE = "rotation = self.rotary(positions, x.dtype)"


def trace(install: Install, branch: str) -> bytes:
    """Trace a decoder with a statement after its embedding."""
    install(DISTRIBUTION, PLUGIN, files=source((PLACE, f"{branch}\n        {PLACE}")))
    spec = find_subject("decoder").spec
    return trace_graph(spec, spec.graphs[0], "float32", opset=23)


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [
        ("if total - length > 20: x = 2 * x", "past_sequence 21"),
        pytest.param("if batch > 5: x = 2 * x", "batch 6", marks=pytest.mark.slow),
        pytest.param("if 20 < total < 60: x = 2 * x", "sequence 2, past_sequence 19", marks=pytest.mark.slow),
        pytest.param("if 100 < batch * length < 120: x = 2 * x", "batch", marks=pytest.mark.slow),
        pytest.param("if length % 4 == 0: x = 2 * x", "sequence 4", marks=pytest.mark.slow),
        pytest.param("x = x * (2 if length >= past else 1)", "sequence 2, past_sequence 2", marks=pytest.mark.slow),
    ],
)
def test_branch_on_a_free_size_is_refused(install: Install, branch: str, sizes: str) -> None:
    with pytest.raises(ParityError) as refused:
        trace(install, branch)
    message = str(refused.value)
    assert "the model branches on a size that is declared free" in message
    assert sizes in message
    line = MODEL[: MODEL.index(PLACE)].count("\n") + 1
    assert f"zoo_small_model.py:{line}, in forward" in message


@pytest.mark.slow
def test_check_of_the_longest_input_is_accepted(install: Install) -> None:
    """The condition is true at every declared size."""
    assert trace(install, "assert total <= self.config.max_seq_len, 'too long'")
