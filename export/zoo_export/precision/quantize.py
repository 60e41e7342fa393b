"""Smaller precisions of a model: new graphs, and an additional safetensors file for the weights that change.

Unchanged weights are read from the model's own file, so nothing is stored twice. Weights are read, quantised and
written one at a time.

``float16`` and ``bfloat16`` are the model traced in that dtype. ``int8`` and ``int4`` are the float32 graphs of the
profile ``cpu`` with quantised operators:

- Every Linear becomes ``MatMulNBits``, with blockwise 8- or 4-bit weights. This suits decoding, which reads every
  weight for each token and is bound by memory.
- An Embedding becomes ``GatherBlockQuantized``. If it is tied to a Linear, both read the same bytes; otherwise it has 8
  bits in either precision, since lookups are cheap and only its size matters.
- In ``int8`` graphs without a past, which use each weight for many tokens, Linears become ``MatMulIntegerToFloat`` with
  one scale per output, and their inputs pass through a ``DynamicQuantizeLinear``. This is two to three times as fast as
  ``MatMulNBits`` there, but less accurate.
- A stack of matrices, such as the weights of experts, has 8 bits in either precision. It is dequantised when the graph
  runs; where matrices are chosen by index, only those are.

In ``int4``, a block has the scale and zero point of the least squared error among a few candidates. The weights of
graphs with a past are also rounded for the closest products (:mod:`zoo_export.precision.calibrate`), which divided the
divergence of a trained decoder by four and of a random GPT-2 by two, but did not help a sentence encoder.

Biases, norms and everything else stay float32, and so do weights that do not fit (:attr:`Variant.kept`). The quantised
operators are ONNX Runtime's own, and so are the functions that quantise the other weights by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes
from safetensors import safe_open

from zoo.artifact import HALVES, Export, ModelDirectory
from zoo.artifact.weights import DTYPES, StoredTensor, plain_name, read_header
from zoo.errors import ArtifactError, UsageError, nearest
from zoo.probe.dtypes import numpy_dtype
from zoo_export.graph.file import MODULE_KEY, link, parse, serialize
from zoo_export.precision.calibrate import input_moments
from zoo_export.precision.packing import (
    SCALES,
    ZERO_POINTS,
    Packing,
    packings,
    read_tensor,
    write_packed,
    write_tensors,
)
from zoo_export.trace.make import Options, make_graphs, unlinked_graphs
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype, open_session

__all__ = [
    "PRECISIONS",
    "SCHEMES",
    "Place",
    "Precision",
    "Scheme",
    "Variant",
    "make_variant",
    "open_variant",
    "portable_variant",
    "read_variant",
    "weights_of_graph",
    "with_exact_products",
]

Array = np.ndarray[Any, Any]
Place = tuple[str, int]
"""A file and an offset."""
Precision = Literal["float32", "float16", "bfloat16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

PRECISION_KEY = "zoo.precision"
"""Graph metadata: the precision of the variant."""
CONTRIB = "com.microsoft"
BLOCKS, DYNAMIC, TABLE = "MatMulNBits", "MatMulIntegerToFloat", "GatherBlockQuantized"
_OTHER_BITS = 8
"""Bits of weights that no Linear reads."""
_STACK = 3
"""Number of dimensions of a stack of matrices."""
_SMALLEST_BLOCK = 16
_INT8_COMPUTE = 4
"""``accuracy_level``: allow the runtime to quantise activations to int8 by block. Without it, there is no kernel for
8-bit weights, which are then expanded at every call (a hundred times slower for one token); 4-bit weights are half as
fast."""
_ONNX_DTYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "I64": ir.DataType.INT64, "I32": ir.DataType.INT32,
    "U8": ir.DataType.UINT8, "I8": ir.DataType.INT8, "BOOL": ir.DataType.BOOL, "F64": ir.DataType.DOUBLE,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Quantisation scheme of a precision."""

    bits: int
    block: int
    """Numbers per scale; fewer if the row length is not a multiple of it."""
    zero_points: bool
    dynamic: bool
    """Whether to quantise activations dynamically, as a whole, in graphs without a past."""


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(bits=8, block=128, zero_points=False, dynamic=True),
    "int4": Scheme(bits=4, block=32, zero_points=True, dynamic=False),
}


@dataclass(frozen=True)
class Variant:
    """A model's graphs in another precision, and the additional weights file."""

    precision: Precision
    directory: Path
    """Current directory of the file. Graphs refer to it as if it were beside the model's own file."""
    file: str
    graphs: Mapping[str, ir.Model]
    """Graphs by declared name."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Weights of two or more dimensions that stay float32, each with the reason."""

    @property
    def path(self) -> Path:
        """Path of the additional weights file."""
        return self.directory / self.file

    def files(self) -> dict[str, bytes]:
        """Serialise the graphs, by declared name."""
        return {name: serialize(ir.to_proto(model)) for name, model in self.graphs.items()}

    def parse(self, data: bytes, stored: ModelDirectory) -> ir.Model:
        """Parse a graph of this variant, and resolve the locations of its weights."""
        model = ir.from_proto(parse(data))
        for tensor in map(_pointer, model.graph.initializers.values()):
            if tensor is not None:
                tensor.base_dir = self.directory if str(tensor.location) == self.file else stored.path
        return model

    def footprint(self) -> int:
        """Return the number of bytes of all weights that the graphs read, counting each once."""
        places = {
            (str(tensor.location), tensor.offset): tensor.length
            for model in self.graphs.values()
            for tensor in map(_pointer, model.graph.initializers.values())
            if tensor is not None
        }
        return sum(length or 0 for length in places.values())


def make_variant(stored: ModelDirectory, precision: Precision, directory: Path) -> Variant:
    """Create a model's graphs in a smaller precision, and write their weights to ``directory``.

    Args:
        stored: a float32 model.
        precision: ``float16``, ``bfloat16``, ``int8`` or ``int4``.
        directory: directory for ``model.PRECISION.safetensors``, such as the stage of ``stored.adding()``.

    Raises:
        UsageError: the model does not support the precision.
        PluginError: the model cannot be traced.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", stored.path, nearest(precision, PRECISIONS))
    if stored.dtype != "float32":
        raise UsageError(f"{precision} needs a float32 model, this one is {stored.dtype}", stored.path)
    if precision == "float32":
        raise UsageError("the model is already float32", stored.path, f"zoo export {stored.path} --onnx")
    file = f"model.{precision}.safetensors"
    if precision in HALVES:
        return _to_half(stored, Variant(precision, directory, file, {}))
    empty = Variant(precision, directory, file, {})
    unlinked = unlinked_graphs(stored.spec, stored.dtype, Options(profile="cpu"))  # one initialiser per tensor
    graphs = {name: empty.parse(link(graph, stored.layout), stored) for name, graph in unlinked.items()}
    plan, kept = _plan(stored, graphs, SCHEMES[precision])
    decoders = [graphs[graph.name].graph for graph in stored.spec.graphs if graph.pasts]
    measured = {
        name: packing.columns
        for name, packing in plan.items()
        if packing.bits == 4 and any(name in graph.initializers for graph in decoders)
    }
    moments = chain(input_moments(stored, measured), ((name, None) for name in plan if name not in measured))
    weights = (
        (name, read_tensor(stored.path, name, stored.layout[name]).reshape(plan[name].rows, plan[name].columns), moment)
        for name, moment in moments
    )
    write_packed(directory / file, plan, weights)
    return _quantize(Variant(precision, directory, file, graphs, kept), plan)


def _quantize(variant: Variant, plan: Mapping[str, Packing]) -> Variant:
    """Make the graphs of a variant read packed weights, which are written already."""
    places = read_header(variant.path)
    for model in variant.graphs.values():
        _rewrite(model, plan, places, variant.directory)
        model.metadata_props[PRECISION_KEY] = variant.precision
    return variant


def read_variant(stored: ModelDirectory, precision: Precision) -> Variant:
    """Read a variant from its model's directory.

    Raises:
        ArtifactError: its graphs or weights are not listed in the manifest.
    """
    file = f"model.{precision}.safetensors"
    export = Export(stored, precision)
    export.check()
    variant = Variant(precision, stored.file(file).parent, file, {})
    return replace(variant, graphs={name: variant.parse(data, stored) for name, data in export.read().items()})


def portable_variant(stored: ModelDirectory, precision: Precision) -> Variant:
    """Return a stored quantised variant with other graphs, whose inputs and outputs are the declared ones.

    The graphs of a decoder's variant are those of the profile ``cpu``, which other runtimes cannot call. These are not
    verified.
    """
    variant = read_variant(stored, precision)
    graphs = make_graphs(stored, Options(functions=False, windows=False))
    plain = {name: variant.parse(graph, stored) for name, graph in graphs.items()}
    return _quantize(replace(variant, graphs=plain), packings(variant.path))


def open_variant(
    variant: Variant,
    *,
    provider: Provider = "cpu",
    optimize: bool = True,
    values: Mapping[Place, Array] | None = None,
    placements: bool = False,
) -> OnnxExecutor:
    """Open sessions for all graphs of a variant, which need not be in its model's directory yet.

    Args:
        variant: the variant to run.
        provider: the execution provider.
        optimize: whether to run ONNX Runtime's graph optimisations.
        values: values that override stored weights, by location.
        placements: record which provider runs each node.

    Raises:
        UsageError: the provider does not load, or does not support the precision.
        ArtifactError: a graph cannot be loaded, or its weights cannot be read.
    """
    dtype = variant.precision if variant.precision in HALVES else "float32"
    check_dtype(dtype, provider, variant.directory)
    sessions = {}
    for name, model in variant.graphs.items():
        sessions[name] = open_session(
            variant.files()[name],
            provider=provider,
            optimize=optimize,
            replace=weights_of_graph(variant, model, values or {}),
            spin=False,
            placements=placements,
        )
    return OnnxExecutor(sessions, numpy_dtype(dtype))


def weights_of_graph(variant: Variant, model: ir.Model, values: Mapping[Place, Array]) -> dict[str, Array]:
    """Return the weights that a graph of a variant reads, by the names of its initialisers.

    Args:
        variant: the variant.
        model: one of its graphs.
        values: values that override stored weights, by location.

    Raises :class:`ArtifactError` if the weights cannot be read.
    """
    found: dict[str, Array] = {}
    for key, value in model.graph.initializers.items():
        tensor = _pointer(value)
        if tensor is not None and value.uses():
            known = values.get((str(tensor.location), tensor.offset or 0))
            try:
                found[key] = _read(tensor) if known is None else known
            except (OSError, ValueError) as error:
                raise ArtifactError(f"the data of initialiser {key} cannot be read ({error})", variant.path) from error
    return found


def with_exact_products(variant: Variant) -> tuple[Variant, dict[Place, Array]]:
    """Replace quantised products by float32 products of the dequantised weights.

    Returns:
        The variant, and the values of its weights for :func:`open_variant`.
    """
    values: dict[Place, Array] = {}
    graphs = {name: _exact(model, values) for name, model in variant.graphs.items()}
    return replace(variant, graphs=graphs), values


def _to_half(stored: ModelDirectory, empty: Variant) -> Variant:
    """Write the weights in half precision, and trace the graphs in that dtype."""
    dtype = empty.precision
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
                    raise UsageError(f"{name} reaches {reached:.3g}, too large for {empty.precision}", stored.path)
                tensor = half
            yield name, tensor

    write_tensors(empty.path, layout, metadata, halves())
    places = read_header(empty.path)
    unlinked = unlinked_graphs(stored.spec, dtype, Options(windows=False))
    graphs = {name: empty.parse(link(graph, places), stored) for name, graph in unlinked.items()}
    for model in graphs.values():
        model.metadata_props[PRECISION_KEY] = empty.precision
    return replace(empty, graphs=graphs)


def _plan(
    stored: ModelDirectory, graphs: Mapping[str, ir.Model], scheme: Scheme
) -> tuple[dict[str, Packing], dict[str, str]]:
    """Choose the weights to quantise; return them, and the reasons for those that stay float32."""
    has_past = {graph.name: bool(graph.pasts) for graph in stored.spec.graphs}
    in_loops = {node for model in graphs.values() for inner in model.graph.subgraphs() for node in inner}
    plan: dict[str, Packing] = {}
    kept: dict[str, str] = {}
    for name, place in stored.layout.items():
        uses = {
            use: has_past[graph]
            for graph, model in graphs.items()
            if name in model.graph.initializers
            for use in model.graph.initializers[name].uses()
        }
        if len(place.shape) < 2 or place.dtype != "F32" or not uses:
            continue
        # Errors of products would grow with every step; a matrix that is looked up is that of an expert.
        if any(node in in_loops and node.op_type != "Gather" for node, _ in uses):
            found: Packing | str = "read in a loop"
        elif any(_is_compared(node) for node, _ in uses):
            found = "its products choose, as those of a router"
        else:
            found = _packing(place.shape, uses, scheme)
        if isinstance(found, Packing):
            plan[name] = found
        else:
            kept[name] = found
    if not plan:
        what = "the model has no weights to quantise"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:3])
        raise UsageError(f"{what} ({reasons})" if kept else what, stored.path, "use float16")
    return plan, kept


def _packing(shape: tuple[int, ...], uses: Mapping[Any, bool], scheme: Scheme) -> Packing | str:
    """Choose how to store a weight that these nodes read, each in a graph with or without a past.

    Returns the reason if it cannot be quantised.
    """
    kinds = set()
    for node, position in uses:
        kind = _reader(node, position, len(shape))
        if kind is None:
            return f"read by {node.op_type}"
        kinds.add(kind)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if scheme.dynamic and not any(uses.values()) and kinds == {"product"}:
        return Packing(rows, columns, 8, None)
    block = next((size for size in _blocks(scheme.block) if columns % size == 0), None)
    if block is None:
        return f"row length {columns} is not a multiple of {_SMALLEST_BLOCK}"
    if "product" in kinds:
        # ONNX Runtime's CUDA kernel of lookups misreads packed zero points that do not fill the last byte of a row.
        fills = "lookup" not in kinds or columns // block * scheme.bits % 8 == 0
        return Packing(rows, columns, scheme.bits, block, scheme.zero_points and fills)
    return Packing(rows, columns, _OTHER_BITS, block, "stack" in kinds)


def _is_compared(node: ir.Node) -> bool:
    """Return whether the largest results of a node are chosen."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.op_type == "TopK" or (reader.op_type == "Reshape" and _is_compared(reader)) for reader in readers)


def _blocks(largest: int) -> Iterator[int]:
    while largest >= _SMALLEST_BLOCK:
        yield largest
        largest //= 2


def _reader(node: ir.Node, position: int, rank: int) -> Literal["product", "lookup", "stack"] | None:
    """Classify a node's use of a weight; None if it does not support a quantised one."""
    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "Gemm" and position == 1:
        plain = numbers.get("alpha", 1) == 1 and numbers.get("beta", 1) == 1 and not numbers.get("transA", 0)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        adds = bias is None or (bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1)
        return "product" if plain and adds and numbers.get("transB", 0) else None
    if node.op_type == "Gather" and position == 0 and not numbers.get("axis", 0) and rank <= _STACK:
        return "lookup"
    return "stack" if node.op_type in ("MatMul", "Einsum", "Transpose") and rank == _STACK else None


def _rewrite(model: ir.Model, plan: Mapping[str, Packing], places: Mapping[str, StoredTensor], directory: Path) -> None:
    """Replace each reader of a planned weight by an operator that reads its packed form."""
    made: dict[str, ir.Value] = {}
    rounded: dict[ir.Value, ir.Node] = {}
    expanded: list[ir.Node] = []

    def part(name: str, suffix: str, rows: tuple[int, ...] | None = None) -> ir.Value:
        """Return an initialiser; with ``rows`` in that shape, and the blocks of each row merged."""
        place = places[name + suffix]
        key = name + suffix
        if rows is not None and (shape := (*rows, math.prod(place.shape[1:]))) != place.shape:
            key, place = f"{key}.table", replace(place, shape=shape)
        if key not in made:
            tensor = _external(key, place, directory)
            made[key] = ir.Value(name=key, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        return made[key]

    for name, packing in plan.items():
        weight = model.graph.initializers.pop(name, None)
        if weight is None:
            continue
        assert weight.shape is not None
        rows = weight.shape.numpy()[:-1]
        whole: ir.Node | None = None
        for node, position in tuple(weight.uses()):
            if node.op_type == "Gather":
                points = part(name, ZERO_POINTS, rows) if packing.zero_points else None
                inputs = [part(name, "", rows), node.inputs[1], part(name, SCALES, rows), points]
                sizes = {"bits": packing.bits, "block_size": packing.block}
                _replace(model, node, TABLE, inputs, {**sizes, "gather_axis": 0, "quantize_axis": len(rows)})
                continue
            if node.op_type != "Gemm":
                if whole is None:
                    parts = [part(name, suffix, rows) for suffix in packing.parts()]
                    sizes = {"axis": len(rows), "block_size": packing.block}
                    whole = ir.node("DequantizeLinear", parts, sizes, name=f"{name} in float32")
                    expanded.append(whole)
                node.replace_input_with(position, whole.outputs[0])
                continue
            scales = part(name, SCALES)
            points = part(name, ZERO_POINTS) if packing.zero_points else None
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
    if expanded:
        model.graph.insert_before(model.graph[0], expanded)
    model.opset_imports[CONTRIB] = 1
    passes.RemoveUnusedNodesPass()(model)


def _quantized(model: ir.Model, source: ir.Value, known: dict[ir.Value, ir.Node]) -> Sequence[ir.Value]:
    """Quantise activations once for all readers; return numbers, scale and zero point."""
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
    """Replace a node by one of ONNX Runtime's own operators."""
    old = node.outputs[0]
    new = ir.Value(name=old.name, shape=old.shape, type=old.type)
    paths = {key: path for key, path in node.metadata_props.items() if key == MODULE_KEY}
    while inputs[-1] is None:
        inputs = inputs[:-1]
    made = ir.node(kind, inputs, dict(attributes), domain=CONTRIB, outputs=[new], metadata_props=paths)
    graph = node.graph
    assert graph is not None
    graph.insert_after(node, made)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _exact(model: ir.Model, values: dict[Place, Array]) -> ir.Model:
    """Return a copy with MatMul in place of each quantised product, and add its weights to ``values``."""
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
    """Dequantise the matrix (K, N) of a quantised product."""
    if node.op_type == DYNAMIC:
        columns, rows = parts[""].shape
        packing = Packing(rows, columns, 8, None)
    else:
        rows, columns, bits, block = (node.attributes[key].as_int() for key in ("N", "K", "bits", "block_size"))
        packing = Packing(rows, columns, bits, block, ZERO_POINTS in parts)
    return np.ascontiguousarray(packing.unpack(parts).T)


def _numbers(value: ir.Value) -> Array:
    assert value.const_value is not None
    tensor = _pointer(value)
    return value.const_value.numpy() if tensor is None else _read(tensor)


def _read(tensor: ir.ExternalTensor) -> Array:
    """Map a tensor into memory.

    With a base directory, onnx-ir rejects files that have several hard links, as in a backup or a store of equal files.
    The manifest already ensures that the file is the model's own.
    """
    if not plain_name(str(tensor.location)) or Path(tensor.path).is_symlink():
        raise ValueError(f"{tensor.location} is not a file in the model directory")
    return ir.ExternalTensor(
        tensor.path, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or ""
    ).numpy()


def _pointer(value: ir.Value) -> ir.ExternalTensor | None:
    return value.const_value if isinstance(value.const_value, ir.ExternalTensor) else None


def _external(name: str, place: StoredTensor, directory: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        place.file, place.offset, place.length, _ONNX_DTYPES[place.dtype],
        shape=ir.Shape(place.shape), name=name, base_dir=directory,
    )  # fmt: skip
