"""Coverage of the conditions in a graph of another tool by the points at which it is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from zoo.contract import Graph, TensorSpec
from zoo.errors import ZooError
from zoo.probe.grid import CHEAP
from zoo.probe.inputs import Feeds, Point
from zoo.reading import read_bytes
from zoo_export.audit.binding import Bound, FileSet
from zoo_export.audit.names import POSITIONS, cache_key
from zoo_export.coverage.coverage import Coverage
from zoo_export.coverage.outcomes import Conditions
from zoo_export.coverage.points import candidates, turning_points
from zoo_export.graph.file import parse, serialize

__all__ = ["Covered", "cover_files"]

Covered = tuple[list[Point], Coverage]
_CANDIDATES, _CONSTANTS = 300, 12
"""Number of inputs that are tried, and of the graph's constants around which they lie."""


def cover_files(
    files: FileSet,
    points: Sequence[Point],
    feeds: Callable[[Point], Feeds | None],
    longest: int,
    parameters: int,
) -> Covered | None:
    """Return points at which conditions of the graph have other outcomes, and the coverage.

    None for several graphs, and for one with inputs beside the declared ones and position ids.

    Args:
        files: the graphs.
        points: those of the grid.
        feeds: makes the inputs at a point; None if it cannot be asked.
        longest: the number of tokens of the longest inputs.
        parameters: the number of parameters, to which the cost of a token is proportional.
    """
    if len(files.bound) != 1 or len(files.declared) != 1:
        return None
    conditions = _conditions(files.bound[0], files.declared[0], longest)
    if conditions is None:
        return None

    def inputs(point: Point) -> Feeds:
        made = dict(feeds(point) or {})
        shape = next((value.shape for value in made.values() if value.ndim == 2), (point.batch, point.length))
        made.setdefault(POSITIONS, np.broadcast_to(np.arange(shape[1]), shape))
        return made

    coverage = Coverage([conditions], inputs, np.dtype(np.float32), parameters)
    coverage.add(point for point in points if feeds(point) is not None)
    constants = sorted(conditions.constants)
    more = candidates(files.declared, longest, constants[:_CONSTANTS])
    tried = [*turning_points(files.declared, longest, constants), *more[:: -(-len(more) // _CANDIDATES) or 1]]
    cheap = [point for point in tried if point.tokens * parameters <= CHEAP and feeds(point) is not None]
    return list(coverage.extend(point for point in cheap if point not in points)), coverage


def _conditions(item: Bound, declared: Graph, longest: int) -> Conditions | None:
    """Return the conditions of a graph under the declared names, or None if it has other inputs."""
    caches = {cache_key(tensor.name): tensor.name for tensor in declared.past_tensors()}
    names = {**item.inputs, **{name: caches[key] for name, key in item.past.items() if key in caches}}
    own = {tensor.name for tensor in declared.input_tensors()}
    if not {*names.values()} <= {*own, POSITIONS} or len(names) < len(item.graph.inputs):
        return None
    if POSITIONS in names.values() and POSITIONS not in own:
        spec = TensorSpec(name=POSITIONS, dims=("batch", "sequence"), dtype="int64")
        declared = replace(declared, inputs=(*declared.inputs, spec))
    model = parse(read_bytes(item.graph.path))
    for value in model.graph.input:
        value.name = names.get(value.name, value.name)
    _rename(model.graph, names)
    try:
        return Conditions(declared, serialize(model), item.graph.path.parent, longest)
    except (ZooError, RuntimeError):  # the latter by onnx-ir, such as for nodes that are not in order
        return None


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename what the nodes of a graph, and those inside them, read."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, names)
