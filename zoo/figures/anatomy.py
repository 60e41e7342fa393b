"""The module structure of a model, recorded by calling it without weights. :mod:`zoo.figures.drawing` draws it.

Each declared graph is called on the meta device, with hooks on every module. Modules are nested as in the model, in the
order in which their calls end. Two calls with different sizes identify the dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from zoo import plugins
from zoo.contract import Dim, Graph, dim_size, fit_sizes, standard_fields
from zoo.models import create
from zoo.models.dtypes import declared_dtype
from zoo.nn import call_graph
from zoo.registry import ModelSpec

__all__ = ["Anatomy", "ModulePart", "dissect"]

Shape = tuple[Dim, ...]

_SMALL = (3, 5, 7, 11, 13, 17, 19, 23)
"""Sizes of the named dimensions in the first call: primes, so that none equals a product of others."""
_LARGER, _LARGE = (5, 11, 17, 29, 37, 47, 53, 67), (307, 337, 373, 419, 457, 503, 547, 587)
"""Sizes in the second call. ``_LARGE`` is for models with long inputs, and reveals padding to whole chunks."""
_LONG = 1024
_LONGEST_PATTERN = 4
"""Maximum length of a repeating pattern of modules drawn as one part."""


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A module, a run of equal modules in a list, or a repeating pattern of modules."""

    name: str
    """Attribute name in the enclosing part or the model."""
    kind: str
    """Class of the module; ``Parameter`` for a parameter of the enclosing module, empty for a pattern."""
    count: int
    """Number of modules, or of repetitions of the pattern."""
    calls: Dim
    """Number of calls of each module per call of the graph."""
    shape: Shape | None
    """Shape of a parameter, or of the first tensor that a module returns; None if only its parts are called."""
    parameters: int
    """Parameters of one module, or of one repetition. Each parameter is counted at its first use."""
    shared: bool
    """Whether some of its parameters are counted elsewhere."""
    parts: tuple[ModulePart, ...]
    """Inner parts, whose parameters add up to its own."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The structure of one graph of a model."""

    graph: Graph
    parts: tuple[ModulePart, ...]
    """The outermost modules. Those of all graphs together have all the parameters of the model."""


@dataclass
class _Node:
    """A module that was called, or that contains one."""

    path: str
    module: nn.Module
    shape: Shape | None = None
    calls: Dim = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The parameters that the module reads directly, by name."""
    nodes: list[_Node] = field(default_factory=list)


def dissect(spec: ModelSpec) -> list[Anatomy]:
    """Return the parts of each graph of a model, without creating weights.

    Raises:
        PluginError: the model cannot be built, or cannot be called with the inputs that it declares.
    """
    model = create.build_on_meta(spec)
    pair = (_SMALL, _LARGE if (standard_fields(spec.config).max_seq_len or 0) >= _LONG else _LARGER)
    with plugins.blame(spec.plugin, f"cannot call {spec.name}"):
        calls = [[_watch(model, graph, sizes) for sizes in pair] for graph in spec.graphs]
    read = _read_by(model, {path for first, _ in calls for path in first})
    seen: set[int] = set()
    parts: list[Anatomy] = []
    for graph, (first, second) in zip(spec.graphs, calls, strict=True):
        names = _DimensionNames(graph, pair)
        nodes = {"": _Node("", model)}
        for path, (shape, count) in first.items():
            other_shape, other_count = second.get(path, (None, 0))
            node = _place(path, model, nodes)
            node.shape, node.calls = names.of_shape(shape, other_shape), names.of(count, other_count)
        for path, node in nodes.items():
            if path in first or not (path or parts):  # the model's own parameters go to the first graph
                node.tensors = read.get(path, {})
        parts.append(Anatomy(graph, _parts(nodes[""], seen)))
    return parts


def _watch(model: nn.Module, graph: Graph, sizes: Sequence[int]) -> dict[str, tuple[tuple[int, ...] | None, int]]:
    """Return the first output shape and the number of calls of each called module, by its path.

    Modules are in the order in which their first calls end, so a module comes after those it calls. Modules that
    return their input, such as dropout in evaluation mode, are omitted.
    """
    calls: dict[str, tuple[tuple[int, ...] | None, int]] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            if any(returned is item for item in given) and not any(True for _ in module.parameters()):
                return
            shape, count = calls.get(path, (_shape(returned), 0))
            calls[path] = (shape, count + 1)

        return hook

    handles = [module.register_forward_hook(watch(path)) for path, module in model.named_modules() if path]
    named = _named(graph, sizes)
    real = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    try:
        with torch.device("meta"), torch.no_grad():
            feeds = {
                tensor.name: torch.zeros(tensor.shape(named), dtype=declared_dtype(tensor, real))
                for tensor in graph.input_tensors()
            }
            call_graph(model, graph, feeds)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _named(graph: Graph, sizes: Sequence[int]) -> dict[str, int]:
    """Return the size of each named dimension."""
    return fit_sizes([graph], dict(zip(graph.dim_names(), sizes, strict=False)))


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of the first tensor in a value, or None."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((shape for shape in map(_shape, inner) if shape is not None), None)


class _DimensionNames:
    """Names of a graph's free dimensions, looked up by their sizes in both calls."""

    def __init__(self, graph: Graph, pair: Sequence[Sequence[int]]) -> None:
        small, large = (_named(graph, sizes) for sizes in pair)
        tensors = (*graph.input_tensors(), *graph.output_tensors())
        sums = [dim for tensor in tensors for dim in tensor.dims if isinstance(dim, str)]
        self.known = {(dim_size(dim, small), dim_size(dim, large)): dim for dim in [*graph.dim_names(), *sums]}
        for one, other in combinations(list(self.known.items()), 2):
            sizes = (one[0][0] * other[0][0], one[0][1] * other[0][1])
            self.known.setdefault(sizes, f"{one[1]} * {other[1]}")

    def of(self, small: int, large: int) -> Dim:
        """Return the name of a size, or ``?`` if it depends on the named ones in an unknown way."""
        if small == large:
            return small
        if (small, large) in self.known:
            return self.known[small, large]
        for (first, second), name in self.known.items():
            if small - first == large - second > 0:
                return f"{name} + {small - first}"
            if small % first == 0 and small // first * second == large:
                return f"{small // first} * {name}"
        return "?"

    def of_shape(self, small: tuple[int, ...] | None, large: tuple[int, ...] | None) -> Shape | None:
        """Return the names of a shape's sizes."""
        if small is None or large is None or len(small) != len(large):
            return None
        return tuple(self.of(*pair) for pair in zip(small, large, strict=True))


def _read_by(model: nn.Module, called: set[str]) -> dict[str, dict[str, Tensor]]:
    """Return the parameters that the model and each called module read directly.

    Parameters of a module that is not called are attributed to the nearest enclosing module that is.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for path, module in model.named_modules():
        reader = path
        while reader and reader not in called:
            reader = reader.rpartition(".")[0]
        for name, tensor in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            tensors.setdefault(reader, {})[full.removeprefix(f"{reader}." if reader else "")] = tensor
    return tensors


def _place(path: str, model: nn.Module, nodes: dict[str, _Node]) -> _Node:
    """Return the node of a path, creating it and its parents. Module lists have no nodes."""
    if path not in nodes:
        around = path.rpartition(".")[0]
        while isinstance(model.get_submodule(around), nn.ModuleList | nn.ModuleDict):
            around = around.rpartition(".")[0]
        above = _place(around, model, nodes)
        nodes[path] = _Node(path, model.get_submodule(path))
        above.nodes.append(nodes[path])
    return nodes[path]


def _parts(node: _Node, seen: set[int]) -> tuple[ModulePart, ...]:
    """Return the parameters that a module reads directly, and its submodules, as parts."""
    direct = [
        ModulePart(name, "Parameter", 1, 1, tuple(tensor.shape), *_count(tensor, seen), ())
        for name, tensor in node.tensors.items()
    ]
    inner = [_part(item, node.path, seen) for item in node.nodes]
    return (*direct, *_merge(inner, node.module))


def _part(node: _Node, around: str, seen: set[int]) -> ModulePart:
    parts = _parts(node, seen)
    return ModulePart(
        name=node.path.removeprefix(f"{around}." if around else ""),
        kind=type(node.module).__name__,
        count=1,
        calls=node.calls,
        shape=node.shape,
        parameters=sum(part.count * part.parameters for part in parts),
        shared=any(part.shared for part in parts),
        parts=parts if node.nodes else (),
    )


def _count(tensor: Tensor, seen: set[int]) -> tuple[int, bool]:
    """Count a parameter once: return its size and False, or 0 and True if it was counted before."""
    if id(tensor) in seen:
        return 0, True
    seen.add(id(tensor))
    return tensor.numel(), False


def _merge(parts: Sequence[ModulePart], owner: nn.Module) -> tuple[ModulePart, ...]:
    """Merge runs of equal modules in a list, and repeating patterns of modules, into one part each."""
    merged: list[ModulePart] = []
    place = 0
    while place < len(parts):
        length, turns = max(
            ((length, _turns(parts[place:], length)) for length in range(1, _LONGEST_PATTERN + 1)),
            key=lambda found: (found[0] * found[1] if found[1] > 1 else 1, -found[0]),
        )
        length = length if turns > 1 else 1
        run = parts[place : place + length * turns]
        name = _run_name(run, owner)
        if length == 1:
            merged.append(replace(run[0], name=name, count=turns))
        else:
            pattern = tuple(replace(part, name=part.kind) for part in _merge(run[:length], owner))
            total, shared = sum(part.count * part.parameters for part in pattern), any(part.shared for part in pattern)
            merged.append(ModulePart(name, "", turns, 1, run[-1].shape, total, shared, pattern))
        place += len(run)
    return tuple(merged)


def _turns(parts: Sequence[ModulePart], length: int) -> int:
    """Return how many times the pattern of the first ``length`` parts repeats."""
    likenesses = [_likeness(part) for part in parts[:length]]
    if not all(part.name.rpartition(".")[2].isdigit() for part in parts[:length]):
        return 1
    turns = 1
    while [_likeness(part) for part in parts[turns * length : (turns + 1) * length]] == likenesses:
        turns += 1
    return turns


def _likeness(part: ModulePart) -> ModulePart:
    """Return the part without its index, for comparing members of a list."""
    return replace(part, name=part.name.rpartition(".")[0])


def _run_name(run: Sequence[ModulePart], owner: nn.Module) -> str:
    """Return ``blocks`` for a whole list, or ``blocks 3`` or ``blocks 3-5`` for a part of it."""
    container, _, first = run[0].name.rpartition(".")
    if not first.isdigit():
        return run[0].name
    if container and len(run) == sum(1 for _ in owner.get_submodule(container).children()):
        return container
    last = run[-1].name.rpartition(".")[2]
    return f"{container} {first if first == last else f'{first}-{last}'}".strip()
