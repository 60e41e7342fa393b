"""Detection of repeated modules, so that only one of each kind is traced.

Modules are compared by structure. A dry run on the meta device, which computes nothing, records the tensors passed
between calls. Then the model is traced with the first module of each kind between two markers; the other modules leave
at most one marker per call, and their parameters are hidden from the tracer. :mod:`zoo_export.trace.functions` turns
the result into ONNX functions and calls.

Unsuitable modules (with submodules called from outside, unsupported argument types, or shapes that differ between
layers) are traced normally. Errors here cannot produce a wrong export, because the resulting graph is verified.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.contract import Graph
from zoo.nn import GraphModule, LayerCache, LayerStates

__all__ = ["CALL", "DOMAIN", "ENTER", "LEAVE", "Block", "CallOutput", "CallSite", "GraphInput", "Outline", "Outside"]

DOMAIN, ENTER, LEAVE, CALL = "zoo.trace", "Enter", "Leave", "Call"
"""Domain and operators of the markers."""
_DIFFERENT = "is called with different kinds of arguments"
_PLAIN = vars(nn.Module())
"""Attributes of every module."""


@dataclass(frozen=True)
class GraphInput:
    """An input of the graph, by index."""

    number: int


@dataclass(frozen=True)
class CallOutput:
    """A tensor returned by a call, by the indices of the call and of the tensor."""

    call: int
    number: int


@dataclass(frozen=True)
class Outside:
    """A tensor that the model computed between calls."""

    identity: int


@dataclass
class CallSite:
    """One call of a block."""

    block: Block
    path: str
    sources: list[GraphInput | CallOutput | Outside]
    traced: bool = True
    """Whether the call leaves a marker. If not, its outputs are only used by other calls."""


@dataclass
class Block:
    """Modules with the same structure."""

    paths: list[str]
    domain: str
    name: str
    first: int | None = None
    """Index of the call that is traced, or None if there is no call."""
    leader: str = ""
    """Path of the traced module."""
    inputs: tuple[str, ...] = ()
    """Names of the tensor arguments."""
    outputs: tuple[str, ...] = ()
    """Names of the returned tensors, including the updated caches."""
    tensors: tuple[str, ...] = ()
    """Names of the parameters and buffers, relative to the block."""
    stored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each path, the names of the same tensors in the model."""
    signature: Hashable = None
    result: Any = None
    returned: list[Tensor] = field(default_factory=list)
    """Latest tensors of the first call's result."""


class _UnfitError(Exception):
    """A module is unsuitable as a function."""


class Outline:
    """Outline of a graph as a sequence of block calls.

    Args:
        model: the model, on the meta device.
        graph: the graph to outline.
        examples: example inputs, on the meta device.
        blocks: whether to look for repeated modules.
    """

    def __init__(self, model: nn.Module, graph: Graph, examples: Sequence[Tensor], *, blocks: bool = True) -> None:
        self.model, self.graph = model, graph
        self.blocks: list[Block] = []
        self.calls: list[CallSite] = []
        alike: dict[Hashable, list[str]] = {}
        for path, module in model.named_modules():
            if blocks and path and any(module.children()) and any(True for _ in module.parameters()):
                alike.setdefault(_structure(module), []).append(path)
        candidates = list(alike.values())
        reasons: list[str] = []
        while True:
            self.blocks = self._outermost(candidates)
            run = _DryRun(model, self.blocks)
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
        for paths in candidates:  # outer modules come before inner ones
            outer = tuple(f"{path}." for block in blocks for path in block.paths)
            if not any(path.startswith(outer) for path in paths):
                cls = type(self.model.get_submodule(paths[0]))
                blocks.append(Block(paths, cls.__module__, cls.__qualname__.rpartition(".")[2]))
        return blocks

    def _settle(self, run: _DryRun, examples: Sequence[Tensor], returned: Sequence[Tensor]) -> None:
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
            kept = id(tensor) in run.used or any(tensor is output for output in returned)
            if users and not kept and not any(index in firsts for index, _ in users):
                index, position = users[0]
                first = self.calls[index].block.first
                assert first is not None
                source = self.calls[first].sources[position]
                if isinstance(source, GraphInput):
                    self.stand_ins[number] = source.number
        self.outputs = [self._origin(run, tensor) for tensor in returned]
        """For each output of the graph, the call that returns it, or None if the output is part of the trace."""

    def _origin(self, run: _DryRun, tensor: Tensor) -> CallOutput | None:
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
        names = {id(tensor): name for name, tensor in reversed(list(_tensors(self.model)))}
        for block in self.blocks:
            block.tensors = tuple(
                name for name, _ in _tensors(self.model.get_submodule(block.leader or block.paths[0]))
            )
            for path in block.paths:
                block.stored[path] = tuple(names[id(tensor)] for _, tensor in _tensors(self.model.get_submodule(path)))
        for block in self.blocks:
            for path in block.paths:
                if path != block.leader:
                    for module in self.model.get_submodule(path).modules():
                        module._parameters.clear()
                        module._buffers.clear()
        module = _Traced(self)
        with _patched(self.model, self.blocks, module.forward_of):
            yield module


class _DryRun:
    """A run on the meta device, in which only the first call of each kind of block runs its forward method."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        self.model, self.blocks = model, blocks
        self.calls: list[CallSite] = []
        self.unfit: dict[int, str] = {}
        """Why blocks cannot be functions, by ``id``."""
        self.signatures: dict[str, Hashable] = {}
        """The signature of the first call of each module, by path."""
        self.sources: dict[int, GraphInput | CallOutput | Outside] = {}
        self.used: set[int] = set()
        """Ids of tensors that are read outside the blocks, or returned from the graph."""
        self._alive: list[object] = []
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
            with _patched(self.model, self.blocks, self._forward_of), _Uses(self), torch.no_grad():
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
                call = _Call(module, arguments, named)
                self.signatures.setdefault(path, call.signature)
                sources = [self._source(tensor) for tensor in call.tensors]
                if block.first is None:
                    self._lead(block, path, call, forward)
                elif call.signature != block.signature:
                    raise _UnfitError(_DIFFERENT)
                number = len(self.calls)
                self.calls.append(CallSite(block, path, sources))
                made = [torch.empty_like(tensor) for tensor in block.returned]
                self._alive.append(made)
                self.sources |= {id(tensor): CallOutput(number, n) for n, tensor in enumerate(made)}
                return call.accept(block.result, made)
            except _UnfitError as error:
                self.unfit.setdefault(id(block), str(error))
                return forward(*arguments, **named)
            finally:
                self._active.pop()

        return run

    def _lead(self, block: Block, path: str, call: _Call, forward: Callable[..., Any]) -> None:
        versions = [tensor._version for tensor in call.tensors]
        block.result = call.run(forward, call.tensors)
        if [tensor._version for tensor in call.tensors] != versions:
            raise _UnfitError("changes an argument in place")
        block.outputs, block.returned = call.outputs(block.result)
        block.first, block.leader, block.inputs, block.signature = len(self.calls), path, call.names, call.signature

    def _source(self, tensor: Tensor) -> GraphInput | CallOutput | Outside:
        self._alive.append(tensor)
        return self.sources.setdefault(id(tensor), Outside(id(tensor)))


class _Uses(TorchFunctionMode):
    """Reports the arguments of every torch function to a dry run."""

    def __init__(self, run: _DryRun) -> None:
        self._run = run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._run.read(args)
        self._run.read(kwargs)
        return function(*args, **(kwargs or {}))


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
        given = dict(zip(self._outline.kept_inputs, tensors, strict=True))
        outputs = super().forward(*(given[number] for number in self._outline.stand_ins))
        return (*(outputs[number] for number in self._outline.kept_outputs), *self._marked)

    def forward_of(self, block: Block, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return the replacement of a block's forward method, which leaves markers."""
        forward = module.forward

        def trace(*arguments: Any, **named: Any) -> Any:
            number, self._number = self._number, self._number + 1
            site = self._outline.calls[number]
            call = _Call(module, arguments, named)
            if site.path != path:
                raise RuntimeError(f"{path} is called where the dry run called {site.path}")
            if number == block.first:
                block.result = call.run(forward, _mark(ENTER, number, call.tensors, call.tensors))
                _, tensors = call.outputs(block.result)
                block.returned = made = list(_mark(LEAVE, number, tensors, tensors))
            elif site.traced:
                made = list(_mark(CALL, number, call.tensors, block.returned))
            else:
                return call.accept(block.result, block.returned)
            self._marked.append(made[0])
            return call.accept(block.result, made)

        return trace


def _mark(kind: str, number: int, inputs: Sequence[Tensor], like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Insert a marker that reads ``inputs`` and returns tensors with the dtypes and shapes of ``like``."""
    outputs: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{kind}", inputs, {"call": number},
        dtypes=[tensor.dtype for tensor in like], shapes=[tensor.shape for tensor in like], version=1,
    )  # fmt: skip
    return outputs


@contextmanager
def _patched(
    model: nn.Module, blocks: Iterable[Block], forward_of: Callable[[Block, str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Temporarily replace the forward methods of all blocks."""
    modules = []
    try:
        for block in blocks:
            for path in block.paths:
                module: Any = model.get_submodule(path)
                module.forward = forward_of(block, path, module)
                modules.append(module)
        yield
    finally:
        for module in modules:
            del module.forward


class _Call:
    """The arguments of a module call: named tensors, caches, and other values."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._bound = inspect.signature(type(module).forward).bind(module, *arguments, **named)
        found: list[tuple[str, Tensor]] = []
        self._caches: list[tuple[str, _Cache]] = []
        form = [_flatten(name, value, found, self._caches) for name, value in list(self._bound.arguments.items())[1:]]
        self.names = _distinct([name for name, _ in found])
        self.tensors = [tensor for _, tensor in found]
        self.signature = tuple(form), tuple((tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors)

    def run(self, forward: Callable[..., Any], tensors: Iterable[Tensor]) -> Any:
        """Call ``forward`` with the tensors replaced. Cache objects are kept."""
        rest = iter(tensors)
        for name in list(self._bound.arguments)[1:]:
            self._bound.arguments[name] = _replace(self._bound.arguments[name], rest)
        return forward(*self._bound.args[1:], **self._bound.kwargs)

    def outputs(self, result: Any) -> tuple[tuple[str, ...], list[Tensor]]:
        """Return names and tensors of the result and of the updated caches."""
        found: list[tuple[str, Tensor]] = []
        returned: list[tuple[str, _Cache]] = []
        _flatten("output", result, found, returned)
        if returned or not found:
            raise _UnfitError("returns other values than tensors")
        for name, cache in self._caches:
            for part, tensor in _parts(cache):
                if tensor is None:
                    raise _UnfitError("leaves a cache empty")
                found.append((f"present_{name}_{part}", tensor))
        return _distinct([name for name, _ in found]), [tensor for _, tensor in found]

    def accept(self, result: Any, tensors: Iterable[Tensor]) -> Any:
        """Return ``result`` with its tensors replaced by ``tensors``, and store the last of them in the caches."""
        rest = iter(tensors)
        result = _replace(result, rest)
        for _, cache in self._caches:
            _store(cache, [next(rest) for _ in _parts(cache)])
        return result


_Cache = LayerCache | LayerStates


def _parts(cache: _Cache) -> list[tuple[str, Tensor | None]]:
    """Return the tensors of a cache by name; the order of states does not depend on that in which a layer sets them."""
    return [("key", cache.key), ("value", cache.value)] if isinstance(cache, LayerCache) else sorted(cache.items())


def _store(cache: _Cache, tensors: Sequence[Any]) -> None:
    """Replace the tensors of a cache, in the order of :func:`_parts`."""
    if isinstance(cache, LayerCache):
        cache.key, cache.value = tensors
    else:
        cache.update(zip([name for name, _ in _parts(cache)], tensors, strict=True))


def _flatten(name: str, value: Any, tensors: list[tuple[str, Tensor]], caches: list[tuple[str, _Cache]]) -> Hashable:
    """Collect tensors and caches, named by their position; return the remaining structure."""
    if isinstance(value, Tensor):
        tensors.append((name, value))
        return Tensor
    if isinstance(value, _Cache):
        caches.append((name, value))
        window = value.window if isinstance(value, LayerCache) else None
        return (
            type(value),
            window,
            tuple((part, _flatten(f"{name}_{part}", item, tensors, caches)) for part, item in _parts(value)),
        )
    if type(value) in (tuple, list):
        return type(value), tuple(_flatten(f"{name}_{n}", item, tensors, caches) for n, item in enumerate(value))
    if type(value) is dict:
        return dict, tuple((key, _flatten(f"{name}_{key}", item, tensors, caches)) for key, item in value.items())
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, torch.SymInt):
        return int, None
    raise _UnfitError(f"takes or returns a {type(value).__name__}")


def _replace(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Replace the tensors in a structure, in the order of :func:`_flatten`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, _Cache):
        _store(value, [_replace(item, tensors) for _, item in _parts(value)])
        return value
    if type(value) in (tuple, list):
        return type(value)(_replace(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _replace(item, tensors) for key, item in value.items()}
    return value


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Make names unique by appending numbers to repeated ones."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(result)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _structure(module: nn.Module) -> Hashable:
    """Key under which modules may share one trace."""
    order: dict[int, int] = {}
    sharing = tuple(order.setdefault(id(tensor), len(order)) for _, tensor in _tensors(module))
    return _kind(module), sharing


def _kind(module: nn.Module) -> Hashable:
    own = {**module._parameters, **module._buffers}
    values = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
    return (
        type(module),
        tuple((name, None if t is None else (type(t), t.shape, t.dtype)) for name, t in own.items()),
        tuple((key, _token(value)) for key, value in values.items() if key not in _PLAIN or value != _PLAIN[key]),
        tuple((name, None if child is None else _kind(child)) for name, child in module._modules.items()),
    )


def _token(value: Any) -> Hashable:
    """Key that is equal for values with the same effect on a trace; unhashable objects only equal themselves."""
    if isinstance(value, list | tuple):
        return type(value), tuple(_token(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((_token(key), _token(item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
