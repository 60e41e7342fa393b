"""Replay of a recorded comparison on the runtime at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import EVIDENCE_KEY, OPENVINO, Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import EXPORT_AGAIN, ArtifactError, IncomparableError, ParityError
from zoo.probe.dtypes import dtype_of, numpy_dtype
from zoo.probe.inputs import Feeds, given_inputs, make_feeds
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo.reading import read_bytes
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.placement import placement
from zoo_runtime.onnx_runtime.providers import check_dtype, open_session
from zoo_runtime.onnx_runtime.run_errors import OutOfMemoryError, RunError
from zoo_runtime.onnx_runtime.stopping import named
from zoo_runtime.openvino.compiled import CompiledGraph, compile_graphs, engine_version
from zoo_runtime.openvino.executor import OpenVinoExecutor
from zoo_runtime.recorded.sample import RecordedCall, RecordedOutput, Sample, digest_of, parse
from zoo_runtime.serving.executor import ServingExecutor

__all__ = [
    "Replay",
    "check_recorded",
    "feeds_of",
    "open_recorded",
    "read_sample",
    "replay",
    "replay_compiled",
    "replay_on",
    "replay_sessions",
]


@dataclass
class Replay:
    """The outcome of a replay that did not fail."""

    runtime: str
    """The runtime and its version."""
    provider: str
    points: int = 0
    numbers: int = 0
    """Numbers that were compared with those of the model in float64."""
    rows: int = 0
    """Rows of logits whose largest was compared."""
    ratio: float = 0.0
    """Largest error, in units of the limit."""
    worst: Mapping[str, Any] | None = None
    """Output, point, error and limit of that number."""
    placement: Mapping[str, Mapping[str, int]] | None = None
    """Number of nodes of each graph by the provider that runs them, if graphs were opened for the replay."""

    def __str__(self) -> str:
        counts = f"{self.points} points, {self.numbers:,} numbers"
        where = f"{self.runtime}, {self.provider}"
        return f"recorded comparison holds on {where}: {counts}, largest error {self.ratio:.2g} of its limit"


def open_recorded(directory: str | os.PathLike[str], variant: str = "") -> Export:
    """Open an export that has a recorded comparison, and check all digests.

    Raises:
        ArtifactError: a file is altered or missing, or no comparison is recorded.
        ParityError: the export is not verified with the present weights.
    """
    export = Export(ModelDirectory.open(Path(directory), rehash=True), variant)
    export.check()
    check_recorded(export)
    return export


def check_recorded(export: Export) -> None:
    """Raise an error unless an export has a recorded comparison, as :func:`open_recorded` does."""
    if export.recorded_file not in export.files:
        where = export.stored.path
        if not export.traits.records:
            raise ArtifactError(f"no comparison is recorded of the variant {export.variant}", where)
        if "discontinuous" in export.evidence:
            raise ArtifactError("no comparison is recorded of a discontinuous model", where)
        raise ArtifactError("the export has no recorded comparison", where, f"{export.traits.command(where)} --force")
    export.check_verified()


def read_sample(export: Export) -> Sample:
    """Return the recorded comparison of an export. Raises :class:`ArtifactError` if it is malformed."""
    path = export.stored.file(export.recorded_file)
    return parse(read_bytes(path), export.graphs, path)


def feeds_of(sample: Sample, call: RecordedCall, graphs: Sequence[Graph], dtype: np.dtype[Any]) -> Feeds:
    """Return the inputs of a call, with those generated that are not in the file.

    Raises :class:`IncomparableError` if others are generated than were recorded, or none can be.
    """
    if not call.generated:
        return call.inputs
    try:
        made = make_feeds(graphs, call.point, sample.seed, sample.longest, special=sample.special, fixed=sample.fixed)
    except (MemoryError, ValueError) as error:  # of numpy, for arrays of any size that a file may ask for
        raise IncomparableError(f"cannot generate the inputs at {call.point} ({error})", None, EXPORT_AGAIN) from error
    tensors = given_inputs(graphs)
    feeds = dict(call.inputs)
    for name, digest in call.generated.items():
        feeds[name] = made[name].astype(dtype_of(tensors[name], dtype))
        if digest_of(feeds[name]) != digest:
            problem = f"numpy {np.__version__} and this version of zoo generate another {name} than was recorded"
            raise IncomparableError(problem, f"at {call.point}", EXPORT_AGAIN)
    return feeds


def replay(
    export: Export,
    executor: Executor,
    runtime: str,
    provider: str,
    is_possible: Callable[[Feeds], bool] = lambda feeds: True,
) -> Replay:
    """Replay the recorded comparison of an export.

    Args:
        export: an export with a recorded comparison.
        executor: runs its declared graphs.
        runtime: the name and version of the runtime, for the result.
        provider: the execution provider, for the result.
        is_possible: whether the graphs can make a call with these inputs. Others are left out.

    Raises:
        ArtifactError: the recorded comparison is malformed.
        ParityError: an output is off by more than its limit, is not finite, or has another shape or largest logit; or
            ONNX Runtime cannot run a graph.
    """
    sample = read_sample(export)
    result = Replay(runtime, provider)
    failures: list[str] = []
    for call in sample.calls:
        feeds = feeds_of(sample, call, export.graphs, executor.dtype)
        if not is_possible(feeds):
            continue
        result.points += 1
        try:
            results = run_pipeline(executor, export.graphs, feeds, call.point, split=True)
        except OutOfMemoryError as error:
            raise IncomparableError(f"too little memory at {call.point} ({error.what})", export.stored.path) from error
        except RunError as error:
            problem = f"the graph fails on {runtime}, {provider}, at {call.point} ({error.__cause__})"
            raise ParityError(problem, export.stored.path) from error
        for output in call.outputs:
            where = f"{output.name} of {output.graph}"
            failures += [f"{where} {problem}, at {call.point}" for problem in _compare(result, call, output, results)]
    if not result.points:
        raise IncomparableError("none of the recorded calls can be made with these graphs", export.stored.path)
    if failures:
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        problem = f"the recorded comparison fails on {runtime}, {provider}: {failures[0]}{more}"
        raise ParityError(problem, export.stored.path)
    return result


def _compare(
    result: Replay, call: RecordedCall, output: RecordedOutput, results: Mapping[str, Arrays]
) -> Iterator[str]:
    """Add the errors of one output to the result. Yields what is wrong with it."""
    values = np.asarray(results[output.graph][output.name])
    if values.shape != output.shape:
        yield f"has the shape {values.shape}, not {output.shape}"
        return
    if not np.isfinite(values).all():
        yield "is not finite"
        return
    error: Array = np.abs(values.reshape(-1)[output.places].astype(np.float64) - output.values)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(error > 0, error / output.allowed, 0.0)
    result.numbers += len(ratios)
    if ratios.size and (result.worst is None or ratios.max() > result.ratio):
        place = int(ratios.argmax())
        result.ratio = float(ratios[place])
        result.worst = {
            "graph": output.graph,
            "output": output.name,
            "point": call.point.to_dict(),
            "error": float(error[place]),
            "limit": float(output.allowed[place]),
        }
    if np.any(ratios > 1):
        place = int(ratios.argmax())
        yield f"is off by {error[place]:.3g}, allowed {output.allowed[place]:.3g}"
    if output.best.size:
        rows, columns = np.divmod(output.best, values.shape[-1])
        differ = values.reshape(-1, values.shape[-1])[rows].argmax(-1) != columns
        result.rows += len(rows)
        if differ.any():
            yield f"chooses another token in {differ.sum()} of {len(rows)} rows"


def replay_sessions(export: Export, sessions: Mapping[str, ort.InferenceSession], provider: str) -> Replay:
    """Replay the recorded comparison of an export on its open graphs. Raises as :func:`replay` does.

    Raises :class:`ArtifactError` if a graph does not belong to the evidence.
    """
    entries = {name: session.get_modelmeta().custom_metadata_map for name, session in sessions.items()}
    export.check_digests({name: found.get(EVIDENCE_KEY) for name, found in entries.items()})
    runs = ServingExecutor if export.traits.interface == "rows" else OnnxExecutor
    with named(export.stored.path):
        executor = runs(sessions, numpy_dtype(export.dtype))
        return replay(export, executor, f"onnxruntime {ort.__version__}", provider)


def replay_compiled(export: Export, compiled: Mapping[str, CompiledGraph]) -> Replay:
    """Replay the recorded comparison of an export on its graphs on OpenVINO. Raises as :func:`replay_sessions` does."""
    export.check_digests({name: graph.evidence_digest for name, graph in compiled.items()})
    with named(export.stored.path):
        executor = OpenVinoExecutor(compiled, numpy_dtype(export.dtype))
        return replay(export, executor, engine_version(), "cpu")


def replay_on(export: Export, provider: str = "cpu") -> Replay:
    """Replay the recorded comparison of an export where it runs. Raises as :func:`replay` does.

    Args:
        export: an export with a recorded comparison.
        provider: ``cpu``, ``cuda``, ``openvino``, or another that this ONNX Runtime has: see
            :func:`zoo_runtime.onnx_runtime.providers.open_session`.

    Raises:
        UsageError: the provider does not load, or does not support the dtype.
    """
    check_dtype(export.dtype, provider, export.stored.path)
    if provider == OPENVINO:
        compiled = compile_graphs(export)
        result = replay_compiled(export, compiled)
        result.placement = {name: {OPENVINO: graph.operations} for name, graph in compiled.items()}
        return result
    sessions = {
        name: open_session(export.stored.path / file, provider=provider, placements=True)
        for name, file in export.graph_files.items()
    }
    result = replay_sessions(export, sessions, provider)
    result.placement = {name: placement(session) for name, session in sessions.items()}
    return result
