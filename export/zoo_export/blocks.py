"""Repeated modules: traced once, and called for every layer as one ONNX function.

A model's modules are compared by structure. Of those that are alike, the first is traced as it is, between two markers;
the others are one marker each, and bring no parameters to the tracer. Afterwards what lies between the first two markers
is cut out as a function, whose parameters are arguments, and every marker becomes a call.

What does not fit (a block reached other than by calling it, arguments of unknown kinds, shapes that differ from layer
to layer) is traced as it is. Nothing here is trusted: the gate compares the graph that comes out.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from zoo.nn import LayerCache
from zoo_export.graph_file import BLOCK_KEY

__all__ = ["Block", "cut_functions", "find_blocks", "marking"]

DOMAIN = "zoo.trace"
ENTER, LEAVE, CALL = "Enter", "Leave", "Call"
_PLAIN = vars(nn.Module())
"""What every module has."""


class _Unfit(Exception):
    """A value that cannot be handed to a function or returned from one."""


@dataclass
class Block:
    """Modules that are alike, by path in the order of their first calls; none of them may be called at all."""

    paths: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    """Names of the tensors among the arguments."""
    outputs: tuple[str, ...] = ()
    """Names of the tensors that come back: results, and what the caches hold afterwards."""
    domain: str = ""
    name: str = ""
    relative: tuple[str, ...] = ()
    """Names of the parameters and buffers inside a block."""
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each path, the names of the same tensors in the model."""

    @property
    def leader(self) -> str:
        """The one that is traced."""
        return self.paths[0]


def find_blocks(model: nn.Module, run: Callable[[nn.Module], object]) -> list[Block]:
    """The outermost repeated modules of ``model`` that can become functions, and those that are not used at all.

    Args:
        model: on the meta device.
        run: calls the model once, on the meta device too.
    """
    alike: dict[Hashable, list[str]] = {}
    for path, module in model.named_modules():
        if path and any(module.children()) and any(True for _ in module.parameters()):
            alike.setdefault(_structure(module), []).append(path)
    groups = [paths for paths in alike.values() if len(paths) > 1]
    watch = _Watch(model, [path for paths in groups for path in paths])
    with watch:
        run(model)
    blocks: list[Block] = []
    for paths in groups:  # outer modules come before inner ones
        taken = [path for block in blocks for path in block.paths]
        if any(path.startswith(f"{outer}.") for path in paths for outer in taken):
            continue
        block = watch.block(paths)
        if block is not None:
            blocks.append(block)
    return blocks


def _structure(module: nn.Module) -> Hashable:
    """What two modules have in common when one's trace, with the other's tensors, is the other's trace."""
    order: dict[int, int] = {}
    sharing = tuple(order.setdefault(id(tensor), len(order)) for _, tensor in _tensors(module))
    return _shape_of(module), sharing


def _shape_of(module: nn.Module) -> Hashable:
    own = {**module._parameters, **module._buffers}
    values = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
    return (
        type(module),
        tuple((name, None if t is None else (type(t), t.shape, t.dtype)) for name, t in own.items()),
        tuple((key, _token(value)) for key, value in values.items() if key not in _PLAIN or value != _PLAIN[key]),
        tuple((name, None if child is None else _shape_of(child)) for name, child in module._modules.items()),
    )


def _token(value: Any) -> Hashable:
    """Equal for values that a trace cannot tell apart; an object that cannot be compared equals itself alone."""
    if isinstance(value, list | tuple):
        return type(value), tuple(_token(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((_token(key), _token(item)) for key, item in value.items())
    if isinstance(value, Tensor):
        return id(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


class _Watch:
    """Watches how some modules are called, while it is entered."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self.modules = {path: model.get_submodule(path) for path in paths}
        self.calls: list[tuple[str, Hashable]] = []
        self.names: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.unfit: set[str] = set()
        self._active: list[tuple[str, _Call | None, list[int]]] = []

    def __enter__(self) -> None:
        self._handles: list[Any] = []
        around: dict[nn.Module, list[str]] = {}
        for path, module in self.modules.items():
            for inner in module.modules():
                around.setdefault(inner, []).append(path)
        for inner, paths in around.items():
            self._handles.append(inner.register_forward_pre_hook(self._reached(paths)))
        for path, module in self.modules.items():
            self._handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _reached(self, paths: list[str]) -> Callable[..., None]:
        """A part of these is called: that must happen inside a call of each of them."""

        def hook(_module: nn.Module, _arguments: Any) -> None:
            self.unfit.update(set(paths) - {path for path, *_ in self._active})

        return hook

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            try:
                call = _Call(module, arguments, named)
                self._active.append((path, call, [tensor._version for tensor in call.tensors]))
            except _Unfit:
                self.unfit.add(path)
                self._active.append((path, None, []))

        return hook

    def _leave(self, _module: nn.Module, _arguments: Any, _named: Any, result: Any) -> None:
        path, call, versions = self._active.pop()
        if call is None:
            return
        try:
            if [tensor._version for tensor in call.tensors] != versions:
                raise _Unfit("an argument is changed in place")
            names, tensors = call.outputs(result)
        except _Unfit:
            self.unfit.add(path)
            return
        self.names[path] = call.names, names
        returned = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        self.calls.append((path, (call.signature, names, returned)))

    def block(self, paths: Sequence[str]) -> Block | None:
        if self.unfit & set(paths):
            return None
        called = [(path, how) for path, how in self.calls if path in paths]
        if not called:
            return Block(tuple(paths))
        if len(called) == 1 or len({how for _, how in called}) > 1:
            return None
        order = tuple(dict.fromkeys([path for path, _ in called] + list(paths)))
        cls = type(self.modules[order[0]])
        return Block(order, *self.names[order[0]], domain=cls.__module__, name=cls.__qualname__.replace("<locals>.", ""))


class _Call:
    """A call of a module: the tensors among its arguments, by name, and what else there is."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.bound = inspect.signature(type(module).forward).bind(module, *arguments, **named)
        found: list[tuple[str, Tensor]] = []
        self.caches: list[tuple[str, LayerCache]] = []
        form = [_flatten(name, value, found, self.caches) for name, value in list(self.bound.arguments.items())[1:]]
        self.names = _distinct([name for name, _ in found])
        self.tensors = [tensor for _, tensor in found]
        self.signature = tuple(form), tuple((tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors)

    def run(self, forward: Callable[..., Any], tensors: Iterable[Tensor]) -> Any:
        """Call ``forward`` with other tensors in place of these. Caches stay the same objects."""
        rest = iter(tensors)
        for name in list(self.bound.arguments)[1:]:
            self.bound.arguments[name] = _replace(self.bound.arguments[name], rest)
        return forward(*self.bound.args[1:], **self.bound.kwargs)

    def outputs(self, result: Any) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names and tensors of the result, and of what the caches hold after the call."""
        found: list[tuple[str, Tensor]] = []
        own: list[tuple[str, LayerCache]] = []
        _flatten("output", result, found, own)
        if own or not found:
            raise _Unfit("the result is not made of tensors")
        for name, cache in self.caches:
            if cache.key is None or cache.value is None:
                raise _Unfit("a cache stays empty")
            found += [(f"present_{name}_key", cache.key), (f"present_{name}_value", cache.value)]
        return _distinct([name for name, _ in found]), [tensor for _, tensor in found]

    def accept(self, result: Any, tensors: Iterable[Tensor]) -> Any:
        """A result like ``result`` made of ``tensors``, of which the last are what the caches hold."""
        rest = iter(tensors)
        result = _replace(result, rest)
        for _, cache in self.caches:
            cache.key, cache.value = next(rest), next(rest)
        return result


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(result)


def _flatten(
    name: str, value: Any, tensors: list[tuple[str, Tensor]], caches: list[tuple[str, LayerCache]]
) -> Hashable:
    """Collect tensors and caches, named by where they are, and return what is left."""
    if isinstance(value, Tensor):
        tensors.append((name, value))
        return Tensor
    if isinstance(value, LayerCache):
        caches.append((name, value))
        parts = (_flatten(f"{name}_key", value.key, tensors, caches), _flatten(f"{name}_value", value.value, tensors, caches))
        return LayerCache, parts
    if type(value) in (tuple, list):
        return type(value), tuple(_flatten(f"{name}_{n}", item, tensors, caches) for n, item in enumerate(value))
    if type(value) is dict:
        return dict, tuple((key, _flatten(f"{name}_{key}", item, tensors, caches)) for key, item in value.items())
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, torch.SymInt):
        return int, str(value)
    raise _Unfit(type(value).__name__)


def _replace(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with the tensors replaced, in the order of :func:`_flatten`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, LayerCache):
        value.key, value.value = _replace(value.key, tensors), _replace(value.value, tensors)
        return value
    if type(value) in (tuple, list):
        return type(value)(_replace(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _replace(item, tensors) for key, item in value.items()}
    return value


@contextmanager
def marking(model: nn.Module, blocks: Sequence[Block]) -> Iterator[None]:
    """Make the blocks of ``model`` trace as markers. All but their leaders lose their parameters, for good."""
    names = {id(tensor): name for name, tensor in reversed(list(_tensors(model)))}
    for block in blocks:
        block.relative = tuple(name for name, _ in _tensors(model.get_submodule(block.leader)))
        for path in block.paths:
            block.parameters[path] = tuple(names[id(tensor)] for _, tensor in _tensors(model.get_submodule(path)))
    called = [block for block in blocks if block.inputs]
    for block in blocks:
        marker = _Marker()
        for path in block.paths:
            module = model.get_submodule(path)
            if block in called:
                module.forward = (marker.leader if path == block.leader else marker.follower)(module, path)
            if block not in called or path != block.leader:
                for inner in module.modules():
                    inner._parameters.clear()
                    inner._buffers.clear()
    try:
        yield
    finally:
        for block in called:
            for path in block.paths:
                del model.get_submodule(path).forward


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class _Marker:
    """The forward methods of one block's modules while they are traced."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.returned: list[Any] = []
        self.dtypes: list[torch.dtype] = []
        self.result: Any = None

    def leader(self, module: nn.Module, path: str) -> Callable[..., Any]:
        """The module itself, between two markers."""
        forward = module.forward

        def traced(*arguments: Any, **named: Any) -> Any:
            call = _Call(module, arguments, named)
            self.given = [tensor.shape for tensor in call.tensors]
            entered = _mark(ENTER, path, call.tensors, self.given, [tensor.dtype for tensor in call.tensors])
            self.result = call.run(forward, entered)
            _, tensors = call.outputs(self.result)
            self.returned, self.dtypes = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
            return call.accept(self.result, _mark(LEAVE, path, tensors, self.returned, self.dtypes))

        return traced

    def follower(self, module: nn.Module, path: str) -> Callable[..., Any]:
        """One marker, which returns what the leader's last call returned as far as its kind goes."""

        def called(*arguments: Any, **named: Any) -> Any:
            call = _Call(module, arguments, named)
            for tensor, shape in zip(call.tensors, self.given, strict=True):
                if any(size != wanted for size, wanted in zip(tensor.shape, shape, strict=True)):
                    raise _Unfit(f"{path} is called with another shape")
            return call.accept(self.result, _mark(CALL, path, call.tensors, self.returned, self.dtypes))

        return called


def _mark(
    kind: str, path: str, tensors: Sequence[Tensor], shapes: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{kind}", tensors, {"path": path}, dtypes=dtypes, shapes=shapes, version=1
    )
    return outputs


def cut_functions(model: ir.Model, blocks: Iterable[Block], simplify: Callable[[ir.Model], None]) -> None:
    """Turn the markers in a translated model into calls of functions, one for each block.

    Args:
        model: its initialisers named as in the state dict.
        blocks: what it was traced with.
        simplify: applied to each function's body, as a model of its own.
    """
    taken: Counter[tuple[str, str]] = Counter()
    for block in blocks:
        marks = [node for node in model.graph if node.domain == DOMAIN]
        of_block = [node for node in marks if node.attributes["path"].as_string() in block.paths]
        if not of_block:
            continue
        enter, leave = (next(node for node in of_block if node.op_type == kind) for kind in (ENTER, LEAVE))
        taken[block.domain, block.name] += 1
        count = taken[block.domain, block.name]
        name = block.name if count == 1 else f"{block.name}_{count}"
        graph, used, captured = _cut(model, block, enter, leave)
        graph.name = name
        simplify(ir.Model(graph, ir_version=model.ir_version))
        model.functions[block.domain, name, ""] = ir.Function(block.domain, name, graph=graph, attributes=[])
        model.opset_imports[block.domain] = 1
        arguments: Sequence[ir.Value | None] = ()
        for node in of_block:
            if node.op_type == ENTER:
                arguments = node.inputs
                continue
            if node.op_type == CALL:
                arguments = node.inputs
            path = node.attributes["path"].as_string()
            weights = [_weight(model, block, path, number) for number in used]
            _make_call(node, block.domain, name, path, (*arguments, *captured, *weights))
        for node in of_block:
            if node.op_type == ENTER:
                model.graph.remove(node, safe=False)


def _weight(model: ir.Model, block: Block, path: str, number: int) -> ir.Value:
    """A block's tensor as an initialiser, like its leader's."""
    name = block.parameters[path][number]
    initializers = model.graph.initializers
    if name not in initializers:
        like = initializers[block.parameters[block.leader][number]]
        initializers[name] = ir.Value(name=name, type=like.type, shape=like.shape)
    return initializers[name]


def _make_call(node: ir.Node, domain: str, name: str, path: str, inputs: Sequence[ir.Value | None]) -> None:
    node.domain, node.op_type, node.name = domain, name, path
    node.attributes.clear()
    node.metadata_props.clear()
    node.metadata_props[BLOCK_KEY] = path
    node.resize_inputs(len(inputs))
    for number, value in enumerate(inputs):
        node.replace_input_with(number, value)


def _cut(
    model: ir.Model, block: Block, enter: ir.Node, leave: ir.Node
) -> tuple[ir.Graph, list[int], list[ir.Value]]:
    """Move what lies between two markers to a graph of its own.

    Returns the graph, which of the block's parameters it takes, and what it takes from outside besides.
    """
    names = block.parameters[block.leader]
    inputs = [
        ir.Value(name=name, type=value.type, shape=value.shape)
        for name, value in zip(block.inputs, enter.outputs, strict=True)
    ]
    inside = _between(model, block, enter, leave)
    members = {inner for node in inside for inner in _with_inner(node)}
    for value, argument in zip(enter.outputs, inputs, strict=True):
        value.replace_all_uses_with(argument)
    made = {value for node in members for value in node.outputs} | set(inputs)
    made |= {value for node in members for graph in _graphs(node) for value in graph.inputs}
    outside = dict.fromkeys(value for node in inside for value in _read(node) if value not in made)
    weights: dict[int, ir.Value] = {}
    captured: list[tuple[ir.Value, ir.Value]] = []
    first: list[ir.Node] = []
    for value in outside:
        if value.is_initializer() and value.name in names:
            number = names.index(value.name)
            path = block.relative[number]
            replacement = weights[number] = ir.Value(name=path, type=value.type, shape=value.shape)
        else:
            replacement, nodes = _bring(value, inputs)
            first += nodes
            if not nodes:
                captured.append((value, replacement))
        for user, index in tuple(value.uses()):
            if user in members:
                user.replace_input_with(index, replacement)
    outputs: list[ir.Value] = []
    last: list[ir.Node] = []
    for name, result in zip(block.outputs, leave.inputs, strict=True):
        assert result is not None
        if result in inputs or result in outputs or result.producer() not in members:
            last.append(ir.node("Identity", [result]))
            result = last[-1].outputs[0]
        result.name = name
        outputs.append(result)
    for index in range(len(leave.inputs)):
        leave.replace_input_with(index, None)
    model.graph.remove(inside)
    used = sorted(weights)
    graph = ir.Graph(
        [*inputs, *(argument for _, argument in captured), *(weights[number] for number in used)],
        outputs,
        nodes=[*first, *inside, *last],
        opset_imports={"": model.opset_imports[""]},
    )
    return graph, used, [value for value, _ in captured]


def _between(model: ir.Model, block: Block, enter: ir.Node, leave: ir.Node) -> list[ir.Node]:
    """What the outputs of a block depend on and the block itself computes, in order."""
    needed: set[ir.Node] = set()
    stack = [value for value in leave.inputs if value is not None]
    while stack:
        node = stack.pop().producer()
        if node is not None and node is not enter and node not in needed:
            needed.add(node)
            stack.extend(_read(node))
    names = set(block.parameters[block.leader])
    own: set[ir.Value] = set(enter.outputs)
    inside = []
    for node in model.graph:
        if node not in needed:
            continue
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        reads = any(value in own or (value.is_initializer() and value.name in names) for value in _read(node))
        if reads or re.search(rf"'model\.{re.escape(block.leader)}['.]", scopes):
            inside.append(node)
            own.update(node.outputs)
    return inside


def _bring(value: ir.Value, inputs: Sequence[ir.Value]) -> tuple[ir.Value, list[ir.Node]]:
    """A value from outside, computed inside where it is a constant or the size of an argument, else handed in."""
    node = value.producer()
    if node is not None and not node.inputs:
        made = ir.node(node.op_type, [], node.attributes)
        return made.outputs[0], [made]
    shape = node.inputs[0].producer() if node is not None and node.op_type == "Squeeze" and node.inputs[0] else node
    if shape is not None and shape.op_type == "Shape" and shape.inputs[0] is not None and shape.inputs[0].shape:
        start = shape.attributes.get_int("start", 0)
        if shape.attributes.get_int("end", 0) == start + 1:
            size = shape.inputs[0].shape[start]
            for argument in inputs:
                sizes = list(argument.shape or ())
                if size in sizes:
                    axis = sizes.index(size)
                    nodes = [ir.node("Shape", [argument], {"start": axis, "end": axis + 1})]
                    if node is not shape:
                        nodes.append(ir.node("Squeeze", nodes[-1].outputs))
                    return nodes[-1].outputs[0], nodes
    return ir.Value(name=value.name, type=value.type, shape=value.shape), []


def _graphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _with_inner(node: ir.Node) -> Iterator[ir.Node]:
    """A node and the nodes of its graphs."""
    yield node
    for graph in _graphs(node):
        yield from graph.all_nodes()


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What a node, or any node inside it, reads."""
    for inner in _with_inner(node):
        yield from (value for value in inner.inputs if value is not None)
