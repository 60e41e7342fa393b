"""The choice of a token from logits, as nodes of a graph.

Sampling inverts the cumulative distribution in float64: see :mod:`zoo_export.variants.loop.graph`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from zoo_export.graph.nodes import Nodes
from zoo_runtime.generation.loop import LARGEST_NOISE

__all__ = ["choose_token", "last_row"]


def last_row(op: Nodes, logits: ir.Value) -> ir.Value:
    """Return the logits of the last position as float32, (batch, vocabulary).

    If the logits come from a dense layer as the exporter writes it, compute the layer at the last position only: the
    unused logits of a prompt can cost more than a whole block.
    """
    last = op.constant(-1)
    source, product = _dense(logits)
    if product is None:
        row = op("Gather", logits, last, axis=1)
    else:
        row = op("Gemm", op("Gather", source, last, axis=1), *product.inputs[1:], **product.attributes)
    return op("Cast", row, to=ir.DataType.FLOAT)


def _dense(value: ir.Value) -> tuple[ir.Value | None, ir.Node | None]:
    """Return x and the Gemm if a value is Reshape(Gemm(Reshape(x, [-1, n]), ...), [*Shape(x)[:-1], m])."""

    def made_by(value: ir.Value | None, operator: str) -> Sequence[ir.Value | None]:
        node = value.producer() if value is not None else None
        return node.inputs if node is not None and (node.domain, node.op_type) == ("", operator) else (None, None)

    flat, shape = made_by(value, "Reshape")[:2]
    rows, *_ = made_by(flat, "Gemm")
    x, width = made_by(rows, "Reshape")[:2]
    sizes, *_ = made_by(shape, "Concat")
    same, *_ = made_by(sizes, "Shape")
    if flat is None or sizes is None or x is None or width is None or same is not x:
        return None, None
    constant = ir.convenience.get_const_tensor(width)
    product, leading = flat.producer(), sizes.producer()
    assert product is not None and leading is not None
    if constant is None or constant.size != 2 or constant.numpy()[0] != -1 or product.attributes.get_int("transA", 0):
        return None, None
    if (leading.attributes.get_int("start", 0), leading.attributes.get_int("end", 0)) != (0, -1):
        return None, None
    return x, product


def choose_token(
    op: Nodes, logits: ir.Value, step: ir.Value, done: ir.Value, settings: Mapping[str, ir.Value]
) -> ir.Value:
    """Choose the next token of each row, (batch,), from logits (batch, vocabulary).

    Args:
        op: creates the nodes.
        logits: those of the last position.
        step: the number of the new token.
        done: which rows have ended, (batch,).
        settings: the inputs ``temperature``, ``top_k`` and ``noise``.
    """
    temperature, top_k = settings["temperature"], settings["top_k"]
    greedy, sampled = op.inner(), op.inner()
    likeliest = greedy("ArgMax", logits, axis=1, keepdims=0)
    double, integer = ir.DataType.DOUBLE, ir.DataType.INT64
    exact = sampled("Cast", logits, to=double)
    last, one, zero = (sampled.constant([value]) for value in (-1, 1, 0))
    unlimited = sampled("Less", top_k, one)
    size = sampled("Where", unlimited, one, sampled("Min", top_k, sampled("Shape", exact, start=1, end=2)))
    best, _ = sampled.several("TopK", [exact, size], 2, axis=1, largest=1, sorted=1)
    likely = sampled("Or", unlimited, sampled("GreaterOrEqual", exact, sampled("Gather", best, last, axis=1)))
    below = sampled("Sub", exact, sampled("Gather", best, zero, axis=1))
    weights = sampled("Exp", sampled("Div", below, sampled("Cast", temperature, to=double)))
    weights = sampled("Where", likely, weights, sampled.constant(0, double))
    sums = sampled("CumSum", weights, sampled.constant(1))
    column = sampled("Gather", settings["noise"], sampled("Unsqueeze", step, zero), axis=1)
    bounds = sampled.constant(0, double), sampled.constant(LARGEST_NOISE, double)
    target = sampled("Clip", sampled("Cast", column, to=double), *bounds)
    target = sampled("Mul", target, sampled("Gather", sums, last, axis=1))
    passed = sampled("Cast", sampled("LessOrEqual", sums, target), to=integer)
    counted = sampled("ReduceSum", passed, one, keepdims=0)
    drawn = sampled("Reshape", counted, sampled("Shape", done))  # fails if noise has the wrong number of rows
    branches = {
        name: ir.Graph([], [value], nodes=nodes.nodes, name=name)
        for name, nodes, value in (("sampled", sampled, drawn), ("greedy", greedy, likeliest))
    }
    for value in (likeliest, drawn):
        value.type, value.shape = ir.TensorType(integer), ir.Shape(["batch"])
    sampling = op("Greater", temperature, op.constant(0, ir.DataType.FLOAT))
    return op("If", sampling, then_branch=branches["sampled"], else_branch=branches["greedy"])
