"""A user's own module, with the inputs and outputs of its declared graphs, under the names of its state dict."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zoo import UsageError
from zoo.factories import given_module
from zoo.models.calls import call_by_name, named_results
from zoo.models.factory import build_module
from zoo.models.hooks import loading_hooks, saving_hooks
from zoo_plugins.own_module.config import EXAMPLE, OwnModuleConfig
from zoo_plugins.own_module.example import MeanScorer

__all__ = ["OwnModule"]


class OwnModule(nn.Module):
    """The module that the factory of the configuration builds.

    The original is no submodule: this module shares its parameters, buffers and submodules, so that all have the names
    of the original's state dict. Buffers that the original does not store are stored as well, and fixed.
    """

    def __init__(self, c: OwnModuleConfig) -> None:
        super().__init__()
        self.config = c
        original = _build(c)
        _check(original)
        self.fixed_tensors = (*getattr(original, "fixed_tensors", ()), *_store_buffers(original))
        self.positive_tensors = dict(getattr(original, "positive_tensors", {}))
        self._declared = {graph.method: [item.name for item in graph.outputs] for graph in c.graphs()}
        object.__setattr__(self, "original", original)
        self._parameters, self._buffers, self._modules = original._parameters, original._buffers, original._modules

    original: nn.Module

    def train(self, mode: bool = True) -> OwnModule:
        """Set the mode of the original, too."""
        self.original.training = mode
        return super().train(mode)

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


def _build(c: OwnModuleConfig) -> nn.Module:
    """Return the original, on the current device."""
    on_meta = torch.empty(0).is_meta
    if c.factory is None:
        given = given_module()
        if given is None:
            raise UsageError("no module is given, and no factory named")
        return _copy(given, on_meta=on_meta)
    if c.factory == EXAMPLE:
        return MeanScorer(**c.arguments)
    if not on_meta:
        return build_module(c.factory, c.arguments)
    try:
        return _copy(build_module(c.factory, c.arguments), on_meta=True)
    except UsageError:  # a factory may read values, which tensors on the meta device lack
        with torch.device("cpu"):
            return _copy(build_module(c.factory, c.arguments), on_meta=True)


def _copy(module: nn.Module, *, on_meta: bool) -> nn.Module:
    """Return a copy on the CPU or the meta device, whose tied tensors stay tied."""
    copies: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        value = torch.empty_like(tensor, device="meta") if on_meta else tensor.detach().cpu().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    try:
        return copy.deepcopy(module, copies)
    except Exception as error:  # an attribute may be anything
        raise UsageError(f"cannot copy the {type(module).__name__} ({type(error).__name__}: {error})") from error


def _check(original: nn.Module) -> None:
    """Raise :class:`UsageError` for state that is no parameter or buffer, and for code that changes what is stored."""
    for hook in (*saving_hooks(original), *loading_hooks(original)):
        raise UsageError(f"{hook} changes what is stored", None, "keep state in parameters and buffers alone")
    for path, module in original.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                where = f"{path}.{name}".strip(".")
                remedy = f'use self.register_buffer("{name}", ...)'
                raise UsageError(f"{where} is a tensor, but no parameter or buffer", type(original).__name__, remedy)


def _store_buffers(original: nn.Module) -> tuple[str, ...]:
    """Make all buffers part of the state dict. Returns the names of those that were not."""
    stored = original.state_dict().keys()
    names = [name for name, _ in original.named_buffers(remove_duplicate=False) if name not in stored]
    for name in names:
        path, _, short = name.rpartition(".")
        original.get_submodule(path).register_buffer(short, original.get_buffer(name), persistent=True)
    return tuple(names)
