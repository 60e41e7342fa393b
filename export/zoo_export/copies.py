"""Whether copies of a module compute what it computes: exports are traced from a copy and compared with another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.arrays import Array
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.models import create
from zoo.models.dtypes import declared_dtype
from zoo.modules.calls import evaluating
from zoo.modules.factory import copy_sharing_tensors
from zoo.nn import call_graph
from zoo.probe.grid import longest_length, make_grid
from zoo.probe.inputs import Feeds, make_feeds
from zoo.probe.module import as_array, as_tensor
from zoo.probe.pipeline import Arrays, run_pipeline
from zoo.registry import ModelSpec

__all__ = ["require_same_copy"]

_POINTS = 4
"""Number of inputs compared, the smallest of the grid. Code that tells a copy from its original does so for any."""


class _Caller:
    """Runs the graphs of a module where its tensors are.

    Args:
        module: the module.
        spec: its description.
    """

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        parameter = next(module.parameters())
        self._module, self._real, self._device = module, parameter.dtype, parameter.device
        self.dtype: np.dtype[Any] = as_array(torch.empty(0, dtype=self._real)).dtype
        named: Any = create.build_on_meta(spec, self._real)
        named.share(module)
        self._named: nn.Module = named

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        tensors = {
            item.name: as_tensor(feeds[item.name]).to(self._device, declared_dtype(item, self._real))
            for item in graph.input_tensors()
        }
        with torch.no_grad(), evaluating(self._module):
            outputs = call_graph(self._named, graph, tensors, hooks=True)
        return {name: as_array(tensor.detach().cpu()) for name, tensor in outputs.items()}


def require_same_copy(module: nn.Module, spec: ModelSpec) -> None:
    """Raise :class:`UsageError` for a module of which a copy computes something else.

    Its code then knows a module by its identity, as a key of a dictionary or in a closure, and a copy would be
    exported and compared with a copy.
    """
    again = copy_sharing_tensors(module)
    longest = longest_length(spec.config, spec.graphs)
    grid, _ = make_grid(spec.graphs, longest, create.count_parameters(module), whole=False)
    callers = [_Caller(item, spec) for item in (module, module, again)]
    for point in sorted(grid, key=lambda point: point.tokens)[:_POINTS]:
        feeds = make_feeds(spec.graphs, point, 0, longest)
        try:
            one, other, copied = (run_pipeline(caller, spec.graphs, feeds, point, split=True) for caller in callers)
        except Exception:  # a call that fails is reported by the laws, with the inputs
            return
        if _equal(one, other) and not _equal(one, copied):  # what differs from call to call is refused by a law
            what = f"a copy of the {type(module).__name__} computes something else than the module itself"
            remedy = "let no code know a module by its identity, as in a closure or as a key: use attributes of self"
            raise UsageError(what, "export_module", remedy)


def _equal(one: dict[str, Arrays], other: dict[str, Arrays]) -> bool:
    return all(_close(value, other[graph][name]) for graph, arrays in one.items() for name, value in arrays.items())


def _close(value: Array, other: Array) -> bool:
    values = value.astype(np.float64), other.astype(np.float64)
    return value.shape == other.shape and np.allclose(*values, rtol=1e-3, atol=1e-6, equal_nan=True)
