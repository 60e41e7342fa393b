"""The laws that a model must obey before its graph can be compared with it.

The comparison runs the model in several ways: in one call or with a past, in a batch or alone, again and again. A model
whose results depend on the way has no single result to compare with. The laws are checks of the conformance kit, in
float64 on random weights, with the stored values of the tensors that cannot have any value, such as a permutation. The
laws of a large model are checked on the same configuration with fewer layers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.errors import ParityError, ZooError
from zoo.models.count import parameter_count
from zoo.models.persist import load_directory
from zoo.models.tensors import tensors_digest
from zoo.plugins.places import described
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import fixed_values
from zoo.probe.pipeline import Arrays
from zoo.probe.positions import valid_positions
from zoo.registry import ModelSpec
from zoo.testing.check import Check, CheckFailure, Inapplicable, read_more
from zoo.testing.laws import LAWS
from zoo.testing.subject import Subject
from zoo_export.parity.reference import without_advice
from zoo_export.trace import cache
from zoo_export.trace.key import key

__all__ = ["LawError", "check_laws", "check_split", "special_ids"]

_LARGE = 5_000_000
"""Number of parameters beyond which the laws are checked on a smaller configuration."""
_LAYERS, _VOCABULARY = 2, 1000
_MARKED = 64
"""Number of token ids that stored tables may add to the special ones."""
_OPTIONAL = {"batch-invariance", "padding-invariance", "causality"}
"""Laws whose failure an architecture may declare. The meaning of a comparison relies on the others."""
_TOLERANCE = 1e-8
"""Allowed difference between float64 results, relative to the largest value."""


class LawError(ParityError):
    """The model violates a law, so there is nothing to compare with."""


def check_laws(stored: ModelDirectory, dtype: str | None = None) -> dict[str, str]:
    """Check the laws of a model. Returns the outcome of each, for the evidence: "passed", or why it need not.

    An architecture may declare in ``expected_failures`` that it breaks an optional law, with a reason. The law is
    checked all the same: where this configuration obeys it, the declaration has no effect. Outcomes are cached: they
    depend on code, configuration, declarations, and the stored values of tensors that noise does not change.

    Args:
        stored: the model.
        dtype: the dtype of the graphs, by default that of the model.

    Raises:
        ArtifactError: the weights are not those of the model.
        LawError: the model violates a law.
    """
    spec, values = stored.spec, fixed_values(load_directory(stored))
    excuses = {law: why for law, why in spec.architecture.expected_failures.items() if law in _OPTIONAL}
    dtype = dtype or stored.dtype
    place = key(spec, "laws", dtype, {"excuses": excuses, "values": tensors_digest(values)})
    if (stored_outcomes := cache.read(place)) is not None:
        outcomes: dict[str, str] = json.loads(stored_outcomes)
        return outcomes
    subject = Subject(_smaller(spec, values), values=values, special=tuple(special_ids(spec, values)), dtype=dtype)
    outcomes = {}
    for check in map(Check, LAWS):
        excuse = excuses.get(check.name)
        try:
            with without_advice():
                _check_law(check, subject)
            outcomes[check.name] = "passed" if excuse is None else f"passed, although expected to fail: {excuse}"
        except Inapplicable as reason:
            outcomes[check.name] = f"does not apply: {reason}"
        except LawError:
            if excuse is None:
                raise
            outcomes[check.name] = f"not required: {excuse}"
    cache.write(place, json.dumps(outcomes).encode())
    return outcomes


def _check_law(check: Check, subject: Subject) -> None:
    """Raise :class:`LawError` if a model violates a law or fails in it, and :class:`Inapplicable` as the check does."""
    try:
        check(subject)
    except CheckFailure as failure:
        problem = f"the model violates the law {check.name}: {failure.expected}, but {failure.happened}"
        raise LawError(problem, subject.plugin, read_more(check.name)) from failure
    except (Inapplicable, ZooError):
        raise
    except Exception as error:
        problem = f"the model fails in the law {check.name}: {described(error, subject.plugin)}"
        raise LawError(problem, subject.plugin, read_more(check.name)) from error


def _smaller(spec: ModelSpec, fixed: Mapping[str, Tensor]) -> ModelSpec:
    """Return the same configuration with fewer layers and token ids, if it is large and allows that.

    All token ids are kept if fixed tensors may contain some, or have one number for each.
    """
    if parameter_count(spec) <= _LARGE:
        return spec
    values = spec.config.to_dict()
    fewer = {
        name: min(value, _LAYERS if name.endswith("layers") else _VOCABULARY)
        for name, value in values.items()
        if type(value) is int and (name.endswith("layers") or name.endswith("vocab_size"))
    }
    ids = {values[name] for name in fewer if name.endswith("vocab_size") and values[name] > _VOCABULARY}
    all_ids = {name: value for name, value in fewer.items() if name.endswith("layers")}
    for change in (all_ids,) if any(_may_index(tensor, ids) for tensor in fixed.values()) else (fewer, all_ids):
        try:
            config = type(spec.config).from_dict({**values, **change}, spec.name)
        except (ZooError, ValueError):
            continue
        return dataclasses.replace(spec, config=config)
    return spec


def _may_index(tensor: Tensor, sizes: Collection[int]) -> bool:
    """Return whether a tensor may contain token ids that a small vocabulary lacks, or numbers for all of them."""
    if not {*tensor.shape}.isdisjoint(sizes):
        return True
    return not tensor.is_floating_point() and tensor.numel() > 0 and int(tensor.max()) >= _VOCABULARY


def check_split(
    graphs: Sequence[Graph], whole: Mapping[str, Arrays], parts: Mapping[str, Arrays], feeds: Feeds, point: Point
) -> None:
    """Raise :class:`LawError` if the model gives other results for a text in two calls than in one."""
    for graph in graphs:
        for tensor in graph.output_tensors():
            one, two = whole[graph.name][tensor.name], parts[graph.name][tensor.name]
            valid = np.broadcast_to(valid_positions(graph, tensor, feeds, point), one.shape)
            if one.shape != two.shape or not valid.any():
                continue  # the shape is judged elsewhere
            if one.dtype == bool:
                one, two = one.astype(np.int8), two.astype(np.int8)
            scale = float(np.max(np.abs(one), where=valid, initial=0.0))
            error = float(np.max(np.abs(one - two), where=valid, initial=0.0))
            if error > _TOLERANCE * scale:
                problem = (
                    f"the model violates the law cache: {tensor.name} of graph {graph.name!r} in two calls is off by "
                    f"{error / (scale or 1.0):.2g} of its largest value in one call"
                )
                raise LawError(problem, point, read_more("cache"))


def special_ids(spec: ModelSpec, fixed: Mapping[str, Tensor]) -> list[int]:
    """Return token ids that a model may treat in a special way.

    They are the numbers of its configuration, and the ids that differ from most in a fixed tensor with one number for
    each id.
    """
    values: list[Any] = list(spec.config.to_dict().values())
    values += [item for value in values if isinstance(value, list | tuple) for item in value]
    return sorted({*(value for value in values if type(value) is int and value >= 0), *_marked_ids(spec, fixed)})


def _marked_ids(spec: ModelSpec, fixed: Mapping[str, Tensor]) -> Iterator[int]:
    """Yield token ids at which tables differ from their most common value: one for each value, rare ones first."""
    sizes = {tensor.upper for graph in spec.graphs for tensor in graph.input_tensors() if not tensor.is_mask} - {None}
    tables = [
        np.moveaxis((tensor.double() if tensor.is_floating_point() else tensor).numpy(), axis, 0).reshape(size, -1)
        for tensor in fixed.values()
        for axis, size in enumerate(tensor.shape)
        if size in sizes and tensor.numel()
    ]
    for table in tables:
        limit = max(1, _MARKED // len(tables))
        _, firsts, number, counts = np.unique(table, axis=0, return_index=True, return_inverse=True, return_counts=True)
        *rare, common = np.argsort(counts, kind="stable")
        marked = firsts[rare][:limit]
        others = np.setdiff1d(np.flatnonzero(number.reshape(-1) != common), marked)
        yield from marked.tolist()
        yield from others[np.linspace(0, len(others) - 1, min(len(others), limit - len(marked))).astype(int)].tolist()
