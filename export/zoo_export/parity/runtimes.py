"""Comparison of ONNX exports on other runtimes than ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, ParityError, UsageError, argument, storage_errors
from zoo.probe.dtypes import numpy_dtype
from zoo.probe.pipeline import Arrays
from zoo.storage import scratch_folder
from zoo_export.comparison import Comparison
from zoo_export.graph.file import parse
from zoo_export.graph.inline import inline
from zoo_export.graph.links import external_tensors, place_of
from zoo_export.graph.static import fixed_sizes
from zoo_export.parity.foreign import OpenRuntime, Run, RunExecutor, compare_runtime
from zoo_export.parity.report import Report
from zoo_export.parity.subject import Weights

__all__ = ["OtherRuntime", "compare_on", "open_on"]

OtherRuntime = Literal["openvino", "reference"]
"""``reference`` is the evaluator of the onnx package: slow, and independent of every other runtime."""


def compare_on(
    runtime: OtherRuntime,
    stored: ModelDirectory,
    graphs: Mapping[str, bytes],
    comparison: Comparison = Comparison(),
) -> Report:
    """Compare serialised graphs, by name, with the model on another runtime on the CPU.

    Raises:
        UsageError: the runtime is not installed, or does not support the model's dtype.
        ParityError: the runtime cannot run a graph, or there is not enough memory.
    """
    name, open_all = _opener(runtime, stored, graphs)
    fixed = fixed_sizes(next(iter(graphs.values())))
    report = compare_runtime(
        stored, open_all, fixed=fixed, full_grid=comparison.full_grid, progress=comparison.progress
    )
    report.subject = f"the export on {name}"
    report.evidence["provider"] = name
    return report


def open_on(runtime: OtherRuntime, stored: ModelDirectory, graphs: Mapping[str, bytes]) -> tuple[str, RunExecutor]:
    """Open serialised graphs, by name, on another runtime. Returns its name and version, and runs the graphs.

    Raises as :func:`compare_on` does.
    """
    name, open_all = _opener(runtime, stored, graphs)
    return name, RunExecutor(open_all(None), numpy_dtype(stored.dtype))


def _opener(runtime: OtherRuntime, stored: ModelDirectory, graphs: Mapping[str, bytes]) -> tuple[str, OpenRuntime]:
    if stored.dtype == "bfloat16":
        raise UsageError(f"{runtime} cannot be given bfloat16 inputs", argument("runtime", runtime))
    name, open_graph = _RUNTIMES[runtime]()

    def open_all(weights: Weights | None) -> dict[str, Run]:
        models = {graph: _with_weights(stored, data, weights) for graph, data in graphs.items()}
        try:
            return {graph: open_graph(model) for graph, model in models.items()}
        except Exception as error:  # of a class of the runtime
            raise ParityError(f"{name} cannot open the graphs ({_reason(error)})", stored.path) from error

    return name, open_all


def _reason(error: Exception) -> str:
    """The last line of an error, or the last item of a list of failures, as OpenVINO gives them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ([line.removeprefix("-- ") for line in lines if line.startswith("-- ")] or lines)[-1]


def _with_weights(stored: ModelDirectory, graph: bytes, weights: Weights | None) -> onnx.ModelProto:
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
    try:
        import openvino
    except ImportError as error:
        where = argument("runtime", "openvino")
        raise UsageError("openvino is not installed", where, "pip install attention-zoo[openvino]") from error

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

    return f"openvino {version('openvino')}", open_graph


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
