"""Translation of mixtures of experts to a loop over the experts that at least one token has chosen.

An iteration copies the matrices of one expert out of their stacks and multiplies them by the tokens that chose it. A
step of decoding thus reads the matrices of k experts, and a prompt computes k experts for each token, in one graph of
standard operators. Measured on one core with ONNX Runtime 1.31, in milliseconds for one layer, with 64 experts of
512 x 1024, 8 for each token, and with 8 experts of 3584 x 1024, 2 for each token:

======================================================  =======  =========  =======  =========
form                                                    1 token  64 tokens  1 token  64 tokens
======================================================  =======  =========  =======  =========
this loop                                                   3.1         52     10.0         95
all experts, with a weight of 0 where not chosen           27.5        180     19.1        166
matrices gathered for each token, batched products          5.7        501     13.5        830
an ``If`` for each expert, with matrices of its own         4.1         56      4.7         59
``com.microsoft.MoE``                                       3.3         56      4.5         63
======================================================  =======  =========  =======  =========

The last two read the matrices in place, which is faster if they are large. ``MoE`` computes float32 and SwiGLU only on
the CPU, and needs the rows of gate and up interleaved in one stack. An ``If`` for each of 128 experts in each layer
makes a graph of many thousands of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from onnxscript import opset23 as op
from torch import Tensor
from torch.onnx._internal.exporter._torchlib.ops.hop import call_op
from torch.overrides import TorchFunctionMode

from zoo.config import Activation
from zoo.nn import mix_experts

__all__ = ["EXPERT_TRANSLATIONS", "ExpertMixtures"]

_op: Any = op  # the stubs' types are too strict to compose operators


class ExpertMixtures(TorchFunctionMode):
    """Mode in which :func:`zoo.nn.mix_experts` is traced as one operator, whose shapes do not depend on the routes."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is mix_experts:
            return _mix(*args)
        return function(*args, **(kwargs or {}))


@torch.library.custom_op("zoo::mix_experts", mutates_args=())
def _mix(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    biases: Sequence[Tensor],
    limit: float | None,
) -> Tensor:
    raise NotImplementedError("this operator is only traced")


@_mix.register_fake
def _shape(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _like(add: Callable[..., ir.Value], number: float, x: ir.Value) -> ir.Value:
    """Return a constant with the dtype of ``x``."""
    return add("CastLike", add("Constant", value_float=number), x)


_ACTIVATIONS: Mapping[Activation, Callable[[Callable[..., ir.Value], ir.Value], ir.Value]] = {
    "gelu": lambda add, x: add("Gelu", x),
    "gelu_tanh": lambda add, x: add("Gelu", x, approximate="tanh"),
    "gelu_sigmoid": lambda add, x: add("Mul", x, add("Sigmoid", add("Mul", x, _like(add, 1.702, x)))),
    "relu": lambda add, x: add("Relu", x),
    "relu_squared": lambda add, x: add("Mul", *2 * [add("Relu", x)]),
    "silu": lambda add, x: add("Mul", x, add("Sigmoid", x)),
}


def _loop(
    x: Any, weights: Any, chosen: Any, gate: Any, up: Any, down: Any,
    activation: Activation, biases: Sequence[Any], limit: float | None,
) -> Any:  # fmt: skip
    """Add the outputs of one expert after another to the rows of the tokens that chose it, starting from zeros."""
    numbers, *_ = _op.Unique(_op.Reshape(chosen, _op.Constant(value_ints=[-1])), sorted=1)
    zeros = _op.Mul(x, _op.CastLike(_op.Constant(value_float=0.0), x))
    body = _body(x, weights, chosen, (gate, up, down), biases, numbers, activation, limit)
    return call_op("Loop", _op.Size(numbers), _op.Constant(value=ir.tensor(np.True_)), zeros, body=body)[0]


def _body(
    x: ir.Value, weights: ir.Value, chosen: ir.Value, stacks: Sequence[ir.Value], biases: Sequence[ir.Value],
    numbers: ir.Value, activation: Activation, limit: float | None,
) -> ir.Graph:  # fmt: skip
    """Return an iteration: its number, a condition and the sum so far (M, E) to the condition and the new sum."""
    boolean, integer = ir.TensorType(ir.DataType.BOOL), ir.TensorType(ir.DataType.INT64)
    step = ir.Value(name="mixed_step", shape=ir.Shape([]), type=integer)
    more = ir.Value(name="mixed_more", shape=ir.Shape([]), type=boolean)
    before = ir.Value(name="mixed_before", shape=x.shape, type=x.type)
    tape = Tape()

    def add(operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return tape.op(operator, inputs, attributes)

    def integers(*values: int) -> ir.Value:
        return add("Constant", value_ints=list(values))

    first, last = integers(0), integers(-1)
    number = add("Gather", numbers, step)
    hits = add("CastLike", add("Equal", chosen, number), weights)  # (M, k)
    rows = add("Squeeze", add("NonZero", add("ReduceMax", hits, last, keepdims=0)), first)  # those of N tokens
    shares = add("ReduceSum", add("Mul", hits, weights), last, keepdims=1)  # (M, 1)
    tokens = add("Gather", x, rows)  # (N, E)

    def product(rows: ir.Value, place: int) -> ir.Value:
        parts = [stack[place] for stack in (stacks, biases) if stack]  # the matrix, and its bias if there is one
        return add("Gemm", rows, *(add("Gather", stack, number) for stack in parts), transB=1)

    gates, ups = product(tokens, 0), product(tokens, 1)  # (N, F)
    if limit is not None:
        most, least = _like(add, limit, x), _like(add, -limit, x)
        gates, ups = add("Min", gates, most), add("Add", add("Clip", ups, least, most), _like(add, 1.0, x))
    outputs = product(add("Mul", _ACTIVATIONS[activation](add, gates), ups), 2)  # (N, E)
    outputs = add("Mul", outputs, add("Gather", shares, rows))
    # Not reduction="add", which ONNX Runtime has in float32 only.
    after = add("ScatterND", before, add("Unsqueeze", rows, last), add("Add", add("Gather", before, rows), outputs))
    go_on = add("Identity", more)
    for place, node in enumerate(tape.nodes):
        node.outputs[0].name = f"mixed_{place}"  # unlike any name outside
    go_on.type, go_on.shape = boolean, more.shape
    after.type, after.shape = x.type, x.shape
    return ir.Graph([step, more, before], [go_on, after], nodes=tape.nodes, name="expert")


EXPERT_TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.ops.zoo.mix_experts.default: _loop}
