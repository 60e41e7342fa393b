"""Tracing of recurrent layers as single operators, since torch.export would unroll them for a fixed length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.nn import run_packed

__all__ = ["RecurrentLayers"]

_LAYERS: Mapping[Any, tuple[str, Sequence[int], Mapping[str, int]]] = {
    torch.gru: ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    torch.lstm: ("LSTM", (0, 3, 1, 2), {}),
    torch.rnn_tanh: ("RNN", (0,), {}),
}
"""ONNX operator of each function, the indices of torch's gates in the operator's order, and attributes."""


class RecurrentLayers(TorchFunctionMode):
    """Mode in which ``nn.GRU``, ``nn.LSTM`` and ``nn.RNN`` (tanh) are traced as ONNX operators.

    :func:`zoo.nn.run_packed` is traced as well, with lengths. Packed sequences and state projections, which the
    operators do not support, are left to torch.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is run_packed:
            return _run_packed(*args)
        if function in _LAYERS and not kwargs and isinstance(args[2], list | tuple):
            _, _, weights, biased, num_layers, *_, bidirectional, _ = args
            if len(weights) == num_layers * (2 if bidirectional else 1) * (4 if biased else 2):
                return _translate(*_LAYERS[function], *args)
        return function(*args, **(kwargs or {}))


def _run_packed(layer: nn.RNNBase, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
    """Run a layer as an operator, with ``lengths`` steps for each row."""
    is_lstm = isinstance(layer, nn.LSTM)
    ways = 2 if layer.bidirectional else 1
    state = x.new_zeros(layer.num_layers * ways, x.shape[0], layer.hidden_size)
    steps, *last = _translate(
        *_LAYERS[torch.lstm if is_lstm else torch.gru],
        x,
        (state, state) if is_lstm else state,
        [weight for part in layer.all_weights for weight in part],
        layer.bias,
        layer.num_layers,
        layer.dropout,
        layer.training,
        layer.bidirectional,
        layer.batch_first,
        lengths.to(torch.int32),
    )
    return steps, tuple(last) if is_lstm else last[0]


def _translate(
    operator: str,
    gates: Sequence[int],
    attributes: Mapping[str, int],
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Translate a call of a recurrent function; return the outputs of all steps and the last states.

    T steps, B batch, D directions, E hidden size.
    """
    states = [state] if isinstance(state, Tensor) else list(state)  # each (layers * D, B, E)
    ways = 2 if bidirectional else 1
    each = 4 if biased else 2  # tensors of a direction in a layer
    x = x.transpose(0, 1) if batch_first else x  # (T, B, inputs)
    last = []
    for layer in range(num_layers):
        first = layer * ways
        by_direction = [weights[way * each : (way + 1) * each] for way in range(first, first + ways)]
        # For each direction, weights for inputs and states, (gates * E, inputs or E), and two biases, (gates * E,).
        inputs, recurrent, *biases = (
            torch.stack([_reorder(w, gates) for w in ws]) for ws in zip(*by_direction, strict=True)
        )
        begin = [item[first : first + ways] for item in states]
        steps, *end = torch.onnx.ops.symbolic_multi_out(
            operator,
            [x, inputs, recurrent, torch.cat(biases, 1) if biased else None, lengths, *begin],
            {
                "hidden_size": int(recurrent.shape[2]),
                "direction": "bidirectional" if bidirectional else "forward",
                **attributes,
            },
            dtypes=[x.dtype] * (1 + len(begin)),
            shapes=[(x.shape[0], *begin[0].shape[:2], begin[0].shape[2]), *(item.shape for item in begin)],
        )
        x = steps.transpose(1, 2).flatten(2)  # (T, D, B, E) -> (T, B, D * E)
        last.append(end)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(ends) for ends in zip(*last, strict=True)))


def _reorder(weight: Tensor, gates: Sequence[int]) -> Tensor:
    """Reorder the gates of a weight or bias, (gates * E, ...)."""
    parts = weight.chunk(len(gates))
    return torch.cat([parts[gate] for gate in gates])
