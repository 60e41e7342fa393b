"""Changes of inputs, and parts of outputs, along a named length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zoo.contract import Dim, TensorSpec, dim_names, dim_size, is_quotient, rows_of
from zoo.testing.subject import Subject

__all__ = ["LONG", "ODD", "along", "repeated", "token_inputs"]

ODD = 11
"""Number of tokens of a short text, which no other check uses."""
LONG = 130
"""Number of tokens of a long text, limited by the model's maximum length."""


def token_inputs(subject: Subject, length: str, feeds: Mapping[str, Any]) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the inputs with a length, except masks, once for each axis along which it lies."""
    from zoo.testing.compute import inputs_along

    for tensor, axis in inputs_along(subject.graphs, length, feeds):
        if not tensor.is_mask:
            yield tensor, axis


def repeated(subject: Subject, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with the first token of each row repeated, along every length.

    Equal tokens compete for what a model shares between tokens, such as the places of an expert.
    """
    import numpy as np

    result = dict(feeds)
    for length in {dim for graph in subject.graphs for dim in graph.dim_names()} - {*rows_of(subject.graphs)}:
        for tensor, axis in token_inputs(subject, length, result):
            values = result[tensor.name]
            result[tensor.name] = np.broadcast_to(values.take([0], axis), values.shape).copy()
    return result


def along(tensor: TensorSpec, length: str, place: slice, values: Any) -> Any:
    """Slice an output along the dimensions that contain ``length``, if it has any."""
    for axis, dim in enumerate(tensor.dims):
        if length in dim_names(dim):
            values = values[(*(slice(None),) * axis, _part(dim, length, place))]
    return values


def _part(dim: Dim, length: str, place: slice) -> slice:
    """Return the slice of a dimension for a slice of a length: of a quotient, the positions of that many tokens."""
    if not is_quotient(dim):
        return place
    return slice(dim_size(dim, {length: place.stop})) if place.start is None else slice(None)
