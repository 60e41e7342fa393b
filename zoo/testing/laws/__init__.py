"""Checks of invariances: changes of the input that must, or must not, change an output."""

from zoo.testing.laws.calls import batch_invariance, eval_deterministic, inputs_unchanged, lengths
from zoo.testing.laws.causality import causality
from zoo.testing.laws.modes import dtype_invariance, grad_invariance
from zoo.testing.laws.padding import padded, padding_invariance, sides
from zoo.testing.laws.past import cache, empty_past

__all__ = [
    "LAWS",
    "batch_invariance",
    "cache",
    "causality",
    "dtype_invariance",
    "empty_past",
    "eval_deterministic",
    "grad_invariance",
    "inputs_unchanged",
    "lengths",
    "padded",
    "padding_invariance",
    "sides",
]

LAWS = (
    eval_deterministic,
    inputs_unchanged,
    empty_past,
    batch_invariance,
    padding_invariance,
    causality,
    cache,
    dtype_invariance,
    grad_invariance,
)
"""The checks that a model must pass before it is exported."""
