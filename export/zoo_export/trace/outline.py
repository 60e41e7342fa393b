"""Detection of repeated modules, so that only one of each kind is traced.

Modules are compared by structure. A dry run on the meta device, which computes nothing, records the tensors passed
between calls. Then the model is traced with the first module of each kind between two markers; the other modules leave
at most one marker per call, and their parameters are hidden from the tracer. :mod:`zoo_export.trace.functions` turns
the result into ONNX functions and calls.

Unsuitable modules (with submodules called from outside, unsupported argument types, or shapes that differ between
layers) are traced normally. Errors here cannot produce a wrong export, because the resulting graph is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zoo.contract import Graph
from zoo.nn import GraphModule
from zoo_export.trace.blocks import (
    CALL,
    DOMAIN,
    ENTER,
    LEAVE,
    Block,
    CallOutput,
    CallSite,
    GraphInput,
    Outside,
    patched,
)
from zoo_export.trace.calls import ModuleCall
from zoo_export.trace.dry_run import DryRun
from zoo_export.trace.structure import named_tensors, structure

__all__ = ["Outline"]


class Outline:
    """Outline of a graph as a sequence of block calls.

    Args:
        model: the model, on the meta device.
        graph: the graph to outline.
        examples: example inputs, on the meta device.
        blocks: whether to look for repeated modules.
    """

    def __init__(self, model: nn.Module, graph: Graph, examples: Sequence[Tensor], *, blocks: bool = True) -> None:
        self.model = model
        self.graph = graph
        self.blocks: list[Block] = []
        self.calls: list[CallSite] = []
        alike: dict[Hashable, list[str]] = {}
        for path, module in model.named_modules():
            if blocks and path and any(module.children()) and any(True for _ in module.parameters()):
                alike.setdefault(structure(module), []).append(path)
        candidates = list(alike.values())
        reasons: list[str] = []
        while True:  # until every block that is left can be a function
            self.blocks = self._outermost(candidates)
            run = DryRun(model, self.blocks)
            with torch.device("meta"):  # for tensors created without a device
                returned = run(GraphModule(model, graph), examples)
            counts = Counter(id(call.block) for call in run.calls)
            unfit = [block for block in self.blocks if id(block) in run.unfit or counts[id(block)] == 1]
            if not unfit:
                break
            kinds = [kind for block in unfit for kind in run.kinds_of(block)]
            for block in unfit:
                if len(block.paths) > 1 and id(block) in run.unfit and not run.kinds_of(block):
                    reasons.append(f"{block.paths[0]} ({block.name}) {run.unfit[id(block)]}")
            candidates = [*kinds, *(paths for paths in candidates if paths not in [block.paths for block in unfit])]
        self.unfit = reasons[0] if reasons and not self.blocks else None
        """Why there are no blocks, although modules repeat."""
        self.calls = run.calls
        self._settle(run, examples, returned)

    def _outermost(self, candidates: Sequence[list[str]]) -> list[Block]:
        blocks: list[Block] = []
        # A kind may have modules inside those of a kind that is listed later, whose first layer is of another kind.
        repeated = tuple(f"{path}." for paths in candidates if len(paths) > 1 for path in paths)
        for paths in candidates:
            outer = (*repeated, *(f"{path}." for block in blocks for path in block.paths))
            if not any(path.startswith(outer) for path in paths):
                cls = type(self.model.get_submodule(paths[0]))
                blocks.append(Block(paths, cls.__module__, cls.__qualname__.rpartition(".")[2]))
        return blocks

    def _settle(self, run: DryRun, examples: Sequence[Tensor], returned: Sequence[Tensor]) -> None:
        """Decide which calls, inputs and outputs the trace needs."""
        seen: set[Outside] = set()
        for number, call in enumerate(self.calls):
            outside = {source for source in call.sources if isinstance(source, Outside)}
            outputs = {
                key for key, source in run.sources.items() if isinstance(source, CallOutput) and source.call == number
            }
            call.traced = number == call.block.first or bool(outputs & run.used) or not outside <= seen
            if call.traced:
                seen |= outside
        firsts = {block.first for block in self.blocks}
        self.stand_ins = list(range(len(examples)))
        """For each input of the graph, the index of the input that replaces it in the trace."""
        for number, tensor in enumerate(examples):
            users = [
                (index, position)
                for index, call in enumerate(self.calls)
                for position, source in enumerate(call.sources)
                if source == GraphInput(number)
            ]
            is_read = id(tensor) in run.used or any(tensor is output for output in returned)
            if users and not is_read and not any(index in firsts for index, _ in users):
                index, position = users[0]
                first = self.calls[index].block.first
                assert first is not None
                source = self.calls[first].sources[position]
                if isinstance(source, GraphInput):
                    self.stand_ins[number] = source.number
        self.outputs = [self._origin(run, tensor) for tensor in returned]
        """For each output of the graph, the call that returns it, or None if the output is part of the trace."""

    def _origin(self, run: DryRun, tensor: Tensor) -> CallOutput | None:
        source = run.sources.get(id(tensor))
        if isinstance(source, CallOutput) and source.call != self.calls[source.call].block.first:
            return source
        return None

    @property
    def kept_inputs(self) -> list[int]:
        """Indices of the inputs that are part of the trace."""
        return sorted(set(self.stand_ins))

    @property
    def kept_outputs(self) -> list[int]:
        """Indices of the outputs that are part of the trace."""
        return [number for number, origin in enumerate(self.outputs) if origin is None]

    @contextmanager
    def tracing(self) -> Iterator[GraphModule]:
        """Yield the graph as a module to trace. Removes the parameters of all but the first block of each kind."""
        names = {id(tensor): name for name, tensor in reversed(list(named_tensors(self.model)))}
        for block in self.blocks:
            leader = self.model.get_submodule(block.leader or block.paths[0])
            block.tensors = tuple(name for name, _ in named_tensors(leader))
            for path in block.paths:
                tensors = named_tensors(self.model.get_submodule(path))
                block.stored[path] = tuple(names[id(tensor)] for _, tensor in tensors)
        for block in self.blocks:
            for path in block.paths:
                if path != block.leader:
                    for module in self.model.get_submodule(path).modules():
                        module._parameters.clear()
                        module._buffers.clear()
        module = _Traced(self)
        with patched(self.model, self.blocks, module.forward_of):
            yield module


class _Traced(GraphModule):
    """The module to trace: the graph with fewer inputs and outputs, and markers in place of calls."""

    def __init__(self, outline: Outline) -> None:
        super().__init__(outline.model, outline.graph)
        self._outline = outline
        self._number = 0
        self._marked: list[Tensor] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run on the kept inputs; return the kept outputs, then the marked tensors, so that no marker is removed."""
        self._number = 0
        self._marked = []
        inputs = dict(zip(self._outline.kept_inputs, tensors, strict=True))
        outputs = super().forward(*(inputs[number] for number in self._outline.stand_ins))
        return (*(outputs[number] for number in self._outline.kept_outputs), *self._marked)

    def forward_of(self, block: Block, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return the replacement of a block's forward method, which leaves markers."""
        forward = module.forward

        def trace(*arguments: Any, **named: Any) -> Any:
            number, self._number = self._number, self._number + 1
            site = self._outline.calls[number]
            call = ModuleCall(forward, arguments, named)
            if site.path != path:
                raise RuntimeError(f"{path} is called where the dry run called {site.path}")
            if number == block.first:
                block.result = call.run(_mark(ENTER, number, call.tensors, call.tensors))
                _, tensors = call.outputs(block.result)
                outputs = list(_mark(LEAVE, number, tensors, tensors))
                block.returned = outputs
            elif site.traced:
                outputs = list(_mark(CALL, number, call.tensors, block.returned))
            else:
                return call.accept(block.result, block.returned)
            self._marked.append(outputs[0])
            return call.accept(block.result, outputs)

        return trace


def _mark(kind: str, number: int, inputs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Insert a marker that reads ``inputs`` and returns tensors with the dtypes and shapes of ``like``."""
    outputs: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{kind}", inputs, {"call": number},
        dtypes=[tensor.dtype for tensor in like], shapes=[tensor.shape for tensor in like], version=1,
    )  # fmt: skip
    return outputs
