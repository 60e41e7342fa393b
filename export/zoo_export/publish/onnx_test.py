"""An export in the form of the ONNX project's tests: ``model.onnx`` and folders ``test_data_set_N``.

Each data set is one call of a graph: its inputs, and what the module in float64 computes from them, rounded to the
dtype of the graph. Past keys and values are inputs like all others: the module has computed them in an earlier call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from zoo.arrays import Array
from zoo.artifact import Export
from zoo.artifact.outputs import new_output
from zoo.contract import Graph
from zoo.errors import ParityError
from zoo.models import persist
from zoo.probe.dtypes import dtype_of, numpy_dtype
from zoo.probe.inputs import empty_past, next_past, slice_feeds
from zoo.probe.pipeline import Arrays, Executor
from zoo_export.graph.file import parse
from zoo_export.parity.reference import Models
from zoo_export.publish.copies import copy_graphs
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.onnx_runtime.values import run_session
from zoo_runtime.recorded.replay import feeds_of, open_recorded, read_sample
from zoo_runtime.recorded.sample import RecordedCall, Sample

__all__ = ["PublishedTests", "write_onnx_tests"]

_LARGEST = 2**22
"""Number of elements of the largest output of a data set."""


@dataclass(frozen=True)
class PublishedTests:
    """The files of published data sets."""

    files: list[str]
    """Relative to the target."""
    sets: int
    """Number of data sets."""
    tolerance: float
    """Largest absolute error that the comparison of the export allows an output."""


@dataclass(frozen=True)
class _Call:
    """One call of a graph, whose arrays have the dtypes of the graph."""

    graph: Graph
    inputs: Arrays
    outputs: Arrays


def write_onnx_tests(directory: Path, target: Path, *, force: bool = False) -> PublishedTests:
    """Write a verified export, self-contained, with the recorded calls that have no padding, as tests.

    The graph is ``model.onnx``; of several graphs, each is in a folder of its name. Outputs at padding are not defined,
    and test runners compare all numbers.

    With ``force``, an earlier result is replaced, unless files were added to it or changed.

    Raises:
        ArtifactError: the model is not exported, has been altered, or has no recorded comparison.
        ParityError: the export is not verified, or an output is off by more than its limit.
        UsageError: ``target`` exists.
    """
    export = open_recorded(directory)
    stored, graphs = export.stored, export.read()
    sample = read_sample(export)
    reference = Models(partial(persist.load_directory, stored)).reference
    calls = [
        call
        for recorded in sample.calls
        if recorded.point.padding == "none"
        for call in _calls(export, reference, sample, recorded)
        if max(value.size for value in call.outputs.values()) <= _LARGEST
    ]
    with new_output(target, "publish --layout onnx-test", force=force) as stage:
        folders = {name: stage / name if len(graphs) > 1 else stage for name in graphs}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        names = {name: f"{folder.relative_to(stage)}/model".removeprefix("./") for name, folder in folders.items()}
        files = copy_graphs(stored, graphs, export.dtype, stage, names)
        for name, graph in graphs.items():
            sets = [call for call in calls if call.graph.name == name]
            _check(export, folders[name] / "model.onnx", sets)
            for number, call in enumerate(sets):
                folder = folders[name] / f"test_data_set_{number}"
                folder.mkdir()
                written = _write(parse(graph).graph, call, folder)
                files += [str(path.relative_to(stage)) for path in written]
    tolerance = max(_limit(export, graph, tensor.name) for graph in export.graphs for tensor in graph.output_tensors())
    return PublishedTests(files, len(calls), tolerance)


def _calls(export: Export, reference: Executor, sample: Sample, recorded: RecordedCall) -> Iterator[_Call]:
    """Yield the calls of all graphs at a point, each on what the calls before have computed."""
    dtype, point = numpy_dtype(export.dtype), recorded.point
    arrays = dict(feeds_of(sample, recorded, export.graphs, dtype))
    for graph in export.graphs:
        declared = graph.input_tensors()
        inputs = {
            item.name: arrays[item.name].astype(dtype_of(item, dtype)) for item in declared if item.name in arrays
        }
        cuts = [0, *([point.past] if graph.pasts and point.past else []), point.past + point.length]
        past = empty_past(graph, point.batch, dtype) if graph.pasts else {}
        for start, stop in itertools.pairwise(cuts):
            feeds = dict(slice_feeds(graph, inputs, start, stop)) | past if graph.pasts else inputs
            exact = reference(graph, feeds)
            outputs = {item.name: exact[item.name].astype(dtype_of(item, dtype)) for item in graph.output_tensors()}
            yield _Call(graph, feeds, outputs)
            past = next_past(graph, outputs)
        arrays |= outputs


def _write(graph: onnx.GraphProto, call: _Call, folder: Path) -> list[Path]:
    """Write a data set, in the order of the inputs and outputs of the graph."""
    sides: dict[str, tuple[list[str], Mapping[str, Array]]] = {
        "input": ([item.name for item in graph.input], {LOGITS_TO_KEEP: np.array(0), **call.inputs}),
        "output": ([item.name for item in graph.output], call.outputs),
    }
    paths = []
    for side, (names, arrays) in sides.items():
        for number, name in enumerate(names):
            paths.append(folder / f"{side}_{number}.pb")
            paths[-1].write_bytes(numpy_helper.from_array(arrays[name], name).SerializeToString())
    return paths


def _check(export: Export, path: Path, calls: list[_Call]) -> None:
    """Raise :class:`ParityError` if a graph is further from the outputs of a call than its comparison allows."""
    session = open_session(path, provider="cuda" if export.dtype == "bfloat16" else "cpu")
    names = [item.name for item in session.get_outputs()]
    needed = [item.name for item in session.get_inputs()]
    for call in calls:
        arrays = {LOGITS_TO_KEEP: np.array(0), **call.inputs}
        for name, value in zip(names, run_session(session, names, {key: arrays[key] for key in needed}), strict=True):
            error = float(np.max(np.abs(value.astype(np.float64) - call.outputs[name].astype(np.float64)), initial=0.0))
            limit = _limit(export, call.graph, name)
            if not error <= limit:
                problem = f"{name} of {call.graph.name} is off by {error:.3g}, allowed {limit:.3g}, in a data set"
                raise ParityError(problem, export.stored.path)


def _limit(export: Export, graph: Graph, output: str) -> float:
    """Return the largest error that the comparison of an export allows an output."""
    return float(export.evidence["graphs"][graph.name]["outputs"][output]["all"]["limit"])
