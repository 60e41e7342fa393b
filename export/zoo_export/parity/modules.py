"""Comparison of a graph with its model module by module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from torch import Tensor, nn

from zoo.contract import Graph
from zoo.probe.dtypes import epsilon
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo_export.graph.inline import inline
from zoo_export.graph.metadata import MODULE_KEY

__all__ = ["ModuleError", "module_errors", "module_outputs"]


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Error of one module's output in the graph and in torch, with respect to float64."""

    path: str
    kind: str
    """Name of the class."""
    source: str
    """Module and line of the innermost enclosing class that is not part of torch."""
    error: float
    torch_error: float
    scale: float
    """Largest absolute value of the output in float64."""
    limit: float
    """Largest error that does not count as divergence: 4 x torch's + 16 x epsilon x the scale."""

    @property
    def diverges(self) -> bool:
        """Whether the error is above its limit, or not finite."""
        return not self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}), {self.source}"


def module_errors(
    graph: Graph,
    data: bytes,
    graphs: tuple[Graph, ...],
    open_with: Callable[[bytes], Executor],
    references: tuple[TorchExecutor, TorchExecutor],
    feeds: Feeds,
    point: Point,
) -> list[ModuleError]:
    """Compare the output of each module, in the order in which they return: an inner module before the outer ones.

    Modules whose output is not a single tensor, or has no counterpart in the graph, are left out. Errors introduced by
    graph optimisations cannot be assigned to a module.

    Args:
        graph: the graph to compare.
        data: the serialised graph.
        graphs: all declared graphs.
        open_with: opens all graphs, without optimisations, with another file in place of ``data``.
        references: the model in float64, and in its own dtype, with the weights that ``open_with`` runs on.
        feeds: the inputs.
        point: the shape of the inputs.
    """
    upto = graphs[: graphs.index(graph) + 1]
    tapped, taps = _tap(data)
    outputs = run_pipeline(open_with(tapped), upto, feeds, point, split=True)[graph.name]
    reference, yardstick = (module_outputs(executor, graph, upto, feeds, point) for executor in references)
    unit = epsilon(references[1].dtype)
    model = references[0].model
    errors = []
    for path, exact in reference.items():
        result = outputs.get(taps.get(path, ""))
        if result is not None and exact.ndim > 1 and result.shape == (exact[..., 0].size, exact.shape[-1]):
            result = result.reshape(exact.shape)  # graphs of a profile flatten the leading dimensions
        if result is None or result.shape != exact.shape:
            continue
        error, allowed, scale = (
            float(np.max(np.abs(values), initial=0.0)) for values in (result - exact, yardstick[path] - exact, exact)
        )
        errors.append(
            ModuleError(
                path,
                type(model.get_submodule(path)).__name__,
                _source(model, path),
                error,
                allowed,
                scale,
                4 * allowed + 16 * unit * scale,
            )
        )
    return errors


def _source(model: nn.Module, path: str) -> str:
    """Return the module and line of the innermost class around ``path`` that is not part of torch."""
    while True:
        cls = type(model.get_submodule(path))
        if not cls.__module__.startswith("torch.") or not path:
            break
        path = path.rpartition(".")[0]
    with suppress(OSError, TypeError):  # defined without a source file
        return f"{cls.__module__}:{inspect.getsourcelines(cls)[1]}"
    return cls.__module__


def _tap(data: bytes) -> tuple[bytes, dict[str, str]]:
    """Add the last value of every module to the outputs. Returns the graph, and the name of that value by module."""
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


def module_outputs(
    executor: TorchExecutor, watched: Graph, upto: tuple[Graph, ...], feeds: Feeds, point: Point
) -> Arrays:
    """Return the output of each module's last call within the graph ``watched``, in the order of those calls."""
    outputs: Arrays = {}

    def keep(path: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs.pop(path, None)
                outputs[path] = output.detach().double().numpy()

        return hook

    class WatchedExecutor(TorchExecutor):
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

    run_pipeline(WatchedExecutor(executor.model), upto, feeds, point, split=True)
    return outputs
