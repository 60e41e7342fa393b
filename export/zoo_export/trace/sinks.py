"""Translation of attention with sinks to ``Attention`` and a factor.

A sink is a key whose value is zero, so it only divides the result of attention to the other keys: with the scores s_j
of these and the score z of the sink, by 1 + e^z / sum_j e^s_j. ``Attention`` returns the scores beside its result. Its
keys and values are those of the cache, as without sinks, so that graphs with caches in place can be made. Measured on
one core with ONNX Runtime 1.31, in milliseconds of one layer with 16 heads of 64, 4 of keys and values:

=============================================  ==============================  ========================
form                                           2 rows of 1 token, 4096 keys    512 tokens, 1024 keys
=============================================  ==============================  ========================
no sink                                                                   4.0                        45
this factor                                                               4.2                        71
a further key, joined with those of the cache                             6.7                        59
=============================================  ==============================  ========================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from onnxscript import opset23 as op
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.nn import attend_to_sink

__all__ = ["SINK_TRANSLATIONS", "AttentionSinks"]

_op: Any = op  # the stubs' types are too strict to compose operators
_MASKED = 2
"""The mode of ``Attention`` that returns scores to which the mask is applied."""


class AttentionSinks(TorchFunctionMode):
    """Mode in which :func:`zoo.nn.attend_to_sink` is traced as one operator."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is attend_to_sink:
            return _attend(*args)
        return function(*args, **(kwargs or {}))


@torch.library.custom_op("zoo::attend_to_sink", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor, scale: float | None
) -> Tensor:
    raise NotImplementedError("this operator is only traced")


@_attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _attention(query: Any, key: Any, value: Any, mask: Any, sink: Any, scale: float | None) -> Any:
    attributes = {} if scale is None else {"scale": scale}
    result, _, _, scores = _op.Attention(query, key, value, mask, qk_matmul_output_mode=_MASKED, **attributes)
    axis = _op.Constant(value_ints=[-1])
    score = _op.Unsqueeze(sink, _op.Constant(value_ints=[0, 2, 3]))  # (1, H, 1, 1)
    largest = _op.Max(_op.ReduceMax(scores, axis), score)  # (B, H, T, 1)
    total = _op.ReduceSum(_op.Exp(_op.Sub(scores, largest)), axis)
    return _op.Mul(result, _op.Div(total, _op.Add(total, _op.Exp(_op.Sub(score, largest)))))


SINK_TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.ops.zoo.attend_to_sink.default: _attention}
