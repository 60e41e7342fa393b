"""From a declared graph to ONNX, without weights.

What is traced keeps the names of the modules it came from; everything that would tie the file to one machine is
stripped, so the bytes depend on code and configuration only.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import opset23 as op
from onnxscript.optimizer import fold_constants_ir
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo import __version__, models
from zoo.contract import Graph, TensorSpec
from zoo.errors import ParityError, PluginError
from zoo.registry import ModelSpec
from zoo_export.blocks import Outline
from zoo_export.functions import cut_functions
from zoo_export.graph_file import BLOCK_KEY, EXACT_KEY, MODULE_KEY, contract, inline, serialize
from zoo_export.recurrent import RecurrentLayers

__all__ = ["trace_graph"]

IR_VERSION = 10
_op: Any = op  # its stubs type each operator so tightly that they cannot be composed

_EXAMPLE_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Distinct sizes for the named dimensions while tracing, so that no two are taken for one."""
_SMALL = 1024
"""Constants up to this many elements are folded; beyond it lies nothing but weights."""


def trace_graph(spec: ModelSpec, graph: Graph, dtype: str, *, opset: int, functions: bool = True) -> bytes:
    """Translate one declared graph to ONNX without allocating a weight.

    The initialisers of the serialised graph have the names, shapes and dtypes of what the model stores, and point
    nowhere yet: see :func:`zoo_export.graph_file.link`.

    Args:
        spec: the model.
        graph: one of its graphs.
        dtype: of its weights.
        opset: of the standard operators.
        functions: make functions of modules that repeat, else a flat graph.

    Raises:
        PluginError: the model cannot be traced, or keeps values outside its parameters and persistent buffers.
    """
    if graph.recorded():  # weights that are made within a function would not come out of it
        functions = False
    try:
        model = _trace(spec, graph, dtype, opset, blocks=not graph.recorded())
    except PluginError:
        model = _trace(spec, graph, dtype, opset, blocks=False)
    if not functions:
        inline(model)
        passes.CommonSubexpressionEliminationPass()(model)
        passes.RemoveUnusedOpsetsPass()(model)
    _describe(model, spec, graph, dtype, opset)
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            assert value.dtype is not None
            assert value.shape is not None
            value.const_value = ir.ExternalTensor("", None, None, value.dtype, shape=value.shape, name=name)
    return serialize(ir.to_proto(model))


def _trace(spec: ModelSpec, graph: Graph, dtype: str, opset: int, *, blocks: bool) -> ir.Model:
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
                with RecurrentLayers():
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
                opset_version=opset,
                custom_translation_table={
                    torch.ops.aten.linear.default: _linear,
                    torch.ops.aten.scalar_tensor.default: _scalar_tensor,
                },
            )
            assert translated is not None
            model = translated.model
            _take_names(model, stored_names)
            cut_functions(model, outline, _simplify)
    except Exception as error:
        raise PluginError(
            f"{spec.plugin}: graph {graph.name!r} of {spec.name} cannot be exported ({_reason(error)})",
            _place(error, model_on_meta),
        ) from error
    _simplify(model)
    _declare(model, inputs, outputs)
    return model


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it comes from, the first cause last."""
    yield error
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _reason(error: BaseException) -> str:
    *_, first = _causes(error)
    return str(first).strip().partition("\n")[0] or type(first).__name__


def _place(error: BaseException, model: nn.Module) -> str | None:
    """The innermost module of ``model`` that an error passed through, with file and line."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = None
    for cause in _causes(error):
        trace: TracebackType | None = cause.__traceback__
        while trace is not None:
            code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in paths and not type(owner).__module__.startswith("torch."):
                path = paths[id(owner)]
                found = (
                    f"{path or 'the model'} ({type(owner).__name__}), {Path(code.co_filename).name}:{trace.tb_lineno}"
                )
            trace = trace.tb_next
    return found


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A dense layer as Reshape, Gemm, Reshape: the weight is read as torch stores it, (outputs, inputs).

    The exporter's own translation transposes the weight, which a runtime then folds into a private copy.
    """
    outputs, inputs = (int(size) for size in weight.shape)
    rows = _op.Reshape(x, _op.Constant(value_ints=[-1, inputs]))
    product = _op.Gemm(rows, weight, transB=1) if bias is None else _op.Gemm(rows, weight, bias, transB=1)
    shape = _op.Concat(_op.Shape(x, start=0, end=-1), _op.Constant(value_ints=[outputs]), axis=0)
    return _op.Reshape(product, shape)


def _scalar_tensor(s: Any, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """A number in the dtype of what it is combined with.

    The exporter's own translation rounds it to float32 first, in a float64 product too.
    """
    kind = ir.DataType(dtype)
    if not isinstance(s, (bool, int, float)):
        return _op.Cast(s, to=kind)
    constant = _op.Constant(value=ir.tensor(s, dtype=kind))
    if kind in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        constant.producer().metadata_props[EXACT_KEY] = repr(float(s))
    return constant


def _take_names(model: ir.Model, stored: Mapping[str, str]) -> None:
    """Name initialisers as the model stores them and drop their values, which tracing only pretended to have.

    What the model does not store are tensors that its code spells out: their values are real, and become constants.
    """
    initializers = model.graph.initializers
    for name, value in list(initializers.items()):
        if name.startswith("model."):
            del initializers[name]
            first = stored.get(name.removeprefix("model."))
            if first is None:
                assert value.const_value is not None
                node = ir.node("Constant", [], {"value": ir.tensor(value.const_value.numpy())})
                model.graph.insert_before(model.graph[0], node)
                value.replace_all_uses_with(node.outputs[0])
                continue
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
        kept = {key: node.metadata_props[key] for key in (BLOCK_KEY, EXACT_KEY) if key in node.metadata_props}
        node.metadata_props.clear()
        node.metadata_props.update(kept)
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


def _describe(model: ir.Model, spec: ModelSpec, graph: Graph, dtype: str, opset: int) -> None:
    """Say what the graph is, what it was made with, and what it takes and gives."""
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "zoo", __version__
    model.graph.name = graph.name
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    tools = {name: version(name) for name in ("torch", "onnx", "onnx-ir", "onnxscript")}
    model.metadata_props.update(
        {
            "zoo.architecture": spec.architecture.name,
            "zoo.config": json.dumps(spec.config.to_dict()),
            "zoo.contract": contract(model),
            "zoo.dtype": dtype,
            "zoo.opset": str(opset),
            "zoo.profile": "portable",
            "zoo.plugin": f"{spec.plugin.distribution} {spec.plugin.version}",
            "zoo.task": spec.task,
            "zoo.tools": json.dumps({"zoo": __version__, **tools}),
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
