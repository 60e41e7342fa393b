"""The layers of Mamba-2, against the recurrence step by step and torch's own convolution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from tests.nn.recurrences import assert_parts_equal_the_whole, random
from zoo.nn import GatedRMSNorm, segment_sums, state_space

HEADS, GROUPS, SIZE, STATE = 6, 2, 4, 3


def inputs(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    return {
        "x": random(rows, length, HEADS, SIZE, seed=seed),
        "decay": -3 * random(rows, length, HEADS, seed=seed + 1).square(),
        "key": random(rows, length, GROUPS, STATE, seed=seed + 2),
        "query": random(rows, length, GROUPS, STATE, seed=seed + 3),
        "state": random(rows, HEADS, STATE, SIZE, seed=seed + 4),
    }


def step_by_step(x: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 1 of the paper, for each head with the key and query of its group."""
    results = []
    for t in range(x.shape[1]):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            kept = decay[:, t, head].exp()[:, None, None] * state[:, head]
            heads.append(kept + torch.einsum("bp,bn->bnp", x[:, t, head], key[:, t, group]))
        state = torch.stack(heads, 1)
        read = query[:, t].repeat_interleave(HEADS // GROUPS, 1)
        results.append(torch.einsum("bhnp,bhn->bhp", state, read))
    return torch.stack(results, 1), state


@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 65, 100])
def test_chunks_equal_the_recurrence(length: int) -> None:
    given_ = inputs(2, length)
    for ours, theirs in zip(state_space(**given_), step_by_step(**given_), strict=True):
        assert_close(ours, theirs)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 80), data=st.data())
def test_a_text_may_be_cut_anywhere(length: int, data: st.DataObject) -> None:
    whole = inputs(2, length, seed=data.draw(st.integers(0, 9)))
    assert_parts_equal_the_whole(state_space, whole, data.draw(st.integers(1, length - 1)))


def test_long_decays_do_not_lose_short_ones() -> None:
    """In float32, tokens after a long text depend on each other as they do at the beginning."""
    given_ = {name: value.float() for name, value in inputs(1, 16 * 40, seed=2).items()}
    given_["decay"] = -torch.full_like(given_["decay"], 0.3)
    exact = step_by_step(**{name: value.double() for name, value in given_.items()})[0]
    error = (state_space(**given_)[0] - exact).abs().amax((0, 2, 3)) / exact.abs().max()
    assert error.max() < 2e-6


def test_state_is_zero_if_everything_is_forgotten() -> None:
    given_ = inputs(1, 20)
    given_["decay"] = torch.full_like(given_["decay"], -1e4)
    y, state = state_space(**given_)
    assert torch.isfinite(y).all()
    key = given_["key"][:, -1].repeat_interleave(HEADS // GROUPS, 1)
    assert_close(state, torch.einsum("bhp,bhn->bhnp", given_["x"][:, -1], key))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_segment_sums(values: list[float]) -> None:
    sums = segment_sums(torch.tensor(values, dtype=torch.float64))
    for t in range(len(values)):
        for s in range(len(values)):
            wanted = sum(values[s + 1 : t + 1]) if s <= t else float("-inf")
            assert sums[t, s].item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(groups: int) -> None:
    norm = GatedRMSNorm(12, num_groups=groups, eps=1e-3).double()
    nn.init.normal_(norm.weight)
    x, gate = random(2, 5, 12), random(2, 5, 12, seed=1)
    parts = (x * F.silu(gate)).chunk(groups, -1)
    wanted = torch.cat([F.rms_norm(part, part.shape[-1:], eps=1e-3) for part in parts], -1) * norm.weight
    assert_close(norm(x, gate), wanted)
