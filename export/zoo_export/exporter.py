"""From a model directory to ONNX graphs whose initialisers point into its safetensors file.

The model is traced without weights. Every initialiser becomes a pointer (file, offset, length), so nothing is stored
twice and weights retrained in the same layout need no new graph. What is traced keeps the names of the modules it came
from; everything that would tie the file to one machine is stripped, so the bytes depend on code and configuration only.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import opset23 as op
from onnxscript.optimizer import fold_constants_ir
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo import __version__, models
from zoo.artifact import EVIDENCE, ModelDirectory, write_json
from zoo.contract import Graph, TensorSpec
from zoo.errors import ParityError, PluginError, UsageError
from zoo.registry import ModelSpec
from zoo.weights import StoredTensor
from zoo_export.blocks import Outline
from zoo_export.functions import cut_functions
from zoo_export.graph_file import BLOCK_KEY, EVIDENCE_KEY, MODULE_KEY

if TYPE_CHECKING:
    from zoo_export.parity import Progress, Report
    from zoo_export.session import Provider

__all__ = ["export_model", "link_weights", "make_graphs", "serialize", "trace_graph"]

OPSET = 23
IR_VERSION = 10
_op: Any = op  # its stubs type each operator so tightly that they cannot be composed

_EXAMPLE_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Distinct sizes for the named dimensions while tracing, so that no two are taken for one."""
_SMALL = 1024
"""Constants up to this many elements are folded; beyond it lies nothing but weights."""
_ONNX_DTYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16, "F64": ir.DataType.DOUBLE,
    "I64": ir.DataType.INT64, "I32": ir.DataType.INT32, "U8": ir.DataType.UINT8, "BOOL": ir.DataType.BOOL,
}  # fmt: skip


def export_model(
    directory: Path,
    *,
    force: bool = False,
    provider: Provider = "cpu",
    whole_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Export every graph of a model directory beside its weights, once shown equal to the model.

    Args:
        directory: a model directory.
        force: replace an earlier export.
        provider: the execution provider to compare on.
        whole_grid: compare at every point of the grid, however long that takes.
        progress: called with each compared point and their number.

    Returns:
        The evidence, as written to parity.json.

    Raises:
        UsageError: there is an export already, or the provider does not load.
        ArtifactError: the directory is not a sound model.
        PluginError: the model cannot be traced.
        ParityError: the graph is not equal to the model. Nothing is written.
    """
    from zoo_export.parity import compare  # tracing alone needs no runtime

    stored = ModelDirectory.open(directory)
    if not force and EVIDENCE in stored.files:
        raise UsageError("already exported", directory / stored.graph_files()[0], "use --force to export again")
    graphs = make_graphs(stored)
    report = compare(
        stored,
        {name: serialize(model) for name, model in graphs.items()},
        provider=provider,
        whole_grid=whole_grid,
        progress=progress,
    )
    if not report.passed:
        raise ParityError(report.verdict(), directory, "nothing was written")
    with stored.adding() as stage:
        write_json(stage / EVIDENCE, report.evidence)
        digest = hashlib.sha256((stage / EVIDENCE).read_bytes()).hexdigest()
        for name, model in graphs.items():
            model.metadata_props[EVIDENCE_KEY] = digest
            (stage / name).write_bytes(serialize(model))
    return report


def make_graphs(stored: ModelDirectory) -> dict[str, ir.Model]:
    """Every declared graph by its file name, pointing at the weights, not yet compared with anything."""
    return {
        f"{graph.name}.onnx": link_weights(trace_graph(stored.spec, graph, stored.dtype), stored)
        for graph in stored.spec.graphs
    }


def serialize(model: ir.Model) -> bytes:
    """The bytes of an ONNX file. Equal models give equal bytes."""
    data: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return data


def trace_graph(spec: ModelSpec, graph: Graph, dtype: str) -> ir.Model:
    """Translate one declared graph to ONNX without allocating a weight.

    The initialisers of the result have the names and shapes of what the model stores, but no values yet: see
    :func:`link_weights`. Modules that repeat become functions.

    Raises:
        PluginError: the model cannot be traced, or keeps values outside its parameters and persistent buffers.
    """
    try:
        return _trace(spec, graph, dtype, blocks=True)
    except PluginError:
        return _trace(spec, graph, dtype, blocks=False)


def _trace(spec: ModelSpec, graph: Graph, dtype: str, *, blocks: bool) -> ir.Model:
    inputs, outputs = graph.input_tensors(), graph.output_tensors()
    sizes = dict(zip(graph.dim_names(), _EXAMPLE_SIZES, strict=False))
    real = models.torch_dtype(dtype)
    model_on_meta = models.build_on_meta(spec, dtype)
    stored_names = {name: first for first, (_, names) in models.tensor_groups(model_on_meta).items() for name in names}

    def examples(device: str, tensors: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros(tensor.shape(sizes), dtype=torch.int64 if tensor.dtype == "int64" else real, device=device)
            for tensor in tensors
        )

    free = torch.export.Dim.DYNAMIC
    try:
        with _quiet(), _without_collection(), torch.no_grad():
            outline = Outline(model_on_meta, graph, examples("meta", inputs), blocks=blocks)
            kept = [inputs[number] for number in outline.kept_inputs]
            with outline.tracing() as module:
                groups = models.tensor_groups(model_on_meta)
                with FakeTensorMode(allow_non_fake_inputs=True):
                    models.fill(
                        model_on_meta,
                        ((name, torch.empty_like(tensor, device="cpu")) for name, (tensor, _) in groups.items()),
                    )
                    arguments = examples("cpu", kept)
                program = torch.export.export(
                    module.eval(),
                    arguments,
                    dynamic_shapes=(
                        tuple({n: free for n, dim in enumerate(t.dims) if isinstance(dim, str)} for t in kept),
                    ),
                    strict=False,
                )
            translated = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                custom_translation_table={torch.ops.aten.linear.default: _linear},
            )
            assert translated is not None
            model = translated.model
            _take_names(model, stored_names)
            cut_functions(model, outline, _simplify)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0]
        what = f"{spec.plugin}: graph {graph.name!r} of {spec.name} cannot be exported ({reason})"
        raise PluginError(what) from error
    _simplify(model)
    _declare(model, inputs, outputs)
    _describe(model, spec, graph, dtype)
    return model


def link_weights(model: ir.Model, stored: ModelDirectory) -> ir.Model:
    """Point every initialiser at its bytes in the model directory's safetensors files."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:  # the others are small constants of the graph itself
            place: StoredTensor = stored.layout[name]
            value.const_value = ir.ExternalTensor(
                place.file, place.offset, place.length, _ONNX_DTYPES[place.dtype],
                shape=ir.Shape(place.shape), name=name, base_dir=stored.path,
            )  # fmt: skip
    return model


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A dense layer as Reshape, Gemm, Reshape: the weight is read as torch stores it, (outputs, inputs).

    The exporter's own translation transposes the weight, which a runtime then folds into a private copy.
    """
    outputs, inputs = (int(size) for size in weight.shape)
    rows = _op.Reshape(x, _op.Constant(value_ints=[-1, inputs]))
    product = _op.Gemm(rows, weight, transB=1) if bias is None else _op.Gemm(rows, weight, bias, transB=1)
    shape = _op.Concat(_op.Shape(x, start=0, end=-1), _op.Constant(value_ints=[outputs]), axis=0)
    return _op.Reshape(product, shape)


def _take_names(model: ir.Model, stored: Mapping[str, str]) -> None:
    """Name initialisers as the model stores them and drop their values, which tracing only pretended to have."""
    initializers = model.graph.initializers
    for name, value in list(initializers.items()):
        if name.startswith("model."):
            del initializers[name]
            first = stored[name.removeprefix("model.")]
            if first in initializers:
                value.replace_all_uses_with(initializers[first])
                continue
            value.name, value.const_value = first, None
            initializers[first] = value


def _simplify(model: ir.Model) -> None:
    """Fold what is constant without the weights, and drop what is idle or repeated."""
    fold_constants_ir(model, input_size_limit=_SMALL, output_size_limit=_SMALL)
    for step in (
        passes.IdentityEliminationPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
    ):
        step(model)
    for node in model.graph.all_nodes():
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        module = next((scope for scope in reversed(scopes[:-1]) if scope.startswith("model")), "")
        block = node.metadata_props.get(BLOCK_KEY)
        node.metadata_props.clear()
        if block:
            node.metadata_props[BLOCK_KEY] = block
        if module.removeprefix("model."):
            node.metadata_props[MODULE_KEY] = module.removeprefix("model").removeprefix(".")
        for value in node.outputs:
            value.shape, value.type = None, None
            value.metadata_props.clear()


def _declare(model: ir.Model, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Give the signature the names and dimensions of the declaration."""
    real = next(iter(model.graph.initializers.values())).dtype
    for values, tensors in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        if len(set(values)) != len(tensors):
            raise ParityError(f"{len(values)} tensors were traced, {len(tensors)} are declared")
        for value, tensor in zip(values, tensors, strict=True):
            value.name = tensor.name
            value.shape = ir.Shape(tensor.dims)
            value.type = ir.TensorType(ir.DataType.INT64 if tensor.dtype == "int64" else real or ir.DataType.FLOAT)
            value.metadata_props.clear()


def _describe(model: ir.Model, spec: ModelSpec, graph: Graph, dtype: str) -> None:
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "zoo", __version__
    model.graph.name = graph.name
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props.update(
        {
            "zoo.architecture": spec.architecture.name,
            "zoo.plugin": f"{spec.plugin.distribution} {spec.plugin.version}",
            "zoo.dtype": dtype,
            "zoo.task": spec.task,
        }
    )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector: tracing makes millions of objects that live, and searching them costs a sixth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporter prints: deprecations, packages not installed, graphs. Errors still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
