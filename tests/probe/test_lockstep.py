"""Evaluation of a model at several inputs at once."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.probe import lockstep
from zoo.probe.lockstep import copies, is_wide, run_together
from zoo.probe.widened import share_weights


class Stateful(nn.Module):
    """Keeps numbers of the running call in attributes, and calls its layers as often as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256, bias=False)
        self.register_buffer("scale", torch.full((), 0.5))
        self.rest: Tensor | None = None

    def forward(self, x: Tensor, times: int = 1) -> Tensor:  # (B, 256)
        for _ in range(times):
            self.rest = x * self.scale
            x = self.down(F.gelu(self.up(x))) + self.rest
        return x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    own, wide = Stateful(), Stateful()
    share_weights(wide, own, torch.float64)
    return wide


def inputs(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, 256, dtype=torch.float64, generator=generator) for count in rows]


def evaluated(model: nn.Module, x: Tensor, times: int = 1) -> Tensor:
    with torch.inference_mode():  # a mode of one thread
        result: Tensor = model(x, times)
    return result


def test_results_are_those_of_single_evaluations(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is multiplied once per step, by all rows; modules that keep a state in a call do not mix."""
    calls: list[int] = []

    def counted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(len(x))
        return product(x, *rest)

    product = lockstep.product
    monkeypatch.setattr(lockstep, "product", counted)
    rows, times = (1, 5, 2), (1, 3, 2)
    wanted = [evaluated(model, x, count) for x, count in zip(inputs(*rows), times, strict=True)]
    made = copies(model, 3)
    found = run_together(
        [partial(evaluated, one, x, count) for one, x, count in zip(made, inputs(*rows), times, strict=True)]
    )
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    assert calls == [8, 8, 7, 7, 5, 5]


def test_copies_share_weights_and_nothing_else(model: nn.Module) -> None:
    one, other = copies(model, 2)
    assert is_wide(one)
    assert not is_wide(nn.Linear(600, 600))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert one.state_dict(keep_vars=True)[name] is other.state_dict(keep_vars=True)[name] is tensor
    assert one.up is not other.up is not model.up


def test_errors_are_raised_when_all_have_ended(model: nn.Module) -> None:
    ended = []

    def fails() -> Tensor:
        evaluated(model, *inputs(1))
        raise ValueError("fails")

    def lasts() -> Tensor:
        result = evaluated(copy.copy(model), *inputs(2), times=3)
        ended.append(True)
        return result

    with pytest.raises(ValueError, match="fails"):
        run_together([fails, lasts])
    assert ended
