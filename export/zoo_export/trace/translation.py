"""Translations of torch's functions to ONNX where torch has none, or one that is wrong or slow."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry

from zoo_export.graph.metadata import EXACT_KEY
from zoo_export.trace.sinks import SINK_TRANSLATIONS

__all__ = ["TRANSLATIONS", "prepare", "reused_registry"]

_op: Any = op  # the stubs' types are too strict to compose operators


def prepare(program: torch.export.ExportedProgram) -> None:
    """Rewrite the parts of a program that torch or ONNX Runtime would get wrong."""
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _floor_negative(part.graph)
            _widen_masks(part.graph)
            _scale_queries(part.graph)


@contextmanager
def reused_registry() -> Iterator[None]:
    """Let torch.onnx reuse its registry of translations.

    It would otherwise parse the source of every translation again for each graph, a fifth of the time of a trace.
    """
    setattr(ONNXRegistry, "from_torchlib", staticmethod(_registry))  # noqa: B010 - mypy rejects an assignment
    try:
        yield
    finally:
        setattr(ONNXRegistry, "from_torchlib", _FROM_TORCHLIB)  # noqa: B010


def _registry(opset_version: int) -> ONNXRegistry:
    registry = copy.copy(_torchlib(opset_version))
    registry.functions = {name: [*translations] for name, translations in registry.functions.items()}
    return registry


@cache
def _torchlib(opset_version: int) -> ONNXRegistry:
    setattr(TracedOnnxFunction, "function_ir", property(_Parsed))  # noqa: B010
    try:
        return _FROM_TORCHLIB(opset_version=opset_version)
    finally:
        setattr(TracedOnnxFunction, "function_ir", _FUNCTION_IR)  # noqa: B010


class _Parsed:
    """A translation's ``function_ir``, of which the registry reads the domain alone: its source is parsed for more."""

    def __init__(self, function: TracedOnnxFunction) -> None:
        self._function = function
        self.domain = function.opset.domain

    def __getattr__(self, name: str) -> Any:
        return getattr(_FUNCTION_IR.__get__(self._function), name)


_FROM_TORCHLIB = ONNXRegistry.from_torchlib
_FUNCTION_IR = TracedOnnxFunction.function_ir


def _floor_negative(graph: torch.fx.Graph) -> None:
    """Make negative quotients of sizes exact, as in ``-(-length // 3)``.

    torch translates ``//`` to the operator Div, which rounds towards 0, unlike Python.
    """
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        quotient = node.meta["val"]
        if isinstance(quotient, torch.SymInt) and quotient.node.shape_env.bound_sympy(quotient.node.expr).lower < 0:
            dividend, divisor = node.args
            number, unit = (item.meta["val"] if isinstance(item, torch.fx.Node) else item for item in node.args)
            with graph.inserting_before(node):
                rest = graph.call_function(operator.mod, (dividend, divisor))
                multiple = graph.call_function(operator.sub, (dividend, rest))
            rest.meta["val"], multiple.meta["val"] = number % unit, number - number % unit
            node.args = (multiple, divisor)


def _widen_masks(graph: torch.fx.Graph) -> None:
    """Expand attention masks with one row for all queries, (..., 1, S), to (..., T, S).

    ONNX Runtime does not broadcast them.
    """
    kinds: tuple[Any, ...] = (torch.ops.aten.scaled_dot_product_attention.default, *SINK_TRANSLATIONS)
    for node in (node for kind in kinds for node in graph.find_nodes(op="call_function", target=kind)):
        query, mask = node.args[0], node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        if mask is not None and mask.meta["val"].shape[-2] == 1:
            queries, batch = query.meta["val"].shape[-2], [-1] * (mask.meta["val"].dim() - 2)
            with graph.inserting_before(node):
                length = graph.call_function(torch.ops.aten.sym_size.int, (query, -2))
                wide = graph.call_function(torch.ops.aten.expand.default, (mask, [*batch, length, -1]))
            length.meta["val"], wide.meta["val"] = queries, mask.meta["val"].expand(*batch, queries, -1)
            node.replace_input_with(mask, wide)


def _scale_queries(graph: torch.fx.Graph) -> None:
    """Multiply the queries by a scale of attention that is negative or 0, which ONNX Runtime refuses."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default):
        scale = node.kwargs.get("scale")
        if isinstance(scale, int | float) and scale <= 0:
            query = node.args[0]
            with graph.inserting_before(node):
                scaled = graph.call_function(torch.ops.aten.mul.Tensor, (query, scale))
            scaled.meta["val"] = query.meta["val"] * scale
            node.args = (scaled, *node.args[1:])
            node.kwargs = {**node.kwargs, "scale": 1.0}


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Translate a dense layer to Reshape, Gemm, Reshape, with the weight as torch stores it, (outputs, inputs).

    torch's own translation transposes the weight, which runtimes fold into a private copy.
    """
    outputs, inputs = (int(size) for size in weight.shape)
    rows = _op.Reshape(x, _op.Constant(value_ints=[-1, inputs]))
    product = _op.Gemm(rows, weight, transB=1) if bias is None else _op.Gemm(rows, weight, bias, transB=1)
    shape = _op.Concat(_op.Shape(x, start=0, end=-1), _op.Constant(value_ints=[outputs]), axis=0)
    return _op.Reshape(product, shape)


def _adaptive_avg_pool1d(x: Any, output_size: Sequence[int]) -> Any:
    """Translate the means of N overlapping parts of (B, C, T) to a product with a matrix of weights, (T, N).

    torch's own translation is one for the traced length.
    """
    (parts,) = output_size
    length = _op.Shape(x, start=-1)
    first = _op.Constant(value_ints=range(parts))
    after = _op.Constant(value_ints=range(1, parts + 1))
    count = _op.Constant(value_int=parts)
    starts = _op.Div(_op.Mul(first, length), count)  # (N,)
    ends = _op.Div(_op.Add(_op.Mul(after, length), _op.Constant(value_int=parts - 1)), count)
    places = _op.Range(_op.Constant(value_int=0), _op.Squeeze(length), _op.Constant(value_int=1))
    places = _op.Unsqueeze(places, _op.Constant(value_ints=[1]))  # (T, 1)
    inside = _op.And(_op.GreaterOrEqual(places, starts), _op.Less(places, ends))  # (T, N)
    return _op.MatMul(x, _op.Div(_op.CastLike(inside, x), _op.CastLike(_op.Sub(ends, starts), x)))


def _group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """Translate the norm of groups of channels, (B, C, ...), with a variance of differences from the mean.

    InstanceNormalization, to which torch's own translation leads, loses digits where the mean is large.
    """
    groups = _op.Reshape(x, _op.Constant(value_ints=[0, num_groups, -1]))
    axis = _op.Constant(value_ints=[-1])
    centred = _op.Sub(groups, _op.ReduceMean(groups, axis))
    variance = _op.ReduceMean(_op.Mul(centred, centred), axis)
    normed = _op.Div(centred, _op.Sqrt(_op.Add(variance, _scalar_tensor(eps, x.dtype))))
    result = _op.Reshape(normed, _op.Shape(x))
    shape = _op.Constant(value_ints=[-1, *[1] * (len(x.shape) - 2)])
    result = result if weight is None else _op.Mul(result, _op.Reshape(weight, shape))
    return result if bias is None else _op.Add(result, _op.Reshape(bias, shape))


def _round(x: Any, digits: int | None = None) -> Any:
    """Translate Python's rounding of a size to the nearest integer, halves to the even one."""
    if digits is not None:
        raise NotImplementedError("sizes can be rounded to integers only")
    return _op.Cast(_op.Round(x), to=ir.DataType.INT64)


def _scalar_tensor(s: Any, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """Translate a number to a constant of the given dtype.

    torch's own translation rounds it to float32 first, even in float64 graphs.
    """
    kind = ir.DataType(dtype)
    if not isinstance(s, (bool, int, float)):
        return _op.Cast(s, to=kind)
    constant = _op.Constant(value=ir.tensor(s, dtype=kind))
    if kind in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        constant.producer().metadata_props[EXACT_KEY] = repr(float(s))
    return constant


TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    round: _round,
    torch.ops.aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
    torch.ops.aten.group_norm.default: _group_norm,
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.scalar_tensor.default: _scalar_tensor,
    **SINK_TRANSLATIONS,
}
"""Translations that replace torch's own, and those of zoo's operators but experts."""
