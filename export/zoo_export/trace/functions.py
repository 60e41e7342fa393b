"""Conversion of traced markers to ONNX functions: one function per kind of block, called once per layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from zoo_export.graph.metadata import BLOCK_KEY, MODULE_KEY
from zoo_export.trace.blocks import CALL, DOMAIN, ENTER, LEAVE, Block, CallOutput, CallSite, GraphInput, Outside
from zoo_export.trace.outline import Outline

__all__ = ["cut_functions"]


def cut_functions(model: ir.Model, outline: Outline, simplify: Callable[[ir.Model], None]) -> None:
    """Replace markers by functions and calls, and restore the inputs and outputs that were omitted from the trace.

    Args:
        model: the translated trace of ``outline``, with initialisers named as in the stored model.
        outline: the outline of the traced graph.
        simplify: applied to each function's body, as a separate model.
    """
    inputs = _all_inputs(model, outline)
    marks = {(node.op_type, node.attributes["call"].as_int()): node for node in model.graph if node.domain == DOMAIN}
    outside: dict[Outside, ir.Value] = {}
    calls: list[ir.Node] = []
    functions = {
        id(block): _Function(model, block, marks[ENTER, block.first], marks[LEAVE, block.first])
        for block in outline.blocks
        if block.first is not None
    }

    def resolve(source: GraphInput | CallOutput | Outside) -> ir.Value:
        if isinstance(source, GraphInput):
            return inputs[source.number]
        if isinstance(source, CallOutput):
            return calls[source.call].outputs[source.number]
        return outside[source]

    for number, call in enumerate(outline.calls):
        function = functions[id(call.block)]
        enter = marks.get((ENTER, number), marks.get((CALL, number)))
        if enter is not None:
            for source, value in zip(call.sources, enter.inputs, strict=True):
                if isinstance(source, Outside) and value is not None:
                    outside.setdefault(source, value)
        node = function.call(call, [resolve(source) for source in call.sources])
        leave = marks.get((LEAVE, number), enter)
        model.graph.insert_after(leave or calls[-1], node)
        if leave is not None:
            ir.convenience.replace_all_uses_with(leave.outputs, node.outputs, replace_graph_outputs=True)
        calls.append(node)
    model.graph.remove([*marks.values()])
    for function in functions.values():
        function.finish(simplify)
    traced = iter(list(model.graph.outputs))
    model.graph.outputs[:] = [resolve(origin) if origin else next(traced) for origin in outline.outputs]


def _all_inputs(model: ir.Model, outline: Outline) -> list[ir.Value]:
    """Restore all inputs of the graph. Omitted inputs get the types and shapes of their stand-ins."""
    traced = dict(zip(outline.kept_inputs, list(model.graph.inputs), strict=True))
    inputs = []
    for number, stand_in in enumerate(outline.stand_ins):
        like = traced[stand_in]
        inputs.append(like if number == stand_in else ir.Value(type=like.type, shape=like.shape))
    model.graph.inputs[:] = inputs
    return inputs


class _Function:
    """A block's body, moved out of the graph from between two markers."""

    def __init__(self, model: ir.Model, block: Block, enter: ir.Node, leave: ir.Node) -> None:
        self.model = model
        self.block = block
        numbers = Counter(key[:2] for key in model.functions)
        self.name = block.name
        while (block.domain, self.name, "") in model.functions:
            numbers[block.domain, block.name] += 1
            self.name = f"{block.name}_{numbers[block.domain, block.name]}"
        self._calls: Counter[str] = Counter()
        self._names = block.stored[block.leader]
        self.weights: dict[int, ir.Value] = {}
        """Arguments for the block's tensors that the body reads, by index."""
        self.captured: dict[ir.Value, ir.Value] = {}
        """Arguments for other outside values that the body reads."""
        self.inputs = [
            ir.Value(name=name, type=value.type, shape=value.shape)
            for name, value in zip(block.inputs, enter.outputs, strict=True)
        ]
        graph = self._cut(enter, leave)
        graph.name = self.name
        self.function = ir.Function(block.domain, self.name, graph=graph, attributes=[])
        model.functions[self.function.identifier()] = self.function
        model.opset_imports[block.domain] = 1

    def call(self, call: CallSite, arguments: Sequence[ir.Value]) -> ir.Node:
        """Create a node that calls the function with the tensors of the module at the call's path."""
        weights = [self._weight(call.path, number) for number in self.weights]
        self._calls[call.path] += 1
        again = f" {self._calls[call.path]}" if self._calls[call.path] > 1 else ""
        return ir.node(
            self.name, [*arguments, *self.captured, *weights], domain=self.block.domain, name=f"{call.path}{again}",
            num_outputs=len(self.block.outputs), metadata_props={BLOCK_KEY: call.path},
        )  # fmt: skip

    def finish(self, simplify: Callable[[ir.Model], None]) -> None:
        """Simplify the body, and make its module paths relative to the block."""
        graph = self.function.graph
        simplify(ir.Model(graph, ir_version=self.model.ir_version))
        for value in list(graph.initializers.values()):  # folded constants; functions cannot have initialisers
            node = ir.node("Constant", [], {"value": value.const_value})
            graph.insert_before(graph[0], node)
            value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        graph.initializers.clear()
        for node in graph.all_nodes():
            path = f"{node.metadata_props.pop(MODULE_KEY, '')}.".removeprefix(f"{self.block.leader}.").rstrip(".")
            if path:
                node.metadata_props[MODULE_KEY] = path

    def _weight(self, path: str, number: int) -> ir.Value:
        """Return the initialiser for a block's tensor, creating it with the type of the leader's if needed."""
        name = self.block.stored[path][number]
        initializers = self.model.graph.initializers
        if name not in initializers:
            like = initializers[self._names[number]]
            initializers[name] = ir.Value(name=name, type=like.type, shape=like.shape)
        return initializers[name]

    def _cut(self, enter: ir.Node, leave: ir.Node) -> ir.Graph:
        inside = self._between(enter, leave)
        members = {member for node in inside for member in _with_inner(node)}
        for value, argument in zip(enter.outputs, self.inputs, strict=True):
            value.replace_all_uses_with(argument)
        inner = {value for node in members for value in node.outputs} | set(self.inputs)
        inner |= {value for node in members for graph in _graphs(node) for value in graph.inputs}
        first: list[ir.Node] = []
        for value in dict.fromkeys(value for node in inside for value in _read(node) if value not in inner):
            if value.is_initializer() and value.name in self._names:
                number = self._names.index(value.name)
                argument = ir.Value(name=self.block.tensors[number], type=value.type, shape=value.shape)
                self.weights[number] = argument
            else:
                argument, nodes = _bring(value, self.inputs)
                first += nodes
                if not nodes:
                    self.captured[value] = argument
            for user, index in tuple(value.uses()):
                if user in members:
                    user.replace_input_with(index, argument)
        self.weights = dict(sorted(self.weights.items()))
        outputs: list[ir.Value] = []
        last: list[ir.Node] = []
        for index, name in enumerate(self.block.outputs):
            result = leave.inputs[index]
            assert result is not None
            if result in outputs or result.producer() not in members:
                last.append(ir.node("Identity", [result]))
                result = last[-1].outputs[0]
            leave.replace_input_with(index, None)
            result.name = name
            outputs.append(result)
        self.model.graph.remove(inside)
        return ir.Graph(
            [*self.inputs, *self.captured.values(), *self.weights.values()], outputs,
            nodes=[*first, *inside, *last], opset_imports={"": self.model.opset_imports[""]},
        )  # fmt: skip

    def _between(self, enter: ir.Node, leave: ir.Node) -> list[ir.Node]:
        """Return the block's own nodes that its outputs depend on, in order."""
        needed: set[ir.Node] = set()
        stack = [value for value in leave.inputs if value is not None]
        while stack:
            node = stack.pop().producer()
            if node is not None and node is not enter and node not in needed:
                needed.add(node)
                stack.extend(_read(node))
        scope = re.compile(rf"'model\.{re.escape(self.block.leader)}['.]")
        dependent: set[ir.Value] = set(enter.outputs)
        inside = []
        for node in self.model.graph:
            if node in needed and (
                scope.search(node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
                or any(
                    value in dependent or (value.is_initializer() and value.name in self._names)
                    for value in _read(node)
                )
            ):
                inside.append(node)
                dependent.update(node.outputs)
        return self._without_shared(inside, enter, leave)

    def _without_shared(self, inside: Sequence[ir.Node], enter: ir.Node, leave: ir.Node) -> list[ir.Node]:
        """Leave nodes in the graph that other nodes need as well, such as a constant in the model's code.

        Only those that depend on neither the block's arguments nor its weights: they have the same result in each call.
        """
        dependent: set[ir.Value] = set(enter.outputs)
        for node in inside:
            if any(
                value in dependent or (value.is_initializer() and value.name in self._names) for value in _read(node)
            ):
                dependent.update(node.outputs)
        remaining: list[ir.Node] = []
        members: set[ir.Node] = {leave, *(inner for node in inside for inner in _with_inner(node))}
        for node in reversed(inside):  # users come after what they use
            read = any(v.is_graph_output() or any(user not in members for user, _ in v.uses()) for v in node.outputs)
            if read and dependent.isdisjoint(node.outputs):
                members.difference_update(_with_inner(node))
            else:
                remaining.append(node)
        return remaining[::-1]


def _bring(value: ir.Value, inputs: Sequence[ir.Value]) -> tuple[ir.Value, list[ir.Node]]:
    """Make an outside value available in a function: recompute constants and sizes of arguments, pass the rest.

    Returns:
        The value inside the function, and the nodes that recompute it; without nodes, the value is an argument.
    """
    node = value.producer()
    if node is not None and not node.inputs:
        constant = ir.node(node.op_type, [], node.attributes)
        return constant.outputs[0], [constant]
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
    """Yield a node and all nodes in its subgraphs."""
    yield node
    for graph in _graphs(node):
        yield from graph.all_nodes()


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node, or any node in its subgraphs, reads."""
    for inner in _with_inner(node):
        yield from (value for value in inner.inputs if value is not None)
