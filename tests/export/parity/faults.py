"""Faults for exported graphs, enumerated from the graph alone: every kind at every place where it applies.

Faults are typical errors of exporters, optimisers and manual edits: a tensor read from the wrong place, a lost bias, a
position off by one, a size fixed while tracing. Kinds of faults depend on operators, never on architectures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from zoo.probe.inputs import Point
from zoo_export.graph.metadata import MODULE_KEY

__all__ = [
    "CHANGED",
    "EXACT",
    "KINDS",
    "Edit",
    "Fault",
    "Reach",
    "Sites",
    "View",
    "after",
    "before",
    "enumerate_faults",
    "inserted",
    "kind",
    "set_attributes",
    "set_inputs",
    "set_operator",
    "set_tensor",
]

Edit = Callable[[onnx.GraphProto], None]
Values = Mapping[str, "np.ndarray[Any, Any]"]
Step = tuple[str, tuple["np.ndarray[Any, Any]", ...], dict[str, Any]]
"""An operator, its constant inputs after the first, and its attributes."""

REALS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
EPSILONS = (1e-12, 1e-5, 1e-3)
"""Norm epsilons of BERT and GPT, and one that neither uses."""
TRACED = {0: 2, 1: 16, 2: 16}
"""Sizes of an exporter's usual example input, by axis: a batch of 2, 16 tokens, a past of 16."""
EXACT, CHANGED = "exact", "changed"
"""Names of a node's own result, and of the one that replaces it, in inserted nodes."""
_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Reach:
    """Inputs that meet the condition of a fault: points, and ids among their tokens."""

    points: tuple[Point, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """One wrong edit of one graph."""

    kind: str
    site: str
    edit: Edit
    reach: Reach = Reach()

    def apply(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of the graph with this fault."""
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        self.edit(changed.graph)
        del changed.graph.value_info[:]
        return changed


class View:
    """Queries on a graph without functions, given the stored tensors by name and the length of the longest input."""

    def __init__(self, model: onnx.ModelProto, values: Values, longest: int) -> None:
        self.graph, self.stored, self.longest = model.graph, values, longest
        self.nodes = list(model.graph.node)
        known = shape_inference.infer_shapes(model).graph
        typed = [*known.value_info, *known.input, *known.output]
        self.types = {value.name: value.type.tensor_type for value in typed}
        self.places = {item.name: item for item in model.graph.initializer if item.external_data}
        self.constants = {
            item.name: numpy_helper.to_array(item) for item in model.graph.initializer if not item.external_data
        }
        for node in self.nodes:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = _constant_value(node)
        self.maker = {name: index for index, node in enumerate(self.nodes) for name in node.output}

    def find(self, *operators: str) -> Iterator[tuple[int, onnx.NodeProto]]:
        """Yield the nodes of these operators with their sites."""
        return ((index, node) for index, node in enumerate(self.nodes) if node.op_type in operators)

    def producer(self, name: str) -> onnx.NodeProto | None:
        """Return the node that computes a value, None for inputs and initialisers."""
        return self.nodes[self.maker[name]] if name in self.maker else None

    def is_real(self, name: str) -> bool:
        """Return whether a value holds floating-point numbers."""
        return name in self.places or (name in self.types and self.types[name].elem_type in REALS)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the element type of a value, float32 if it is not known."""
        known = self.types[name].elem_type if name in self.types else TensorProto.FLOAT
        return helper.tensor_dtype_to_np_dtype(known)

    def little(self, name: str) -> float:
        """Return a factor near 1, but beyond rounding: 1.001, or in float16 16 units in the last place."""
        return float(1 + max(1e-3, 16 * np.finfo(self.dtype(name)).eps))

    def width(self, node: onnx.NodeProto) -> int | None:
        """Return the number of channels of a product or norm, if its weights are stored."""
        place = self.places.get(node.input[1])
        if place is None:
            return None
        transposed = node.op_type != "Gemm" or bool(_attribute(node, "transB", 0))
        return int(place.dims[0] if transposed else place.dims[1])

    def stored_names(self) -> list[str]:
        """Return the names of the tensors that the graph reads as they are stored."""
        return sorted(set(self.places) & set(self.stored))

    def dims(self, name: str) -> list[object]:
        """Return the dimensions of an input or output, as sizes or names."""
        shape = self.types[name].shape
        return [dim.dim_param or dim.dim_value for dim in shape.dim]

    def draw(self, what: str) -> random.Random:
        """Return a source of random numbers that depends on the graph's size and on what is drawn alone."""
        return random.Random(f"{len(self.nodes)} {what}")

    def site(self, node: onnx.NodeProto, what: str = "") -> str:
        """Describe a node for readers."""
        module = next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), "graph")
        return " ".join(filter(None, (module, node.op_type, node.output[0], what)))


Sites = Iterator[tuple[str, Edit] | tuple[str, Edit, Reach]]
KINDS: dict[str, Callable[[View], Sites]] = {}
"""All kinds of faults, by name."""


def kind(name: str) -> Callable[[Callable[[View], Sites]], Callable[[View], Sites]]:
    """Register a kind of fault: a function that yields sites and the edits that create the fault there."""

    def register(function: Callable[[View], Sites]) -> Callable[[View], Sites]:
        KINDS[name] = function
        return function

    return register


def enumerate_faults(model: onnx.ModelProto, values: Values, longest: int) -> list[Fault]:
    """Return every fault of every kind in one graph without functions.

    Args:
        model: the graph, with initialisers that point into the stored weights.
        values: the stored tensors by name.
        longest: number of tokens of the longest input.
    """
    view = View(model, values, longest)
    return [Fault(name, *site) for name, sites in KINDS.items() for site in sites(view)]


# Edits.


def set_attributes(index: int, **values: Any) -> Edit:
    """Edit a node's attributes."""

    def edit(graph: onnx.GraphProto) -> None:
        node = graph.node[index]
        kept = [item for item in node.attribute if item.name not in values]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in values.items())])

    return edit


def set_operator(index: int, operator: str, *, inputs: Sequence[str] | None = None, **attributes: Any) -> Edit:
    """Replace a node's operator and attributes, and optionally its inputs."""

    def edit(graph: onnx.GraphProto) -> None:
        node = graph.node[index]
        node.op_type = operator
        del node.attribute[:]
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        if inputs is not None:
            node.input[:] = inputs

    return edit


def set_inputs(index: int, inputs: Sequence[str]) -> Edit:
    """Replace a node's inputs."""

    def edit(graph: onnx.GraphProto) -> None:
        graph.node[index].input[:] = inputs

    return edit


def set_tensor(graph: onnx.GraphProto, name: str, value: np.ndarray[Any, Any]) -> None:
    """Store a tensor in the graph itself, instead of its place in the weights."""
    kept = [item for item in graph.initializer if item.name != name]
    del graph.initializer[:]
    graph.initializer.extend([*kept, numpy_helper.from_array(value, name)])


def before(index: int, place: int, *steps: Step) -> Edit:
    """Insert operations between one input and the node."""

    def edit(graph: onnx.GraphProto) -> None:
        node = graph.node[index]
        name, made = _chain(node.input[place], "fault", steps)
        node.input[place] = name
        for number, new in enumerate(made):
            graph.node.insert(index + number, new)

    return edit


def after(index: int, *steps: Step) -> Edit:
    """Insert operations on a node's result."""
    last, made = _chain(EXACT, "fault", steps)
    for new in made:
        new.output[:] = [CHANGED if output == last else output for output in new.output]
    return inserted(index, made)


def inserted(index: int, nodes: Sequence[onnx.NodeProto]) -> Edit:
    """Insert nodes after another: they read its result as ``EXACT`` and replace it by ``CHANGED``."""

    def edit(graph: onnx.GraphProto) -> None:
        node = graph.node[index]
        name, node.output[0] = node.output[0], EXACT
        for number, new in enumerate(nodes, 1):
            graph.node.insert(index + number, new)
            made = graph.node[index + number]
            made.output[:] = [name if output == CHANGED else output for output in made.output]

    return edit


def _chain(name: str, prefix: str, steps: Sequence[Step]) -> tuple[str, list[onnx.NodeProto]]:
    made = []
    for number, (operator, constants, attributes) in enumerate(steps):
        names = []
        for place, value in enumerate(constants):
            names.append(f"{prefix}_{number}_{place}")
            made.append(helper.make_node("Constant", [], [names[-1]], value=numpy_helper.from_array(value)))
        made.append(helper.make_node(operator, [name, *names], [f"{prefix}_{number}"], **attributes))
        name = f"{prefix}_{number}"
    return name, made


def _integers(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


def _constant_value(node: onnx.NodeProto) -> np.ndarray[Any, Any]:
    value = helper.get_attribute_value(node.attribute[0])
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


def _alike(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names that differ in one part: query and key, one layer and the next, weight and bias."""
    parts = {name: name.split(".") for name in names}
    for one, other in combinations(names, 2):
        if len(parts[one]) == len(parts[other]):
            differ = [(a, b) for a, b in zip(parts[one], parts[other], strict=True) if a != b]
            if len(differ) == 1:
                yield one, other


def _similar_tensors(view: View) -> Iterator[tuple[str, str]]:
    names = sorted(view.places)
    shapes = {name: list(view.places[name].dims) for name in names}
    return ((one, other) for one, other in _alike(names) if shapes[one] == shapes[other])


def _point(graph: onnx.GraphProto, places: Mapping[str, Sequence[onnx.StringStringEntryProto]]) -> None:
    for item in graph.initializer:
        if item.name in places:
            kept = [(entry.key, entry.value) for entry in places[item.name]]
            del item.external_data[:]
            for key, value in kept:
                item.external_data.add(key=key, value=value)


# Weights.


@kind("two tensors swapped")
def _(view: View) -> Sites:
    for one, other in _similar_tensors(view):
        a, b = (view.places[name].external_data for name in (one, other))
        yield f"{one} and {other}", partial(_point, places={one: b, other: a})


@kind("a tensor read from another's place")
def _(view: View) -> Sites:
    for one, other in _similar_tensors(view):
        yield f"{other} from {one}", partial(_point, places={other: view.places[one].external_data})


@kind("a square matrix transposed")
def _(view: View) -> Sites:
    for index, node in view.find("Gemm"):
        place = view.places.get(node.input[1])
        if place is not None and place.dims[0] == place.dims[1]:
            yield view.site(node), set_attributes(index, transB=0)


@kind("a bias dropped")
def _(view: View) -> Sites:
    for index, node in view.find("Gemm", "LayerNormalization"):
        if len(node.input) == 3:
            yield view.site(node), set_inputs(index, node.input[:2])


@kind("a bias halved")
def _(view: View) -> Sites:
    for index, node in view.find("Gemm"):
        if len(node.input) == 3:
            yield view.site(node), set_attributes(index, beta=0.5)


@kind("a product scaled a little")
def _(view: View) -> Sites:
    for index, node in view.find("Gemm"):
        yield view.site(node), set_attributes(index, alpha=view.little(node.output[0]))


@kind("one weight differs in the graph alone")
def _(view: View) -> Sites:
    for name in view.stored_names():
        value = view.stored[name].copy()
        largest = np.unravel_index(np.argmax(np.abs(value)), value.shape)
        value[largest] += 0.01 * np.abs(value[largest]) + 1e-3
        yield name, partial(set_tensor, name=name, value=value)


# Normalisation and activations.


@kind("another epsilon")
def _(view: View) -> Sites:
    for index, node in view.find("LayerNormalization"):
        for epsilon in EPSILONS:
            if not np.isclose(_attribute(node, "epsilon"), epsilon, rtol=1e-3, atol=0):
                yield view.site(node, f"{epsilon:g}"), set_attributes(index, epsilon=epsilon)


@kind("a norm dropped")
def _(view: View) -> Sites:
    for index, node in view.find("LayerNormalization"):
        yield view.site(node), set_operator(index, "Identity", inputs=node.input[:1])


@kind("another activation")
def _(view: View) -> Sites:
    for index, node in view.find("Gelu"):
        other = {b"tanh": "none", b"none": "tanh"}[_attribute(node, "approximate", b"none")]
        yield view.site(node, other), set_attributes(index, approximate=other)
        yield view.site(node, "Relu"), set_operator(index, "Relu")
    for index, node in view.find("Relu"):
        yield view.site(node, "Gelu"), set_operator(index, "Gelu", approximate="tanh")
        yield view.site(node, "LeakyRelu"), set_operator(index, "LeakyRelu", alpha=0.01)
    for old, new in {"Tanh": "Softsign", "Sigmoid": "HardSigmoid", "Sin": "Cos", "Cos": "Sin"}.items():
        for index, node in view.find(old):
            yield view.site(node, new), set_operator(index, new)


@kind("an activation dropped")
def _(view: View) -> Sites:
    for index, node in view.find("Gelu", "Relu", "Tanh", "Sigmoid"):
        yield view.site(node), set_operator(index, "Identity")


# Attention and masks.


@kind("another scale of attention")
def _(view: View) -> Sites:
    for index, node in view.find("Attention"):
        for scale in (0.1, 1.0):
            yield view.site(node, f"{scale:g}"), set_attributes(index, scale=scale)


@kind("scores capped")
def _(view: View) -> Sites:
    for index, node in view.find("Attention"):
        for cap in (5.0, 50.0):
            yield view.site(node, f"{cap:g}"), set_attributes(index, softcap=cap)


@kind("causal attention toggled")
def _(view: View) -> Sites:
    for index, node in view.find("Attention"):
        yield view.site(node), set_attributes(index, is_causal=1 - _attribute(node, "is_causal", 0))


@kind("a mask dropped or negated")
def _(view: View) -> Sites:
    for index, node in view.find("Attention"):
        if len(node.input) > 3:
            yield view.site(node, "dropped"), set_inputs(index, node.input[:3])
            yield view.site(node, "negated"), before(index, 3, ("Not", (), {}))
    for index, node in view.find("Cast"):
        if _attribute(node, "to") == TensorProto.BOOL:
            yield view.site(node, "all true"), after(index, ("Or", (np.array(True),), {}))
            yield view.site(node, "negated"), after(index, ("Not", (), {}))


@kind("another comparison or connective")
def _(view: View) -> Sites:
    for index, node in view.find("LessOrEqual", "And"):
        for other in {"LessOrEqual": ("Less", "Greater", "GreaterOrEqual"), "And": ("Or", "Xor")}[node.op_type]:
            yield view.site(node, other), set_operator(index, other)


@kind("keys and values exchanged")
def _(view: View) -> Sites:
    for index, node in view.find("Attention"):
        query, key, value, *rest = node.input
        yield view.site(node), set_inputs(index, [query, value, key, *rest])


@kind("keys or values of another layer")
def _(view: View) -> Sites:
    for (_, earlier), (index, later) in combinations(view.find("Attention"), 2):
        for place in (1, 2):
            names = list(later.input)
            names[place] = earlier.input[place]
            yield view.site(later, f"{earlier.input[place]} for {later.input[place]}"), set_inputs(index, names)


@kind("heads in reverse")
def _(view: View) -> Sites:
    reverse = ("Slice", (_integers(-1), _integers(-_END), _integers(1), _integers(-1)), {})
    for index, node in view.find("Attention"):
        yield view.site(node, "result"), after(index, reverse)
        yield view.site(node, "queries"), before(index, 0, reverse)


@kind("heads split or merged wrongly")
def _(view: View) -> Sites:
    for index, node in view.find("Transpose"):
        maker = view.producer(node.input[0])
        if maker is not None and maker.op_type == "Attention":
            for perm in ([0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 1, 2]):
                yield view.site(node, f"merged as {perm}"), set_attributes(index, perm=perm)
        elif maker is not None and maker.op_type == "Reshape":
            shape = view.producer(maker.input[1])
            names = shape.input[2:] if shape is not None and shape.op_type == "Concat" else []
            if len(names) == 2 and all(name in view.constants for name in names):
                heads, size = (view.constants[name] for name in names)
                back = ("Reshape", (np.concatenate([_integers(0, 0), size, heads]),), {})
                turn = ("Transpose", (), {"perm": [0, 1, 3, 2]})
                yield view.site(node, "interleaved"), before(index, 0, back, turn)


# Positions and constants.


@kind("an index off by one")
def _(view: View) -> Sites:
    for index, node in view.find("Gather"):
        if node.input[0] in view.places:
            rows = view.places[node.input[0]].dims[0]
            for step in (1, rows - 1):
                steps: tuple[Step, ...] = (("Add", (np.array(step),), {}), ("Mod", (np.array(rows),), {}))
                yield view.site(node, "+1" if step == 1 else "-1"), before(index, 1, *steps)


@kind("an index that is always 0")
def _(view: View) -> Sites:
    for index, node in view.find("Gather"):
        if node.input[0] in view.places:
            yield view.site(node), before(index, 1, ("Mul", (np.array(0),), {}))


@kind("an integer off by one")
def _(view: View) -> Sites:
    for index, node in enumerate(view.nodes):
        for place, name in enumerate(node.input):
            value = view.constants.get(name)
            if value is None or value.dtype != np.int64 or not value.size:
                continue
            number = view.draw(f"{index} {place}").randrange(value.size)
            for step in (1, -1):
                if value.reshape(-1)[number] != _END:
                    change = np.zeros_like(value)
                    change.reshape(-1)[number] = step
                    yield view.site(node, f"input {place} {step:+d}"), before(index, place, ("Add", (change,), {}))


@kind("a length off by one")
def _(view: View) -> Sites:
    for index, node in view.find("Range"):
        for step in (1, -1):
            both = before(index, 0, ("Add", (np.array(step),), {}))
            yield view.site(node, f"shifted {step:+d}"), partial(_shift_range, index=index, first=both, step=step)


def _shift_range(graph: onnx.GraphProto, index: int, first: Edit, step: int) -> None:
    """Shift start and end of a range together, keeping its length."""
    first(graph)
    node = graph.node[index + 2]
    name, made = _chain(node.input[1], "end", (("Add", (np.array(step),), {}),))
    node.input[1] = name
    for number, new in enumerate(made):
        graph.node.insert(index + number, new)


@kind("a real constant perturbed")
def _(view: View) -> Sites:
    for index, node in enumerate(view.nodes):
        for place, name in enumerate(node.input):
            value = view.constants.get(name)
            if value is not None and value.dtype.kind == "f":
                for factor in (1.01, 0.5):
                    step: Step = ("Mul", (np.array(factor, value.dtype),), {})
                    yield view.site(node, f"input {place} x {factor}"), before(index, place, step)


@kind("a cumulative sum turned or shifted")
def _(view: View) -> Sites:
    for index, node in view.find("CumSum"):
        yield view.site(node, "exclusive"), set_attributes(index, exclusive=1)
        yield view.site(node, "reverse"), set_attributes(index, reverse=1)
        yield view.site(node, "of ones"), before(index, 0, ("Mul", (np.array(0),), {}), ("Add", (np.array(1),), {}))


@kind("a guard dropped")
def _(view: View) -> Sites:
    for index, node in view.find("Clip", "Max", "Expand"):
        yield view.site(node), set_operator(index, "Identity", inputs=node.input[:1])


# The structure.


@kind("an addend or factor dropped")
def _(view: View) -> Sites:
    for index, node in view.find("Add", "Mul", "Div"):
        if view.is_real(node.output[0]):
            for place in (0, 1) if node.op_type != "Div" else (0,):
                kept = node.input[place]
                if kept not in view.constants:
                    yield view.site(node, f"keeps {kept}"), set_operator(index, "Identity", inputs=[kept])


@kind("another arithmetic")
def _(view: View) -> Sites:
    others = {"Mul": "Div", "Div": "Mul", "Sub": "Add", "ReduceSum": "ReduceMax", "ReduceL2": "ReduceL1"}
    for index, node in view.find(*others):
        if view.is_real(node.output[0]):
            kept = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            yield view.site(node), set_operator(index, others[node.op_type], **kept)


@kind("a residual from the wrong place")
def _(view: View) -> Sites:
    for index, node in view.find("Add"):
        for place, name in enumerate(node.input):
            maker = view.producer(name)
            if view.is_real(node.output[0]) and maker is not None and maker.op_type in ("Add", "LayerNormalization"):
                names = list(node.input)
                names[place] = maker.input[0]
                yield view.site(node, f"{maker.input[0]} for {name}"), set_inputs(index, names)


@kind("a value scaled a little")
def _(view: View) -> Sites:
    for index, node in view.find("Attention", "LayerNormalization", "Add", "Gelu", "Relu", "Gather", "Mul", "Concat"):
        if view.is_real(node.output[0]):
            scale = np.array(view.little(node.output[0]), view.dtype(node.output[0]))
            yield view.site(node), after(index, ("Mul", (scale,), {}))


@kind("a value rounded to half precision")
def _(view: View) -> Sites:
    for index, node in view.find("Gemm", "Attention", "LayerNormalization", "Add", "Gather", "Concat"):
        if node.output[0] in view.types and view.types[node.output[0]].elem_type == TensorProto.FLOAT:
            there, back = (("Cast", (), {"to": to}) for to in (TensorProto.FLOAT16, TensorProto.FLOAT))
            yield view.site(node), after(index, there, back)


@kind("parts joined in the wrong order")
def _(view: View) -> Sites:
    for index, node in view.find("Concat"):
        if view.is_real(node.output[0]):
            yield view.site(node), set_inputs(index, list(reversed(node.input)))


@kind("a size from another axis")
def _(view: View) -> Sites:
    for index, node in view.find("Shape"):
        start = _attribute(node, "start", 0)
        if _attribute(node, "end") == start + 1:
            other = 1 - start if start < 2 else 0
            yield view.site(node, f"{other} for {start}"), set_attributes(index, start=other, end=other + 1)


@kind("a size fixed while tracing")
def _(view: View) -> Sites:
    for index, node in view.find("Shape"):
        start = _attribute(node, "start", 0)
        if _attribute(node, "end") == start + 1:
            size = numpy_helper.from_array(_integers(TRACED[start]))
            yield view.site(node, str(TRACED[start])), set_operator(index, "Constant", inputs=(), value=size)


# The cache and the outputs.


@kind("the past of another layer or kind")
def _(view: View) -> Sites:
    past = [value.name for value in view.graph.input if view.is_real(value.name)]
    for one, other in _alike(past):
        if view.dims(one) == view.dims(other):
            for index, node in view.find("Concat", "Attention", "TensorScatter"):
                if other in node.input:
                    names = [one if name == other else name for name in node.input]
                    yield view.site(node, f"{one} for {other}"), set_inputs(index, names)


@kind("the past off by one")
def _(view: View) -> Sites:
    past = {value.name for value in view.graph.input if view.is_real(value.name)}
    for index, node in view.find("Concat"):
        for place, name in enumerate(node.input):
            if name in past:
                axis = _attribute(node, "axis")
                yield view.site(node, name), partial(_roll, index=index, place=place, axis=axis)


def _roll(graph: onnx.GraphProto, index: int, place: int, axis: int) -> None:
    """Move the first token behind the last."""
    node = graph.node[index]
    along = _integers(axis)
    rest, made = _chain(node.input[place], "rest", (("Slice", (_integers(1), _integers(_END), along), {}),))
    first, more = _chain(node.input[place], "first", (("Slice", (_integers(0), _integers(1), along), {}),))
    node.input[place] = "rolled"
    joined = helper.make_node("Concat", [rest, first], ["rolled"], axis=axis)
    for number, new in enumerate([*made, *more, joined]):
        graph.node.insert(index + number, new)


@kind("new keys or values written elsewhere")
def _(view: View) -> Sites:
    for index, node in view.find("TensorScatter"):
        for step in (1, -1):
            yield view.site(node, f"{step:+d}"), before(index, 2, ("Add", (_integers(step),), {}), ("Abs", (), {}))
        yield view.site(node, "nowhere"), set_operator(index, "Identity", inputs=node.input[:1])


@kind("the free end of a buffer seen")
def _(view: View) -> Sites:
    for index, node in view.find("Pad"):
        if len(node.input) > 2:
            yield view.site(node, "padded with true"), before(index, 2, ("Not", (), {}))
            yield (
                view.site(node, "padded before"),
                before(index, 1, ("Slice", (_integers(-1), _integers(-_END), _integers(0), _integers(-1)), {})),
            )


@kind("logits of other positions")
def _(view: View) -> Sites:
    for index, node in view.find("Neg"):
        for step in (1, -1):
            yield view.site(node, f"{step:+d}"), before(index, 0, ("Add", (np.array(step),), {}))


@kind("two outputs swapped")
def _(view: View) -> Sites:
    def swap(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]

    for one, other in _alike([value.name for value in view.graph.output]):
        if view.dims(one) == view.dims(other):
            yield f"{one} and {other}", partial(swap, names={one: other, other: one})
