"""A user's own module, with the inputs and outputs of its declared graphs, under the names of its state dict."""

from __future__ import annotations

from typing import Any

from zoo.modules import SharedModule, build_module, call_by_name, named_results, store_buffers
from zoo_plugins.own_module.config import EXAMPLE, OwnModuleConfig
from zoo_plugins.own_module.example import MeanScorer

__all__ = ["OwnModule"]


class OwnModule(SharedModule):
    """The module that the factory of the configuration builds.

    All tensors have the names of the original's state dict. Buffers that the original does not store are stored as
    well, and fixed.
    """

    def __init__(self, c: OwnModuleConfig) -> None:
        super().__init__()
        self.config = c
        original = MeanScorer(**c.arguments) if c.factory == EXAMPLE else build_module(c.factory, c.arguments)
        self.fixed_tensors = (*getattr(original, "fixed_tensors", ()), *store_buffers(original))
        self.positive_tensors = dict(getattr(original, "positive_tensors", {}))
        self._declared = {graph.method: [item.name for item in graph.outputs] for graph in c.graphs()}
        self.share(original)

    def forward(self, **inputs: Any) -> dict[str, Any]:
        """Return the outputs of the original by name."""
        return self._named("forward", call_by_name(self.original, inputs, self.original.forward))

    def __getattr__(self, name: str) -> Any:
        """Return the method of another graph."""
        if name == "forward" or name not in vars(self).get("_declared", {}):
            return super().__getattr__(name)
        method = getattr(self.original, name)
        return lambda **inputs: self._named(name, call_by_name(method, inputs, method))

    def _named(self, method: str, result: Any) -> dict[str, Any]:
        """Return what a method of the original returned, by the names of the declared outputs."""
        declared = self._declared[method]
        results = named_results(result, declared)
        missing = [name for name in declared if name not in results]
        if missing:
            raise ValueError(f"{type(self.original).__name__} returns no {missing[0]}, but {', '.join(results)}")
        return results
