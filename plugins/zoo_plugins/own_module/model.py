"""A user's own module, with the inputs and outputs of its declared graphs, under the names of its state dict."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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
        graphs = c.graphs() if c.declares_graphs else ()
        self._declared = {graph.method: [item.name for item in graph.outputs] for graph in graphs}
        self._inputs = {graph.method: [item.name for item in graph.inputs] for graph in graphs}
        self.share(original)

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Return the outputs of the original by name; without a declared graph of it, what the original returns.

        Arguments without names are the inputs in the order of their declaration.
        """
        if "forward" not in self._declared:
            return self.original(*arguments, **inputs)
        inputs |= dict(zip(self._inputs["forward"], arguments, strict=False))
        return self._named("forward", call_by_name(self.original, inputs, self.original.forward))

    def __getattr__(self, name: str) -> Any:
        """Return the method of another graph, or an attribute of the original."""
        if name == "forward" or name not in vars(self).get("_declared", {}):
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("_") or "original" not in vars(self):
                    raise
            return getattr(self.original, name)
        method = getattr(self.original, name)
        return lambda **inputs: self._named(name, call_by_name(method, inputs, method))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the original, unless it is one of this module."""
        own = "original" not in vars(self) or name in vars(self) or hasattr(type(self), name)
        if own or isinstance(value, nn.Module | Tensor):  # registered modules and tensors are shared
            super().__setattr__(name, value)
        else:
            setattr(self.original, name, value)

    def _named(self, method: str, result: Any) -> dict[str, Any]:
        """Return what a method of the original returned, by the names of the declared outputs."""
        declared = self._declared[method]
        results = named_results(result, declared)
        missing = [name for name in declared if name not in results]
        if missing:
            raise ValueError(f"{type(self.original).__name__} returns no {missing[0]}, but {', '.join(results)}")
        return results
