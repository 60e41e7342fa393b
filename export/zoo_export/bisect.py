"""Finding the first module at which a graph and its model part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from torch import Tensor, nn

from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo_export.graph_file import MODULE_KEY
from zoo_export.grid import Feeds, Point
from zoo_export.pipeline import Arrays, OnnxExecutor, run_pipeline
from zoo_export.reference import TorchExecutor
from zoo_export.session import open_session

__all__ = ["first_divergence"]


def first_divergence(
    stored: ModelDirectory,
    files: Mapping[str, bytes],
    graph: Graph,
    models: tuple[nn.Module, nn.Module],
    feeds: Feeds,
    point: Point,
) -> str | None:
    """The path and class of the first module whose output differs, or None where no module can be blamed.

    Modules are compared in the order in which they finish, so an inner one comes before those around it. The graph
    runs without optimisations: a fault that only they bring in has no module to name.

    Args:
        stored: the model directory.
        files: every serialised graph by file name.
        graph: the one that diverges.
        models: the model in float64, and in its own dtype.
        feeds: the inputs at which it diverges.
        point: the shape of those inputs.
    """
    graphs = stored.spec.config.graphs()
    upto = graphs[: graphs.index(graph) + 1]
    try:
        tapped, taps = _tap(files[f"{graph.name}.onnx"])
        sessions = {
            item.name: open_session(
                tapped if item == graph else files[f"{item.name}.onnx"], weights=stored.path, optimize=False
            )
            for item in upto
        }
        found = run_pipeline(OnnxExecutor(sessions, np.dtype(stored.dtype)), upto, feeds, point, split=True)[graph.name]
    except Exception:  # the verdict stands already; a graph too broken to run here only lacks the module's name
        return None
    reference, yardstick = (_module_outputs(model, graph, upto, feeds, point) for model in models)
    epsilon = np.finfo(stored.dtype).eps
    for path, wanted in reference.items():
        result = found.get(taps.get(path, ""))
        if result is None or result.shape != wanted.shape:
            continue
        error, allowed, scale = (
            float(np.max(np.abs(values), initial=0.0)) for values in (result - wanted, yardstick[path] - wanted, wanted)
        )
        if not error <= 4 * allowed + 16 * epsilon * scale:
            return f"{path} ({type(models[0].get_submodule(path)).__name__})"
    return None


def _tap(data: bytes) -> tuple[bytes, dict[str, str]]:
    """The graph with the last value of every module as a further output, and the value's name for each module."""
    model = ir.from_proto(onnx.load_model_from_string(data))
    last: dict[str, ir.Value] = {}
    for node in model.graph:
        path = node.metadata_props.get(MODULE_KEY, "")
        while path:
            last[path] = node.outputs[0]
            path = path.rpartition(".")[0]
    real = next(iter(model.graph.initializers.values())).dtype
    present = {value.name for value in model.graph.outputs}
    for value in dict.fromkeys(last.values()):
        if value.name not in present:
            value.type = ir.TensorType(real or ir.DataType.FLOAT)
            model.graph.outputs.append(value)
    return ir.to_proto(model).SerializeToString(), {path: str(value.name) for path, value in last.items()}


def _module_outputs(model: nn.Module, watched: Graph, upto: tuple[Graph, ...], feeds: Feeds, point: Point) -> Arrays:
    """What each module returned in its last call of the graph ``watched``, in the order in which they finished."""
    outputs: Arrays = {}

    def keep(path: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs.pop(path, None)
                outputs[path] = output.detach().double().numpy()

        return hook

    class Watched(TorchExecutor):
        def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
            handles = [
                module.register_forward_hook(keep(path))
                for path, module in self.model.named_modules()
                if path and graph == watched
            ]
            try:
                return super().__call__(graph, feeds)
            finally:
                for handle in handles:
                    handle.remove()

    run_pipeline(Watched(model), upto, feeds, point, split=True)
    return outputs
