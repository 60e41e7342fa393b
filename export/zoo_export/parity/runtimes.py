"""Other runtimes than ONNX Runtime, and the replay of recorded comparisons on them, without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from zoo.arrays import Array
from zoo.artifact import OPENVINO, Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, UsageError, argument, storage_errors
from zoo.probe.dtypes import numpy_dtype
from zoo.probe.inputs import Feeds
from zoo.probe.pipeline import Arrays, typed_feeds
from zoo.storage import scratch_folder
from zoo_export.graph.file import parse
from zoo_export.graph.inline import inline
from zoo_export.graph.links import external_tensors, place_of
from zoo_export.parity.evidence import check_evidence
from zoo_export.parity.running import running
from zoo_runtime.openvino.compiled import engine_version, load_openvino, reason_of
from zoo_runtime.recorded.replay import Replay, replay

__all__ = ["OpenRuntime", "OtherRuntime", "Run", "RunExecutor", "check_runtime", "opener", "replay_elsewhere"]

Run = Callable[[Arrays], Mapping[str, Any]]
"""Runs one graph: maps inputs by name, in declaration order, to outputs by name."""
OpenRuntime = Callable[[Mapping[str, Array] | None], Mapping[str, Run]]
"""Opens an export with its own weights or with others; returns one callable per graph name."""
OtherRuntime = Literal["openvino", "reference"]
"""``reference`` is the evaluator of the onnx package: slow, and independent of every other runtime."""


class RunExecutor:
    """Runs each declared graph by a function.

    Args:
        graphs: by graph name.
        dtype: dtype of floating-point inputs.
    """

    def __init__(self, graphs: Mapping[str, Run], dtype: np.dtype[Any]) -> None:
        self.graphs, self.dtype = graphs, dtype

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        outputs = self.graphs[graph.name](typed_feeds(graph, feeds, self.dtype))
        return {tensor.name: np.asarray(outputs[tensor.name]) for tensor in graph.output_tensors()}


def check_runtime(export: Export, runtime: str) -> None:
    """Raise :class:`UsageError` if an export cannot be compared on a runtime."""
    kind = "web" if runtime.startswith("web-") else runtime
    if kind != "onnxruntime" and kind not in export.traits.runtimes:
        engine = OPENVINO if export.traits.provider == OPENVINO else "onnxruntime"
        problem = f"the variant {export.variant} runs on {engine} only"
        raise UsageError(problem, argument("runtime", runtime), "leave it out")


def replay_elsewhere(export: Export, runtime: OtherRuntime) -> Replay:
    """Replay the recorded comparison of an export on another runtime. Writes nothing, and needs no PyTorch.

    Args:
        export: from :func:`zoo_runtime.recorded.replay.open_recorded`.
        runtime: the runtime.

    Raises:
        ArtifactError: the recorded comparison is malformed.
        ParityError: an output is off by more than its limit, or the runtime cannot run a graph.
        UsageError: the runtime is not installed, or is not for this export.
    """
    check_runtime(export, runtime)
    graphs = export.read()
    check_evidence(export, graphs)
    name, open_all = opener(runtime, export.stored, graphs)
    executor = RunExecutor(open_all(None), numpy_dtype(export.stored.dtype))
    with running("in the replay", export.stored.path):
        return replay(export, executor, name, "cpu")


def opener(runtime: OtherRuntime, stored: ModelDirectory, graphs: Mapping[str, bytes]) -> tuple[str, OpenRuntime]:
    """Return the name and version of another runtime, and a function that opens serialised graphs, by name, on it.

    Raises :class:`UsageError` if the runtime is not installed, or does not support the model's dtype; the function
    raises :class:`ParityError` if the runtime cannot run a graph.
    """
    if stored.dtype == "bfloat16":
        raise UsageError(f"{runtime} cannot be given bfloat16 inputs", argument("runtime", runtime))
    name, open_graph = _RUNTIMES[runtime]()

    def open_all(weights: Mapping[str, Array] | None) -> dict[str, Run]:
        models = {graph: _with_weights(stored, data, weights) for graph, data in graphs.items()}
        try:
            return {graph: open_graph(model) for graph, model in models.items()}
        except Exception as error:  # of a class of the runtime
            raise ParityError(f"{name} cannot open the graphs ({reason_of(error)})", stored.path) from error

    return name, open_all


def _with_weights(stored: ModelDirectory, graph: bytes, weights: Mapping[str, Array] | None) -> onnx.ModelProto:
    """Return a graph that contains its weights: the stored ones, or others of the same layout."""
    model = parse(graph)
    names = {(tensor.file, tensor.offset): name for name, tensor in stored.layout.items()}
    for tensor in external_tensors(model):
        name = names.get(place_of(tensor)[:2])
        if name is None:
            raise ArtifactError(f"initialiser {tensor.name} points at no tensor", stored.path)
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = weights[name].tobytes() if weights is not None else stored.layout[name].read(stored.path)
    return model


_Open = Callable[[onnx.ModelProto], Run]


def _openvino() -> tuple[str, _Open]:
    openvino = load_openvino(argument("runtime", OPENVINO))

    def open_graph(model: onnx.ModelProto) -> Run:
        flat = ir.from_proto(model)
        inline(flat)  # OpenVINO does not read functions
        with scratch_folder() as folder:
            path = folder / "graph.onnx"
            with storage_errors(folder):
                ir.save(flat, path, external_data="graph.data")  # one protobuf message holds at most 2 GB
            # The default precision is bfloat16 on processors that support it.
            compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda feeds: _named(model, compiled(feeds).values())

    return engine_version(), open_graph


def _reference() -> tuple[str, _Open]:
    def open_graph(model: onnx.ModelProto) -> Run:
        evaluator = ReferenceEvaluator(model)

        def run(feeds: Arrays) -> dict[str, Any]:
            with np.errstate(all="ignore"):  # results that are not finite are found by the comparison
                return _named(model, evaluator.run(None, feeds))

        return run

    return f"onnx.reference {version('onnx')}", open_graph


def _named(model: onnx.ModelProto, values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip((output.name for output in model.graph.output), values, strict=True))


_RUNTIMES: Mapping[OtherRuntime, Callable[[], tuple[str, _Open]]] = {"openvino": _openvino, "reference": _reference}
