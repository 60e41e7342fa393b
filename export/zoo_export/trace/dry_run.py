"""A run of a model on the meta device, which records the tensors that are passed between calls of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.nn import GraphModule
from zoo_export.trace.blocks import Block, CallOutput, CallSite, GraphInput, Outside, patched
from zoo_export.trace.calls import ModuleCall, UnfitError

__all__ = ["DryRun"]


_DIFFERENT = "is called with different kinds of arguments"


class DryRun:
    """A run on the meta device, in which only the first call of each kind of block runs its forward method."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        self.model = model
        self.blocks = blocks
        self.calls: list[CallSite] = []
        self.unfit: dict[int, str] = {}
        """Why blocks cannot be functions, by ``id``."""
        self.signatures: dict[str, Hashable] = {}
        """The signature of the first call of each module, by path."""
        self.sources: dict[int, GraphInput | CallOutput | Outside] = {}
        self.used: set[int] = set()
        """Ids of tensors that are read outside the blocks, or returned from the graph."""
        self._alive: list[object] = []  # ids are unique only among objects that exist at the same time
        self._active: list[str] = []

    def __call__(self, module: GraphModule, examples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.sources |= {id(tensor): GraphInput(number) for number, tensor in enumerate(examples)}
        handles = [
            inner.register_forward_pre_hook(self._reached(block, path))
            for block in self.blocks
            for path in block.paths
            for inner in self.model.get_submodule(path).modules()
        ]
        try:
            with patched(self.model, self.blocks, self._forward_of), _Uses(self), torch.no_grad():
                return module(*examples)
        finally:
            for handle in handles:
                handle.remove()

    def kinds_of(self, block: Block) -> list[list[str]]:
        """Return the modules of a block by the signature of their calls, if each has one and there are several."""
        kinds: dict[Hashable, list[str]] = {}
        if self.unfit.get(id(block)) == _DIFFERENT:
            for path in block.paths:
                kinds.setdefault(self.signatures.get(path), []).append(path)
        return list(kinds.values()) if len(kinds) > 1 else []

    def read(self, value: object) -> None:
        """Record that tensors are read, unless inside a block."""
        if isinstance(value, Tensor) and not self._active:
            self.used.add(id(value))
            self._alive.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                self.read(item)
        elif isinstance(value, dict):
            self.read(list(value.values()))

    def _reached(self, block: Block, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _arguments: object) -> None:
            if path not in self._active and module is not self.model.get_submodule(path):
                self.unfit.setdefault(id(block), "has submodules that are called from outside")

        return hook

    def _forward_of(self, block: Block, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*arguments: Any, **named: Any) -> Any:
            self._active.append(path)
            try:
                call = ModuleCall(forward, arguments, named)
                self.signatures.setdefault(path, call.signature)
                sources = [self._source(tensor) for tensor in call.tensors]
                if block.first is None:
                    self._lead(block, path, call)
                elif call.signature != block.signature:
                    raise UnfitError(_DIFFERENT)
                number = len(self.calls)
                self.calls.append(CallSite(block, path, sources))
                outputs = [torch.empty_like(tensor) for tensor in block.returned]
                self._alive.append(outputs)
                self.sources |= {id(tensor): CallOutput(number, n) for n, tensor in enumerate(outputs)}
                return call.accept(block.result, outputs)
            except UnfitError as error:
                self.unfit.setdefault(id(block), str(error))
                return forward(*arguments, **named)
            finally:
                self._active.pop()

        return run

    def _lead(self, block: Block, path: str, call: ModuleCall) -> None:
        versions = [tensor._version for tensor in call.tensors]
        block.result = call.run(call.tensors)
        if [tensor._version for tensor in call.tensors] != versions:
            raise UnfitError("changes an argument in place")
        block.outputs, block.returned = call.outputs(block.result)
        block.first = len(self.calls)
        block.leader = path
        block.inputs = call.names
        block.signature = call.signature

    def _source(self, tensor: Tensor) -> GraphInput | CallOutput | Outside:
        self._alive.append(tensor)
        return self.sources.setdefault(id(tensor), Outside(id(tensor)))


class _Uses(TorchFunctionMode):
    """Reports the arguments of every torch function to a dry run."""

    def __init__(self, run: DryRun) -> None:
        self._run = run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._run.read(args)
        self._run.read(kwargs)
        return function(*args, **(kwargs or {}))
