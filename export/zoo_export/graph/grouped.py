"""Attention over a row's own tokens, by ONNX Runtime's operator GroupQueryAttention.

B rows, T new tokens, C capacity, H heads, K heads of keys and values, D size.

Standard operators of fixed sizes compute over the whole capacity of the caches. This operator writes new keys and
values into the buffers, and reads each row up to its length. It hides the tokens after each new one and nothing else,
so it replaces only attention whose mask does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from zoo_export.graph.file import dump
from zoo_export.graph.inference import Type, infer_types
from zoo_export.graph.rewriting import Tape, replace, replace_value
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.onnx_runtime.values import run_session
from zoo_runtime.serving.names import NEW_LENGTHS, PAST_LENGTHS

__all__ = ["CONTRIB", "group_attention"]

CONTRIB = "com.microsoft"
_HIDDEN = -1e9
"""A bias that hides a token."""


def group_attention(model: ir.Model) -> ir.Model:
    """Replace attention in a serving graph where the operator computes the same, in place."""
    types = infer_types(model)
    causal: dict[ir.Value, bool] = {}
    lengths: dict[ir.Value, ir.Value] = {}
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        caches = _caches(node)
        if caches is None or not _fits(node, types):
            continue
        mask = node.inputs[3]
        assert mask is not None
        if mask not in causal:
            causal[mask] = _is_causal(model, mask, types)
        if causal[mask]:
            _replace(node, caches, types, lengths)
    if lengths:
        model.graph.opset_imports[CONTRIB] = 1
        passes.RemoveUnusedNodesPass()(model)
    return model


def _caches(node: ir.Node) -> list[ir.Node] | None:
    """Return the nodes that write the keys and the values of an attention into buffers, if it alone reads these."""
    if len(node.inputs) != 4:
        return None
    makers = []
    for place in (1, 2):
        value = node.inputs[place]
        maker = None if value is None else value.producer()
        if value is None or maker is None or maker.op_type != "TensorScatter" or not value.is_graph_output():
            return None
        if tuple(value.uses()) != ((node, place),) or not maker.inputs[0].is_graph_input():  # type: ignore[union-attr]
            return None
        makers.append(maker)
    return makers if makers[0].inputs[2] is makers[1].inputs[2] else None


def _fits(node: ir.Node, types: Mapping[str, Type]) -> bool:
    """Whether an attention has one output, the attributes that the operator has, and one size of heads in float32."""
    (kind, queries), (_, keys), (_, values) = (_fixed(value, types) for value in node.inputs[:3])
    is_known = {"scale", "softcap", "is_causal", "qk_matmul_output_mode"} >= set(node.attributes)
    is_causal: int = node.attributes.get_int("is_causal", 0)
    if not is_known or is_causal or len(queries) != 4:
        return False
    return len(node.outputs) == 1 and kind == np.float32 and queries[-1] == keys[-1] == values[-1]


def _fixed(value: ir.Value | None, types: Mapping[str, Type]) -> tuple[Any, tuple[int, ...]]:
    """Return the element type and the shape of a value, whose sizes are fixed as all are in a serving graph."""
    assert value is not None
    return cast("tuple[Any, tuple[int, ...]]", types[str(value.name)])


def _is_causal(model: ir.Model, mask: ir.Value, types: Mapping[str, Type]) -> bool:
    """Whether a mask, (B, 1, T, C), hides exactly the tokens after each new one, for rows of every length.

    The mask is computed for every length of the past. It is not causal if it depends on more than lengths.
    """
    kind, (rows, heads, added, capacity) = _fixed(mask, types)
    if heads != 1:
        return False
    part = model.clone()
    output = next(value for node in part.graph for value in node.outputs if value.name == mask.name)
    output.type, output.shape = ir.TensorType(ir.DataType.from_numpy(kind)), ir.Shape((rows, heads, added, capacity))
    part.graph.outputs[:] = [output]
    passes.RemoveUnusedNodesPass()(part)
    for value in list(part.graph.inputs):
        if value.uses() and value.name not in (PAST_LENGTHS, NEW_LENGTHS):
            return False
        if not value.uses():
            part.graph.inputs.remove(value)
    if any(value.const_value is None for value in part.graph.initializers.values()):
        return False
    session = open_session(dump(part))
    names = [item.name for item in session.get_inputs()]
    places, pasts = np.arange(capacity), np.arange(capacity - added + 1)
    for new in {1, added}:
        for start in range(0, len(pasts), rows):
            past = np.resize(pasts[start : start + rows], rows)
            feeds = {PAST_LENGTHS: past, NEW_LENGTHS: np.full(rows, new)}
            (values,) = run_session(session, [str(mask.name)], {name: feeds[name] for name in names})
            seen = values[:, 0, :new] if kind == np.bool_ else values[:, 0, :new] == 0
            hidden = ~seen if kind == np.bool_ else values[:, 0, :new] < _HIDDEN
            visible = places <= (past[:, None] + np.arange(new))[..., None]
            if not (np.array_equal(seen, visible) and np.array_equal(hidden, ~visible)):
                return False
    return True


def _replace(
    node: ir.Node, caches: list[ir.Node], types: Mapping[str, Type], lengths: dict[ir.Value, ir.Value]
) -> None:
    """Replace an attention and the nodes that write its caches."""
    past, query = caches[0].inputs[2], node.inputs[0]
    assert past is not None
    rows, heads, added, size = _fixed(query, types)[1]
    _, shared, capacity, _ = _fixed(node.inputs[1], types)[1]
    if past not in lengths:
        begin = Tape(past.producer(), after=True)
        last = begin.op("Add", past, begin.integers(added - 1))
        lengths[past] = begin.op("Cast", last, to=ir.DataType.INT32)
    tape = Tape(node, after=False)

    def flat(value: ir.Value | None, count: int) -> ir.Value:
        assert value is not None
        turned = tape.op("Transpose", value, perm=[0, 2, 1, 3])  # (B, T, heads, D)
        return tape.op("Reshape", turned, tape.integers(rows, added, count * size))

    written = [cache.inputs[1] for cache in caches]
    buffers = [cache.inputs[0] for cache in caches]
    new = [flat(query, heads), *(flat(value, shared) for value in written)]
    total = tape.constant(np.array([capacity], np.int32))
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": shared}
    attributes |= {name: node.attributes.get_float(name) for name in ("scale", "softcap") if name in node.attributes}
    grouped = ir.node(
        "GroupQueryAttention",
        [*new, *buffers, lengths[past], total],
        attributes=attributes,
        domain=CONTRIB,
        num_outputs=3,
    )
    attended = tape.op("Reshape", tape.add(grouped), tape.integers(rows, added, heads, size))
    replace(node, tape.op("Transpose", attended, perm=[0, 2, 1, 3]))
    for cache, present in zip(caches, grouped.outputs[1:], strict=True):
        replace_value(cache.outputs[0], present)
        cache.graph.remove(cache, safe=True)  # type: ignore[union-attr]
