"""Loops over steps become a Scan, whatever tensors the state and the results are."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.export.trace.test_blocks import WIDTH, traced, with_values
from zoo.contract import Graph, floats
from zoo.nn import scan_steps

GRAPH = Graph(
    inputs=(floats("x", "batch", "length", WIDTH),),
    outputs=(floats("steps", "batch", "length", WIDTH), floats("last", "batch", WIDTH)),
)


class Loop(nn.Module):
    """A loop over x with a state of ``WIDTH`` numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def next(self, state: Tensor, part: Tensor) -> Tensor:
        return torch.tanh(self.dense(state) + part)


class FirstStateIsView(Loop):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def step(state: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
            after = self.next(state, part)
            return after, after * 2

        last, steps = scan_steps(step, x[:, 0], x)
        return {"steps": steps, "last": last}


class StateIsResult(Loop):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def step(state: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
            after = self.next(state, part)
            return after, after

        last, steps = scan_steps(step, x.new_zeros(1, WIDTH).expand(x.shape[0], -1), x)
        return {"steps": steps, "last": last}


class StatesAreTransposedAndShared(Loop):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x[:, 0]

        def step(state: tuple[Tensor, ...], part: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            one, other = state
            after = self.next(one, part)
            return (after.t().contiguous().t(), other + part), part

        (one, other), steps = scan_steps(step, (first, first), x)
        return {"steps": steps, "last": one + other}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StateIsResult, FirstStateIsView, StatesAreTransposedAndShared])
def test_graph_of_a_loop_equals_it(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    session = ort.InferenceSession(with_values(traced(model, monkeypatch, GRAPH), model))
    for batch, length in ((1, 1), (3, 5), (2, 3)):
        x = torch.randn(batch, length, WIDTH)
        found = session.run(None, {"x": x.numpy()})
        assert_close(tuple(map(torch.from_numpy, found)), tuple(model(x).values()))
