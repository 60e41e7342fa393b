"""Recurrent layers become one operator for any number of steps, with torch's results."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_export.trace.recurrent import RecurrentLayers

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:LSTM with projections")

INPUTS, WIDTH, ROWS, STEPS = 5, 6, 3, 7
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
SHAPES: list[dict[str, Any]] = [
    {"batch_first": True},
    {"bias": False, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]


class Flat(nn.Module):
    """A layer with each state as a separate tensor."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        steps, last = self.layer(x, states if isinstance(self.layer, nn.LSTM) else states[0])
        return steps, *(last if isinstance(last, tuple) else (last,))


def random(layer: nn.RNNBase) -> nn.RNNBase:
    """Draw weights large enough to distinguish the gates."""
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer.eval().requires_grad_(False)


def feeds(layer: nn.RNNBase, rows: int, steps: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(steps)
    x = torch.randn((rows, steps, INPUTS) if layer.batch_first else (steps, rows, INPUTS), generator=generator)
    size = (layer.num_layers * (1 + layer.bidirectional), rows, WIDTH)
    count = 2 if isinstance(layer, nn.LSTM) else 1
    return x, *(torch.randn(size, generator=generator).tanh() for _ in range(count))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[] if shape == SHAPES[1] else pytest.mark.slow) for shape in SHAPES], ids=str
)
def test_operator_equals_the_layer(kind: str, shape: dict[str, Any]) -> None:
    layer = random(KINDS[kind](INPUTS, WIDTH, **shape))
    examples = feeds(layer, ROWS, STEPS)
    rows, steps = (0, 1) if layer.batch_first else (1, 0)
    free = torch.export.Dim.DYNAMIC
    dynamic = ({rows: free, steps: free}, *({1: free} for _ in examples[1:]))
    with RecurrentLayers():
        program = torch.export.export(Flat(layer), examples, dynamic_shapes=(dynamic[0], dynamic[1:]), strict=False)
    translated = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False, opset_version=23)
    assert translated is not None
    graph = translated.model_proto
    assert [node.op_type for node in graph.graph.node if node.op_type in KINDS] == [kind] * layer.num_layers
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    for batch, length in ((1, 1), (ROWS, STEPS), (2, 12)):
        given = feeds(layer, batch, length)
        found = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
        for wanted, value in zip(Flat(layer)(*given), found, strict=True):
            assert_close(torch.from_numpy(value), wanted, rtol=1e-5, atol=1e-5)


def test_features_missing_in_operators_are_left_to_torch() -> None:
    projected = random(nn.LSTM(INPUTS, WIDTH, proj_size=2))
    relu = random(nn.RNN(INPUTS, WIDTH, nonlinearity="relu"))
    gru = random(nn.GRU(INPUTS, WIDTH))
    x = feeds(gru, ROWS, STEPS)[0]
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4, 2]))
    wanted = projected(x)[0], relu(x)[0], gru(packed)[0].data
    with RecurrentLayers():
        found = projected(x)[0], relu(x)[0], gru(packed)[0].data
        assert gru(x)[0].count_nonzero() == 0  # the operator does not exist
    assert_close(found, wanted)
