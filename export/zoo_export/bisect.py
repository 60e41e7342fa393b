"""Finding the first module at which a graph and its model part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from torch import Tensor, nn

from zoo.contract import Graph
from zoo_export.graph_file import MODULE_KEY, inline
from zoo_export.grid import Feeds, Point
from zoo_export.pipeline import Arrays, Executor, run_pipeline
from zoo_export.reference import TorchExecutor

__all__ = ["first_divergence"]


def first_divergence(
    graph: Graph,
    data: bytes,
    graphs: tuple[Graph, ...],
    open_with: Callable[[bytes], Executor],
    references: tuple[TorchExecutor, TorchExecutor],
    feeds: Feeds,
    point: Point,
) -> str | None:
    """The path and class of the first module whose output differs, or None where no module can be blamed.

    Modules are compared in the order in which they finish, so an inner one comes before those around it. A fault that
    only optimisations bring in has no module to name, since they do away with modules.

    Args:
        graph: the graph that diverges.
        data: its file.
        graphs: all declared graphs.
        open_with: runs all of them, without optimisations, with another file in place of ``data``.
        references: the model in float64, and in its own dtype, with the weights that ``open_with`` runs on.
        feeds: the inputs at which it diverges.
        point: the shape of those inputs.
    """
    upto = graphs[: graphs.index(graph) + 1]
    try:
        tapped, taps = _tap(data)
        found = run_pipeline(open_with(tapped), upto, feeds, point, split=True)[graph.name]
    except Exception:  # the verdict stands already; a graph too broken to run here only lacks the module's name
        return None
    reference, yardstick = (_module_outputs(executor, graph, upto, feeds, point) for executor in references)
    epsilon = float(np.finfo(references[1].dtype).eps)
    for path, wanted in reference.items():
        result = found.get(taps.get(path, ""))
        if result is None or result.shape != wanted.shape:
            continue
        error, allowed, scale = (
            float(np.max(np.abs(values), initial=0.0)) for values in (result - wanted, yardstick[path] - wanted, wanted)
        )
        if not error <= 4 * allowed + 16 * epsilon * scale:
            return f"{path} ({type(references[0].model.get_submodule(path)).__name__})"
    return None


def _tap(data: bytes) -> tuple[bytes, dict[str, str]]:
    """The graph with the last value of every module as a further output, and the value's name for each module."""
    model = ir.from_proto(onnx.load_model_from_string(data))
    inline(model)
    last: dict[str, ir.Value] = {}
    for node in model.graph:
        path = node.metadata_props.get(MODULE_KEY, "")
        while path:
            last[path] = node.outputs[0]
            path = path.rpartition(".")[0]
    dtypes = (value.dtype for value in model.graph.initializers.values())
    real = next((dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point()), None)
    present = {value.name for value in model.graph.outputs}
    for value in dict.fromkeys(last.values()):
        if value.name not in present:
            value.type = ir.TensorType(real or ir.DataType.FLOAT)
            model.graph.outputs.append(value)
    return ir.to_proto(model).SerializeToString(), {path: str(value.name) for path, value in last.items()}


def _module_outputs(
    executor: TorchExecutor, watched: Graph, upto: tuple[Graph, ...], feeds: Feeds, point: Point
) -> Arrays:
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

    run_pipeline(Watched(executor.model), upto, feeds, point, split=True)
    return outputs
