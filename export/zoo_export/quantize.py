"""Smaller precisions of a model: its graphs again, and one further safetensors file for what they store differently.

What stays as it is, is read from the model's own file: nothing is stored twice. Weights are read, quantised and written
one at a time.

``fp16`` and ``bf16`` are the model traced in float16 and bfloat16. ``int8`` and ``int4`` are the float32 graphs of the
profile ``cpu`` with other operators:

- Every Linear becomes ``MatMulNBits``: weights in blocks, 8 or 4 bits. That is what decoding wants, which reads every
  weight for each token and computes next to nothing.
- An Embedding becomes ``GatherBlockQuantized``. One that is tied to a Linear reads the very bytes of the Linear; others
  have 8 bits in either precision, as they are looked up and cost size alone.
- ``int8`` in a graph without a past, which computes a lot with each weight: the Linears become
  ``MatMulIntegerToFloat``, a scale for each output, and what they read passes one ``DynamicQuantizeLinear``. It is
  twice to three times as fast as ``MatMulNBits`` there, and less exact.

Biases, norms and all else stay float32. The products and the lookup are ONNX Runtime's own operators, and so is the
arithmetic that makes their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes
from safetensors import safe_open

from zoo.artifact import HALVES, ModelDirectory
from zoo.errors import ArtifactError, UsageError, nearest
from zoo.weights import DTYPES, StoredTensor, read_header
from zoo_export.exporter import Options, make_graphs, unlinked_graphs
from zoo_export.graph_file import MODULE_KEY, link, parse, serialize
from zoo_export.packing import (
    SCALES,
    ZERO_POINTS,
    Packing,
    read_tensor,
    write_packed,
    write_tensors,
)
from zoo_export.pipeline import OnnxExecutor
from zoo_export.session import Provider, check_dtype, open_session
from zoo_export.values import numpy_dtype

__all__ = [
    "PRECISIONS",
    "SCHEMES",
    "Precision",
    "Scheme",
    "Variant",
    "make_variant",
    "open_variant",
    "read_variant",
    "with_exact_products",
]

Array = np.ndarray[Any, Any]
Place = tuple[str, int]
"""A file and an offset."""
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

PRECISION_KEY = "zoo.precision"
"""In a graph's metadata: which variant it belongs to."""
CONTRIB = "com.microsoft"
BLOCKS, DYNAMIC, TABLE = "MatMulNBits", "MatMulIntegerToFloat", "GatherBlockQuantized"
_TABLE_BITS = 8
_SMALLEST_BLOCK = 16
_INT8_COMPUTE = 4
"""``accuracy_level``: the runtime may quantise activations to int8, by block. Without it 8-bit weights have no kernel
of their own and are expanded at every call, a hundred times slower for one token; 4-bit ones are half as fast."""
_ONNX_DTYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "I64": ir.DataType.INT64, "I32": ir.DataType.INT32,
    "U8": ir.DataType.UINT8, "I8": ir.DataType.INT8, "BOOL": ir.DataType.BOOL, "F64": ir.DataType.DOUBLE,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a precision does to weights."""

    bits: int
    block: int
    """Numbers that share a scale; fewer where a row is no multiple of it."""
    zero_points: bool
    dynamic: bool
    """Quantise activations as a whole where a graph has no past."""


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(bits=8, block=128, zero_points=False, dynamic=True),
    "int4": Scheme(bits=4, block=32, zero_points=True, dynamic=False),
}


@dataclass(frozen=True)
class Variant:
    """A model's graphs in another precision, and the file that holds what is stored for them."""

    precision: Precision
    directory: Path
    """Where the file is now; graphs name it as if it lay beside the model's own."""
    file: str
    graphs: Mapping[str, ir.Model]
    """By the names of the declared graphs."""

    @property
    def path(self) -> Path:
        """The file of weights."""
        return self.directory / self.file

    def files(self) -> dict[str, bytes]:
        """Each graph as the bytes of an ONNX file, by the name of its declaration."""
        return {name: serialize(ir.to_proto(model)) for name, model in self.graphs.items()}

    def parse(self, data: bytes, stored: ModelDirectory) -> ir.Model:
        """A graph of this variant from the bytes of its file, its pointers resolved."""
        model = ir.from_proto(parse(data))
        for tensor in map(_pointer, model.graph.initializers.values()):
            if tensor is not None:
                tensor.base_dir = self.directory if str(tensor.location) == self.file else stored.path
        return model

    def footprint(self) -> int:
        """Bytes of all weights that the graphs read, each once."""
        places = {
            (str(tensor.location), tensor.offset): tensor.length
            for model in self.graphs.values()
            for tensor in map(_pointer, model.graph.initializers.values())
            if tensor is not None
        }
        return sum(length or 0 for length in places.values())


def make_variant(stored: ModelDirectory, precision: Precision, directory: Path) -> Variant:
    """Make a model's graphs in a smaller precision, and write their weights to ``directory``.

    Args:
        stored: a float32 model.
        precision: ``fp16``, ``bf16``, ``int8`` or ``int4``.
        directory: where ``model.PRECISION.safetensors`` is written, such as the stage of ``stored.adding()``.

    Raises:
        UsageError: the precision cannot be had from this model, or not on this runtime.
        PluginError: the model cannot be traced.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", stored.path, nearest(precision, PRECISIONS))
    if stored.dtype != "float32":
        raise UsageError(f"{precision} is made from a float32 model, this one is {stored.dtype}", stored.path)
    if precision == "fp32":
        raise UsageError("the model is fp32 already", stored.path, f"zoo export {stored.path} --onnx")
    file = f"model.{precision}.safetensors"
    if precision in HALVES:
        return _to_half(stored, Variant(precision, directory, file, {}))
    empty = Variant(precision, directory, file, {})
    written = make_graphs(stored, Options(profile="cpu"))
    graphs = {name: empty.parse(graph, stored) for name, graph in written.items()}
    plan = _plan(stored, graphs, SCHEMES[precision])
    weights = ((name, read_tensor(stored.path, name, stored.layout[name])) for name in plan)
    write_packed(directory / file, plan, weights)
    places = read_header(directory / file)
    for model in graphs.values():
        _rewrite(model, plan, places, directory)
        model.metadata_props[PRECISION_KEY] = precision
    return Variant(precision, directory, file, graphs)


def read_variant(stored: ModelDirectory, precision: Precision) -> Variant:
    """A variant as it lies in its model's directory.

    Raises :class:`ArtifactError` when its graphs or its weights are not listed in the manifest.
    """
    file = f"model.{precision}.safetensors"
    export = stored.export(precision)
    export.check()
    if file not in stored.files:
        raise ArtifactError("not in the manifest", stored.path / file, f"export {precision} again")
    variant = Variant(precision, stored.path, file, {})
    return replace(variant, graphs={name: variant.parse(data, stored) for name, data in export.read().items()})


def open_variant(
    variant: Variant,
    *,
    provider: Provider = "cpu",
    optimize: bool = True,
    values: Mapping[Place, Array] | None = None,
    placements: bool = False,
) -> OnnxExecutor:
    """Sessions for all graphs of a variant, which need not be in its model's directory yet.

    Args:
        variant: to run.
        provider: the execution provider.
        optimize: with the runtime's graph optimisations.
        values: of weights, by the place that initialisers point at, instead of what lies there.
        placements: record which provider runs each node.

    Raises:
        UsageError: the provider does not load, or not compute in this precision.
        ArtifactError: the runtime refuses a graph, or its pointers.
    """
    dtype = HALVES.get(variant.precision, "float32")
    check_dtype(dtype, provider, variant.directory)
    sessions = {}
    for name, model in variant.graphs.items():
        found: dict[str, Array] = {}
        for key, value in model.graph.initializers.items():
            tensor = _pointer(value)
            if tensor is not None and value.uses():
                known = (values or {}).get((str(tensor.location), tensor.offset or 0))
                try:
                    found[key] = tensor.numpy() if known is None else known
                except (OSError, ValueError) as error:
                    raise ArtifactError(f"initialiser {key} points nowhere ({error})", variant.path) from error
        sessions[name] = open_session(
            variant.files()[name],
            provider=provider,
            optimize=optimize,
            replace=found,
            spin=False,
            placements=placements,
        )
    return OnnxExecutor(sessions, numpy_dtype(dtype))


def with_exact_products(variant: Variant) -> tuple[Variant, dict[Place, Array]]:
    """The same graphs with plain products in float32, of the very numbers that the quantised operators read.

    Returns:
        The graphs, and the values of the weights in them, for :func:`open_variant`.
    """
    values: dict[Place, Array] = {}
    graphs = {name: _exact(model, values) for name, model in variant.graphs.items()}
    return replace(variant, graphs=graphs), values


def _to_half(stored: ModelDirectory, empty: Variant) -> Variant:
    """Write the weights in half the bits, and trace the graphs in that dtype."""
    dtype = HALVES[empty.precision]
    layout = {
        name: (DTYPES[dtype] if place.dtype == "F32" else place.dtype, place.shape)
        for name, place in stored.layout.items()
    }
    with safe_open(stored.path / next(iter(stored.layout.values())).file, framework="numpy") as reader:
        metadata = reader.metadata() or {}

    def halves() -> Iterator[tuple[str, Array]]:
        for name, place in stored.layout.items():
            tensor = read_tensor(stored.path, name, place)
            if place.dtype == "F32":
                with np.errstate(over="ignore"):
                    half = tensor.astype(numpy_dtype(dtype))
                if not np.array_equal(np.isfinite(half), np.isfinite(tensor)):
                    reached = np.abs(tensor).max()
                    raise UsageError(f"{empty.precision} cannot hold {name}: it reaches {reached:.3g}", stored.path)
                tensor = half
            yield name, tensor

    write_tensors(empty.path, layout, metadata, halves())
    places = read_header(empty.path)
    unlinked = unlinked_graphs(stored.spec, dtype, Options())
    graphs = {name: empty.parse(link(graph, places), stored) for name, graph in unlinked.items()}
    for model in graphs.values():
        model.metadata_props[PRECISION_KEY] = empty.precision
    return replace(empty, graphs=graphs)


def _plan(stored: ModelDirectory, graphs: Mapping[str, ir.Model], scheme: Scheme) -> dict[str, Packing]:
    """The matrices to quantise: those of which every reader is a Linear or an Embedding."""
    has_past = {graph.name: graph.past is not None for graph in stored.spec.graphs}
    plan: dict[str, Packing] = {}
    for name, place in stored.layout.items():
        readers = [
            (_reader(node, position), has_past[graph])
            for graph, model in graphs.items()
            if name in model.graph.initializers
            for node, position in model.graph.initializers[name].uses()
        ]
        kinds = {kind for kind, _ in readers}
        if len(place.shape) != 2 or place.dtype != "F32" or not kinds or None in kinds:
            continue
        rows, columns = place.shape
        if scheme.dynamic and not any(past for _, past in readers) and kinds == {"product"}:
            plan[name] = Packing(rows, columns, 8, None)
            continue
        block = next((size for size in _blocks(scheme.block) if columns % size == 0), None)
        if "product" not in kinds:
            if block is not None:
                plan[name] = Packing(rows, columns, _TABLE_BITS, block)
        elif block is None:
            what = f"rows of {columns} numbers, as {name} has, are no multiple of {_SMALLEST_BLOCK}"
            raise UsageError(what, stored.path, "use fp16")
        else:
            plan[name] = Packing(rows, columns, scheme.bits, block, scheme.zero_points)
    if not plan:
        raise UsageError("the model has no Linear or Embedding to quantise", stored.path, "use fp16")
    return plan


def _blocks(largest: int) -> Iterator[int]:
    while largest >= _SMALLEST_BLOCK:
        yield largest
        largest //= 2


def _reader(node: ir.Node, position: int) -> Literal["product", "lookup"] | None:
    """What a node does with a matrix that is one of its inputs, if that can be done with a quantised one."""
    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "Gemm" and position == 1:
        plain = numbers.get("alpha", 1) == 1 and numbers.get("beta", 1) == 1 and not numbers.get("transA", 0)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        adds = bias is None or (bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1)
        return "product" if plain and adds and numbers.get("transB", 0) else None
    if node.op_type == "Gather" and position == 0 and not numbers.get("axis", 0):
        return "lookup"
    return None


def _rewrite(model: ir.Model, plan: Mapping[str, Packing], places: Mapping[str, StoredTensor], directory: Path) -> None:
    """Let each reader of a planned matrix read its packed form."""
    made: dict[str, ir.Value] = {}
    rounded: dict[ir.Value, ir.Node] = {}

    def part(name: str, suffix: str, *, flat: bool = False) -> ir.Value:
        """An initialiser; ``flat`` gives each row its own line of bytes, as a lookup wants them."""
        key = name + suffix + (".table" if flat else "")
        if key not in made:
            place = places[name + suffix]
            if flat:
                place = replace(place, shape=(place.shape[0], place.shape[1] * place.shape[2]))
            tensor = _external(key, place, directory)
            made[key] = ir.Value(name=key, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        return made[key]

    for name, packing in plan.items():
        weight = model.graph.initializers.pop(name, None)
        for node, _ in tuple(weight.uses()) if weight is not None else ():
            scales = part(name, SCALES)
            points = part(name, ZERO_POINTS) if packing.zero_points else None
            if node.op_type == "Gather":
                inputs = [part(name, "", flat=True), node.inputs[1], scales, points]
                sizes = {"bits": packing.bits, "block_size": packing.block, "gather_axis": 0, "quantize_axis": 1}
                _replace(model, node, TABLE, inputs, sizes)
                continue
            source = node.inputs[0]
            assert source is not None
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            if packing.block is None:
                numbers, scale, point = _quantized(model, source, rounded)
                _replace(model, node, DYNAMIC, [numbers, part(name, ""), scale, scales, point, None, bias], {})
                continue
            sizes = {"K": packing.columns, "N": packing.rows, "bits": packing.bits, "block_size": packing.block}
            sizes["accuracy_level"] = _INT8_COMPUTE
            _replace(model, node, BLOCKS, [source, part(name, ""), scales, points, None, bias], sizes)
    for value in made.values():
        model.graph.initializers.add(value)
    model.opset_imports[CONTRIB] = 1
    passes.RemoveUnusedNodesPass()(model)


def _quantized(model: ir.Model, source: ir.Value, known: dict[ir.Value, ir.Node]) -> Sequence[ir.Value]:
    """Numbers, scale and zero point of activations; they are quantised once for all that read them."""
    if source not in known:
        producer = source.producer()
        known[source] = ir.node("DynamicQuantizeLinear", [source], num_outputs=3)
        if producer is None:
            model.graph.insert_before(next(iter(model.graph)), known[source])
        else:
            model.graph.insert_after(producer, known[source])
    return known[source].outputs


def _replace(
    model: ir.Model, node: ir.Node, kind: str, inputs: list[ir.Value | None], attributes: Mapping[str, Any]
) -> None:
    """Put an operator of the runtime's in place of a node."""
    old = node.outputs[0]
    new = ir.Value(name=old.name, shape=old.shape, type=old.type)
    paths = {key: path for key, path in node.metadata_props.items() if key == MODULE_KEY}
    while inputs[-1] is None:
        inputs = inputs[:-1]
    made = ir.node(kind, inputs, dict(attributes), domain=CONTRIB, outputs=[new], metadata_props=paths)
    model.graph.insert_after(node, made)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def _exact(model: ir.Model, values: dict[Place, Array]) -> ir.Model:
    """A copy with MatMul in place of each quantised product. Its weights are added to ``values``."""
    copy = model.clone()
    expanded: dict[ir.Value, ir.Value] = {}
    for node in tuple(copy.graph):
        if node.domain != CONTRIB or node.op_type not in (BLOCKS, DYNAMIC):
            continue
        inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
        if node.op_type == BLOCKS:
            source, numbers, scales, points, _, bias, _ = inputs
        else:
            rounded, numbers, _, scales, _, points, bias = inputs
            quantizer = rounded.producer() if rounded is not None else None
            assert quantizer is not None
            source = quantizer.inputs[0]
        assert numbers is not None
        if numbers not in expanded:
            parts = {"": numbers, SCALES: scales, ZERO_POINTS: points}
            weight = _expand(node, {suffix: _numbers(value) for suffix, value in parts.items() if value is not None})
            place = f"exact.{copy.graph.name}", len(values)
            values[place] = weight
            tensor = ir.ExternalTensor(
                *place, weight.nbytes, ir.DataType.FLOAT, shape=ir.Shape(weight.shape), name=f"exact.{len(values)}"
            )
            expanded[numbers] = ir.Value(
                name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            copy.graph.initializers.add(expanded[numbers])
        made = [ir.node("MatMul", [source, expanded[numbers]])]
        if bias is not None:
            made.append(ir.node("Add", [made[0].outputs[0], bias]))
        old, new = node.outputs[0], made[-1].outputs[0]
        new.shape, new.type = old.shape, old.type
        for one in made:
            one.metadata_props.update(node.metadata_props)
        copy.graph.insert_before(node, made)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        copy.graph.remove(node, safe=True)
        new.name = old.name
    passes.RemoveUnusedNodesPass()(copy)
    return copy


def _expand(node: ir.Node, parts: Mapping[str, Array]) -> Array:
    """The matrix (K, N) that a quantised product multiplies by, from what the node says and reads."""
    if node.op_type == DYNAMIC:
        columns, rows = parts[""].shape
        packing = Packing(rows, columns, 8, None)
    else:
        rows, columns, bits, block = (node.attributes[key].as_int() for key in ("N", "K", "bits", "block_size"))
        packing = Packing(rows, columns, bits, block, ZERO_POINTS in parts)
    return np.ascontiguousarray(packing.unpack(parts).T)


def _numbers(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


def _pointer(value: ir.Value) -> ir.ExternalTensor | None:
    return value.const_value if isinstance(value.const_value, ir.ExternalTensor) else None


def _external(name: str, place: StoredTensor, directory: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        place.file, place.offset, place.length, _ONNX_DTYPES[place.dtype],
        shape=ir.Shape(place.shape), name=name, base_dir=directory,
    )  # fmt: skip
