"""Translation of a declared graph to ONNX, without weights.

Nodes keep the names of the modules that they were traced from. Everything machine-specific is removed, so the bytes
depend only on code and configuration.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from linecache import getline
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.contract import Graph, Size, TensorSpec, sizes_of, standard_fields
from zoo.errors import ParityError, PluginError
from zoo.models import create, persist
from zoo.models.tensors import tensor_groups
from zoo.probe.dtypes import dtype_of, numpy_dtype
from zoo.registry import ModelSpec
from zoo.version import __version__
from zoo_export.graph.file import BLOCK_KEY, EXACT_KEY, FLAT_KEY, MODULE_KEY, contract, fault, inline
from zoo_export.graph.rewriting import simplify
from zoo_export.trace.examples import example_sizes, example_tensors, quiet
from zoo_export.trace.experts import EXPERT_TRANSLATIONS, ExpertMixtures
from zoo_export.trace.functions import cut_functions
from zoo_export.trace.guards import Branches, Traced, check_outputs
from zoo_export.trace.outline import Outline
from zoo_export.trace.recurrent import RecurrentLayers
from zoo_export.trace.small import check_small_sizes
from zoo_export.trace.translation import TRANSLATIONS, prepare, reused_registry

__all__ = ["trace_graph"]

IR_VERSION = 10

_READS_VALUES = ("meta tensor", "meta device", "data-dependent")
"""Parts of torch's messages about code that needs the values of a tensor."""

_UNTRANSLATED = re.compile(r"No ONNX function found for <(?:OpOverload\(op='|built-in function |function )([\w.]+)")

_PROBABLE = {
    r"on device \w+ is not on the expected device": (
        "a tensor is not where the model's are, as one that was kept from another call: register what is kept as a "
        "persistent buffer, and make other tensors in forward on the device of an input"
    ),
    r"\.numpy\(\) is not supported for tensor subclasses": (
        "a tensor of the trace was kept in an attribute or a cache: compute it in each call of forward"
    ),
    r"Expected size \d+ but got size \d+ for tensor number|Sizes of tensors must match except in dim": (
        "tensors do not fit, as a past and new keys do if the graph declares another num_kv_heads or head_dim than the "
        "model computes"
    ),
}
"""Probable causes and remedies by torch's message, a regular expression."""


def trace_graph(spec: ModelSpec, graph: Graph, dtype: str, *, opset: int, functions: bool = True) -> ir.Model:
    """Translate one declared graph to ONNX without allocating weights.

    The initialisers of the graph have the names, shapes and dtypes of the stored tensors, but no location
    yet: see :func:`zoo_export.graph.file.link`.

    Args:
        spec: the model.
        graph: one of its graphs.
        dtype: dtype of the weights.
        opset: opset version.
        functions: whether repeated modules become functions.

    Raises:
        PluginError: the model cannot be traced, or keeps values outside its parameters and persistent buffers.
    """
    if graph.recorded():  # attention weights inside a function could not be returned
        functions = False
    try:
        model, reason = _trace(spec, graph, dtype, opset, blocks=not graph.recorded())
    except _UntraceableError as error:
        reason = error.reason
        model, _ = _trace(spec, graph, dtype, opset, blocks=False)
    check_small_sizes(spec, graph, dtype, _allowed_sizes(spec, graph))
    if not functions:
        inline(model)
        passes.CommonSubexpressionEliminationPass()(model)
        passes.RemoveUnusedOpsetsPass()(model)
    _describe(model, spec, graph, dtype, opset)
    if functions and reason is not None:
        model.metadata_props[FLAT_KEY] = reason
    return model


class _UntraceableError(PluginError):
    """The model cannot be traced. ``reason`` is the reason without the plugin's name."""

    def __init__(self, what: str, reason: str, place: str | None) -> None:
        super().__init__(f"{what} ({reason})", place)
        self.reason = f"{reason}: {place}" if place else reason


def _trace(spec: ModelSpec, graph: Graph, dtype: str, opset: int, *, blocks: bool) -> tuple[ir.Model, str | None]:
    """Trace a graph; return it, and the reason if repeated modules did not become functions."""
    inputs, outputs = graph.input_tensors(), graph.output_tensors()
    sizes = example_sizes(spec, graph)
    model_on_meta = create.build_on_meta(spec, dtype)
    stored_names = {name: first for first, (_, names) in tensor_groups(model_on_meta).items() for name in names}

    def examples(device: str, tensors: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        return example_tensors(tensors, sizes, dtype, device)

    what = f"{spec.plugin}: graph {graph.name!r} of {spec.name} cannot be exported"
    free = torch.export.Dim.DYNAMIC
    branches = Branches(spec.plugin.distribution)
    try:
        with quiet(), _without_collection(), torch.no_grad():
            outline = Outline(model_on_meta, graph, examples("meta", inputs), blocks=blocks)
            kept = [inputs[number] for number in outline.kept_inputs]
            with outline.tracing() as module:
                groups = tensor_groups(model_on_meta)
                with FakeTensorMode(allow_non_fake_inputs=True):
                    persist.fill(
                        model_on_meta,
                        ((name, torch.empty_like(tensor, device="cpu")) for name, (tensor, _) in groups.items()),
                    )
                    arguments = examples("cpu", kept)
                with RecurrentLayers(), ExpertMixtures(), branches.recording():
                    program = torch.export.export(
                        module.eval(),
                        arguments,
                        dynamic_shapes=(
                            tuple({n: free for n, dim in enumerate(t.dims) if isinstance(dim, str)} for t in kept),
                        ),
                        strict=False,
                    )
            prepare(program)
            with reused_registry():
                translated = torch.onnx.export(
                    program,
                    dynamo=True,
                    optimize=False,
                    verbose=False,
                    opset_version=opset,
                    custom_translation_table={**TRANSLATIONS, **EXPERT_TRANSLATIONS},
                )
            assert translated is not None
            model = translated.model
            _take_names(model, stored_names)
            cut_functions(model, outline, _simplify)
    except MemoryError:
        raise
    except Exception as error:
        branches.explain(error)
        raise _UntraceableError(what, _reason(error), _place(error, model_on_meta)) from error
    allowed = _allowed_sizes(spec, graph)
    given = _shapes(program, kept, program.graph_signature.user_inputs)
    branches.check(given, graph, allowed)
    returned = [outputs[number] for number in outline.kept_outputs]
    check_outputs(given, _shapes(program, returned, program.graph_signature.user_outputs), graph, allowed)
    sources = {node.name: {**node.metadata_props} for node in model.graph.all_nodes()}
    try:
        _simplify(model)
    except RuntimeError as error:  # of folding, which finds nodes that torch has translated wrongly
        reason = f"torch cannot translate it to ONNX: {str(error).partition(chr(10))[0]}"
        raise _UntraceableError(what, reason, _place(error, model_on_meta)) from error
    _declare(model, inputs, outputs, numpy_dtype(dtype))
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            assert value.dtype is not None
            assert value.shape is not None
            value.const_value = ir.ExternalTensor("", None, None, value.dtype, shape=value.shape, name=name)
    problem = fault(ir.to_proto(model))
    if problem is not None:
        named = re.search(r"\bName: (\S+) OpType", problem)
        source = sources.get(named[1], {}) if named else {}
        operator = re.search(r"target=torch\.ops\.([\w.]+)", source.get("pkg.torch.onnx.fx_node", ""))
        subject = f"the translation of {operator[1]} by torch" if operator else "the translation"
        reason = f"{subject} is not a valid ONNX graph: {problem}"
        place = _place(ValueError(source.get("pkg.torch.onnx.stack_trace")), model_on_meta)
        raise _UntraceableError(what, reason, place)
    return model, outline.unfit


def _shapes(program: torch.export.ExportedProgram, tensors: Sequence[TensorSpec], names: Sequence[Any]) -> Traced:
    """Return tensors with the symbolic shapes of the first values of a program, given the names of the values."""
    nodes = {node.name: node for node in program.graph.nodes}
    return [(tensor, nodes[name].meta["val"].shape) for tensor, name in zip(tensors, names, strict=False)]


def _allowed_sizes(spec: ModelSpec, graph: Graph) -> dict[str, Size]:
    """Return the sizes of each named dimension at which the graph must be right."""
    length = Size(max=standard_fields(spec.config).max_seq_len)
    sizes = {name: Size() if name in graph.rows else length for name in graph.dim_names()}
    return sizes | {name: size for name, size in sizes_of(spec.graphs).items() if name in sizes}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, root cause last."""
    yield error
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _reason(error: BaseException) -> str:
    *_, first = _causes(error)
    lines = [line.strip() for line in str(first).splitlines() if line.strip()] or [type(first).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if any(phrase in text.lower() for phrase in _READS_VALUES):
        text = f"the code needs the values of a tensor, which are not known yet: {text}"
    if missing := _UNTRANSLATED.match(text):
        text = f"torch cannot translate {missing[1]} to ONNX: write it with other functions"
    for pattern, cause in _PROBABLE.items():
        if re.search(pattern, text):
            text = f"{cause}: {text}"
    if "[OptimizedModule]" in text:
        text = "a module is wrapped in torch.compile, which no function can contain"
    if isinstance(first, KeyError):
        text = f"KeyError: {text}"
    return re.sub(r"\b0x[0-9a-f]+", "0x...", text)  # addresses differ between runs, and the reason may be stored


def _place(error: BaseException, model: nn.Module) -> str | None:
    """Describe the innermost line of the model's own package in an error's tracebacks, and the module that runs it.

    Code that torch has traced already is not in the traceback, but named in the message or by the node at fault.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    folders = tuple(_own_code(model))
    owner: nn.Module | None = None
    line: tuple[str, int] | None = None

    def read(text: str | None) -> None:
        nonlocal line
        for file, number in re.findall(r'File "([^"]+)", line (\d+)', text or ""):
            line = (file, int(number)) if file.startswith(folders) else line

    for cause in _causes(error):
        for frame, number in walk_tb(cause.__traceback__):
            if frame.f_code.co_filename.startswith(folders):
                line = frame.f_code.co_filename, number
                candidate = frame.f_locals.get("self")
                owner = candidate if id(candidate) in paths else owner
            node = frame.f_locals.get("node")
            read(node.stack_trace if isinstance(node, torch.fx.Node) else None)
            read(node.metadata_props.get("pkg.torch.onnx.stack_trace") if isinstance(node, ir.Node) else None)
        read(str(cause))
    if line is None:
        return None
    code = getline(*line).strip()
    where = f"{Path(line[0]).name}:{line[1]}" + (f", `{code}`" if code else "")
    return where if owner is None else f"{paths[id(owner)] or 'the model'} ({type(owner).__name__}), {where}"


def _own_code(model: nn.Module) -> Iterator[str]:
    """Yield the folder of the top-level package of each class of module, or its file, except torch's and zoo's own."""
    for name in {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "zoo"}:
        package = sys.modules[name]
        if hasattr(package, "__path__"):
            yield from (f"{folder}/" for folder in package.__path__)
        elif file := getattr(package, "__file__", None):
            yield file


def _take_names(model: ir.Model, stored: Mapping[str, str]) -> None:
    """Give initialisers their stored names and remove their values, which are fake.

    Tensors that are not stored are literals in the model's code: their values are real, and become constants.
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
    """Fold constants that do not depend on weights, and remove unused and duplicate nodes."""
    simplify(model)
    for step in (passes.RemoveUnusedFunctionsPass(), passes.RemoveUnusedOpsetsPass()):
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


def _declare(
    model: ir.Model, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], real: np.dtype[Any]
) -> None:
    """Set the declared names, dimensions and types of inputs and outputs; ``real`` is the floating-point type."""
    for values, tensors in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        if len(set(values)) != len(tensors):
            raise ParityError(f"{len(tensors)} tensors are declared, but {len(values)} were traced")
        for value, tensor in zip(values, tensors, strict=True):
            value.name = tensor.name
            value.shape = ir.Shape(tensor.dims)
            value.type = ir.TensorType(ir.DataType.from_numpy(dtype_of(tensor, real)))
            value.metadata_props.clear()


def _describe(model: ir.Model, spec: ModelSpec, graph: Graph, dtype: str, opset: int) -> None:
    """Set the metadata: the model, the tools, and the inputs and outputs."""
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
    """Pause the garbage collector, which takes a sixth of the time: tracing creates millions of long-lived objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
