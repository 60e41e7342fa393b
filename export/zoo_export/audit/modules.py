"""Where a fault begins: the first module of the model whose output is nowhere in a graph.

Other tools name their tensors as they like, so a module's output is looked for by its values. Where graphs fuse
modules, inner outputs are missing from right graphs, too: what is missing at a point where all outputs are right tells
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.errors import ZooError
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Arrays
from zoo_export.audit.judging import run_model
from zoo_export.audit.running import ForeignModel, NotAskable, encoder_states
from zoo_export.parity.modules import module_outputs
from zoo_export.parity.reference import Models

__all__ = ["first_module", "misnamed"]

_CLOSE = 1e-3
"""Largest difference of equal tensors, relative to the largest number."""
_ENOUGH = 8
"""Fewer numbers may be equal by chance."""


def first_module(
    runtime: ForeignModel,
    models: Models,
    graph: Graph,
    wrong: tuple[Feeds, Point],
    right: tuple[Feeds, Point] | None,
) -> str | None:
    """Return the first module whose output no tensor equals, and its class; None if it cannot be told.

    Args:
        runtime: graphs whose tensors are kept.
        models: the model.
        graph: the declared graph whose output is wrong.
        wrong: inputs at which it is.
        right: inputs at which all outputs are right, if there are any.
    """
    try:
        found = _found(runtime, models, graph, *wrong)
        before = None if right is None else _found(runtime, models, graph, *right)
    except (ZooError, NotAskable):  # a graph whose inner tensors cannot be outputs
        return None
    if before is not None:
        visible = {path for path, is_there in before if is_there}
    else:  # modules before the fault are found, and none after it
        last = max((number for number, (_, is_there) in enumerate(found) if is_there), default=len(found))
        visible = {path for path, _ in found[last + 1 :]}
    path = next((path for path, is_there in found if not is_there and path in visible), None)
    return None if path is None else f"{path} ({type(models.reference.model.get_submodule(path)).__name__})"


def misnamed(place: tuple[str, str], results: Mapping[str, Arrays], exact: Mapping[str, Arrays]) -> str | None:
    """Return the other output of the model that a wrong output equals, or None."""
    graph, name = place
    values = results[graph][name]
    return next(
        (
            other
            for other, wanted in exact[graph].items()
            if other != name
            and wanted.shape == values.shape
            and values.size >= _ENOUGH
            and _is_among(wanted, [values], None)
        ),
        None,
    )


def _found(runtime: ForeignModel, models: Models, graph: Graph, feeds: Feeds, point: Point) -> list[tuple[str, bool]]:
    """Return whether a tensor of the graphs equals the output of each module, in the order in which they return."""
    declared = runtime.files.declared
    upto = declared[: declared.index(graph) + 1]
    if point.past:  # graphs compute the last token in a call of its own
        point = replace(point, length=1, past=point.past + point.length - 1)
    expected = module_outputs(models.reference, graph, upto, feeds, point)
    states = encoder_states(runtime.files, run_model(models.reference, declared, feeds, point))
    runtime.tensors.clear()
    runtime.run(feeds, point, states)
    tensors = [value for value in runtime.tensors.values() if value.dtype.kind == "f" and value.size >= _ENOUGH]
    valid = _valid(graph, feeds, point)
    return [(path, _is_among(exact, tensors, valid)) for path, exact in expected.items() if exact.size >= _ENOUGH]


def _valid(graph: Graph, feeds: Feeds, point: Point) -> Array | None:
    """Return which tokens of a call are no padding, (batch, length), or None without a mask."""
    masks = (item for item in graph.input_tensors() if item.is_mask and item.dims[1] == graph.total_length)
    return next((feeds[item.name][:, -point.length :] != 0 for item in masks), None)


def _is_among(exact: Array, tensors: Iterable[Array], valid: Array | None) -> bool:
    scale = float(np.abs(exact).max()) or 1.0
    for tensor in tensors:
        if tensor.size != exact.size or tensor.shape[-1] != exact.shape[-1]:
            continue
        difference = np.abs(tensor.reshape(exact.shape) - exact)
        if valid is not None and exact.shape[:2] == valid.shape:
            difference = difference[valid]
        if difference.max(initial=0) <= _CLOSE * scale:
            return True
    return False
