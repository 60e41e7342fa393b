"""The run of a model's code at free sizes."""

from __future__ import annotations

from typing import Any

from zoo.registry import registry
from zoo_export.trace.guards import Branches
from zoo_export.trace.small import _run


def test_sizes_of_a_declared_dimension_have_one_symbol() -> None:
    """Also the past of each layer. Different dimensions have different symbols."""
    spec = registry().resolve("gpt-tiny")
    inputs = _run(spec, spec.graphs[0], "float32", {}, Branches(spec.plugin.distribution))
    symbols: dict[Any, set[str]] = {}
    for tensor, shape in inputs:
        for dim, size in zip(tensor.dims, shape, strict=True):
            if isinstance(dim, str):
                symbols.setdefault(dim, set()).add(str(size))
    assert {"batch", "sequence", "past_sequence"} <= symbols.keys()
    assert all(len(names) == 1 for names in symbols.values())
    assert len(set.union(*symbols.values())) == len(symbols)
