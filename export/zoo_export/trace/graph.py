"""Translation of a declared graph to ONNX, without weights.

Nodes keep the names of the modules that they were traced from. Everything machine-specific is removed, so the bytes
depend only on code and configuration.
"""

from __future__ import annotations

import ast
import gc
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.contract import Graph, Size, TensorSpec, sizes_of, standard_fields
from zoo.errors import ParityError
from zoo.models import create, persist
from zoo.models.tensors import tensor_groups
from zoo.probe.dtypes import dtype_of, numpy_dtype
from zoo.registry import ModelSpec
from zoo.version import __version__
from zoo_export.graph.inline import inline
from zoo_export.graph.metadata import BLOCK_KEY, EXACT_KEY, FLAT_KEY, MODULE_KEY, contract
from zoo_export.graph.rewriting import simplify
from zoo_export.graph.standard import fault
from zoo_export.trace.declared_sizes import Traced, check_outputs
from zoo_export.trace.examples import example_sizes, example_tensors, quiet, without_fake_cache
from zoo_export.trace.experts import EXPERT_TRANSLATIONS, ExpertMixtures
from zoo_export.trace.functions import cut_functions
from zoo_export.trace.guards import Branches
from zoo_export.trace.outline import Outline
from zoo_export.trace.reasons import UntraceableError, place_of, reason_of
from zoo_export.trace.recurrent import RecurrentLayers
from zoo_export.trace.sinks import AttentionSinks
from zoo_export.trace.small import check_small_sizes
from zoo_export.trace.translation import TRANSLATIONS, prepare, reused_registry

__all__ = ["trace_graph"]

IR_VERSION = 10


def trace_graph(spec: ModelSpec, graph: Graph, dtype: str, *, opset: int, functions: bool = True) -> ir.Model:
    """Translate one declared graph to ONNX without allocating weights.

    The initialisers of the graph have the names, shapes and dtypes of the stored tensors, but no location
    yet: see :func:`zoo_export.graph.links.link`.

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
        model, reason = _Trace(spec, graph, dtype, opset, blocks=not graph.recorded()).run()
    except UntraceableError as error:
        reason = error.reason
        model, _ = _Trace(spec, graph, dtype, opset, blocks=False).run()
    check_small_sizes(spec, graph, dtype, _allowed_sizes(spec, graph))
    if not functions:
        inline(model)
        ir.passes.Sequential(passes.CommonSubexpressionEliminationPass(), passes.RemoveUnusedOpsetsPass())(model)
    _describe(model, spec, graph, dtype, opset)
    if functions and reason is not None:
        model.metadata_props[FLAT_KEY] = reason
    return model


class _Trace:
    """An attempt to trace one graph.

    Args:
        spec: the model.
        graph: the graph.
        dtype: dtype of the weights.
        opset: opset version.
        blocks: whether to look for repeated modules.
    """

    def __init__(self, spec: ModelSpec, graph: Graph, dtype: str, opset: int, *, blocks: bool) -> None:
        self.spec = spec
        self.graph = graph
        self.dtype = dtype
        self.opset = opset
        self.blocks = blocks
        self.inputs = graph.input_tensors()
        self.outputs = graph.output_tensors()
        self.sizes = example_sizes(spec, graph)
        self.module = create.build_on_meta(spec, dtype)
        self.stored_names = {name: first for first, (_, names) in tensor_groups(self.module).items() for name in names}

    def run(self) -> tuple[ir.Model, str | None]:
        """Return the graph, and the reason if repeated modules did not become functions.

        Raises:
            UntraceableError: the model cannot be traced or translated.
            ParityError: the trace is wrong at a size that the model declares.
        """
        branches = Branches(self.spec.plugin.distribution)
        try:
            with quiet(), _without_collection(), torch.no_grad():
                outline = Outline(self.module, self.graph, self._examples("meta", self.inputs), blocks=self.blocks)
                program = self._program(outline, branches)
                model = self._translated(program)
                cut_functions(model, outline, _simplify)
        except MemoryError:
            raise
        except Exception as error:  # a plugin's model may raise any
            branches.explain(error, last=not self.blocks)
            raise self._failure(reason_of(error), place_of(error, self.module)) from error
        self._check_sizes(program, outline, branches)
        sources = {node.name: {**node.metadata_props} for node in model.graph.all_nodes()}
        try:
            _simplify(model)
        except RuntimeError as error:  # of folding, which finds nodes that torch has translated wrongly
            reason = f"torch cannot translate it to ONNX: {str(error).partition(chr(10))[0]}"
            raise self._failure(reason, place_of(error, self.module)) from error
        _declare(model, self.inputs, self.outputs, numpy_dtype(self.dtype))
        _leave_unlinked(model)
        self._check_standard(model, sources)
        return model, outline.unfit

    def _examples(self, device: str, tensors: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
        return example_tensors(tensors, self.sizes, self.dtype, device)

    def _program(self, outline: Outline, branches: Branches) -> torch.export.ExportedProgram:
        """Trace the outlined graph on fake tensors, which take no memory."""
        tensors = [self.inputs[number] for number in outline.kept_inputs]
        free = torch.export.Dim.DYNAMIC
        dims = tuple({n: free for n, dim in enumerate(item.dims) if isinstance(dim, str)} for item in tensors)
        with outline.tracing() as module:
            groups = tensor_groups(self.module)
            with FakeTensorMode(allow_non_fake_inputs=True):
                weights = ((name, torch.empty_like(tensor, device="cpu")) for name, (tensor, _) in groups.items())
                persist.fill(self.module, weights)
                arguments = self._examples("cpu", tensors)
            with without_fake_cache(), RecurrentLayers(), ExpertMixtures(), AttentionSinks(), branches.recording():
                return torch.export.export(module.eval(), arguments, dynamic_shapes=(dims,), strict=False)

    def _translated(self, program: torch.export.ExportedProgram) -> ir.Model:
        """Translate a program to ONNX, with initialisers named as they are stored."""
        prepare(program)
        with reused_registry():
            translated = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=self.opset,
                custom_translation_table={**TRANSLATIONS, **EXPERT_TRANSLATIONS},
            )
        assert translated is not None
        _take_names(translated.model, self.stored_names)
        return translated.model

    def _check_sizes(self, program: torch.export.ExportedProgram, outline: Outline, branches: Branches) -> None:
        """Raise :class:`ParityError` if a decision or an output differs at a size that the model declares."""
        allowed = _allowed_sizes(self.spec, self.graph)
        signature = program.graph_signature
        inputs = _shapes(program, [self.inputs[number] for number in outline.kept_inputs], signature.user_inputs)
        branches.check(inputs, self.graph, allowed)
        returned = [self.outputs[number] for number in outline.kept_outputs]
        check_outputs(inputs, _shapes(program, returned, signature.user_outputs), self.graph, allowed)

    def _check_standard(self, model: ir.Model, sources: Mapping[str | None, Mapping[str, str]]) -> None:
        """Raise :class:`UntraceableError` for a graph that violates the ONNX standard.

        ``sources`` is the metadata of torch about each node, by its name.
        """
        problem = fault(ir.to_proto(model))
        if problem is None:
            return
        named = re.search(r"\bName: (\S+) OpType", problem)
        source = sources.get(named[1], {}) if named else {}
        operator = re.search(r"target=torch\.ops\.([\w.]+)", source.get("pkg.torch.onnx.fx_node", ""))
        subject = f"the translation of {operator[1]} by torch" if operator else "the translation"
        place = place_of(ValueError(source.get("pkg.torch.onnx.stack_trace")), self.module)
        raise self._failure(f"{subject} is not a valid ONNX graph: {problem}", place)

    def _failure(self, reason: str, place: str | None) -> UntraceableError:
        subject = f"{self.spec.plugin}: graph {self.graph.name!r} of {self.spec.name}"
        return UntraceableError(f"{subject} cannot be exported", reason, place)


def _leave_unlinked(model: ir.Model) -> None:
    """Let initialisers without values refer to external data that have no location yet."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            assert value.dtype is not None
            assert value.shape is not None
            value.const_value = ir.ExternalTensor("", None, None, value.dtype, shape=value.shape, name=name)


def _shapes(program: torch.export.ExportedProgram, tensors: Sequence[TensorSpec], names: Sequence[Any]) -> Traced:
    """Return tensors with the symbolic shapes of the first values of a program, given the names of the values."""
    nodes = {node.name: node for node in program.graph.nodes}
    return [(tensor, nodes[name].meta["val"].shape) for tensor, name in zip(tensors, names, strict=False)]


def _allowed_sizes(spec: ModelSpec, graph: Graph) -> dict[str, Size]:
    """Return the sizes of each named dimension at which the graph must be right."""
    length = Size(max=standard_fields(spec.config).max_seq_len)
    sizes = {name: Size() if name in graph.rows else length for name in graph.dim_names()}
    return sizes | {name: size for name, size in sizes_of(spec.graphs).items() if name in sizes}


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
    ir.passes.Sequential(passes.RemoveUnusedFunctionsPass(), passes.RemoveUnusedOpsetsPass())(model)
    for node in model.graph.all_nodes():
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        module = next((scope for scope in reversed(scopes[:-1]) if scope.startswith("model")), "")
        of_zoo = {key: node.metadata_props[key] for key in (BLOCK_KEY, EXACT_KEY) if key in node.metadata_props}
        node.metadata_props.clear()  # the others are torch's, with paths of this machine
        node.metadata_props.update(of_zoo)
        if module.removeprefix("model."):
            node.metadata_props[MODULE_KEY] = module.removeprefix("model").removeprefix(".")
        for value in node.outputs:
            value.shape = None
            value.type = None
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
    model.producer_name = "zoo"
    model.producer_version = __version__
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
