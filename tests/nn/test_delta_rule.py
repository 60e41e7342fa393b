"""Gated linear attention, against its equation step by step and against exact inverses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.nn.recurrences import assert_parts_equal_the_whole, random
from zoo.nn import GatedDeltaNet, GatedRMSNorm, LayerStates, MultiHeadAttention, delta_rule, invert_unit_triangular

HEADS, GROUPS, SIZE, KEY = 6, 2, 3, 5


def inputs(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    key = random(rows, length, GROUPS, KEY, seed=seed)
    return {
        "query": random(rows, length, GROUPS, KEY, seed=seed + 1),
        "key": key / key.norm(dim=-1, keepdim=True),
        "value": random(rows, length, HEADS, SIZE, seed=seed + 2),
        "decay": -random(rows, length, HEADS, seed=seed + 3).square(),
        "rate": random(rows, length, HEADS, seed=seed + 4).sigmoid(),
        "state": random(rows, HEADS, KEY, SIZE, seed=seed + 5),
    }


def step_by_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Equation 10 of the paper with explicit matrices, for each head with the query and key of its group."""
    results = []
    for t in range(key.shape[1]):
        q, k = (part[:, t].repeat_interleave(HEADS // GROUPS, 1) for part in (query, key))
        b = rate[:, t, :, None, None]
        kept = decay[:, t, :, None, None].exp() * (
            torch.eye(KEY, dtype=k.dtype) - b * torch.einsum("bhn,bhm->bhnm", k, k)
        )
        state = kept @ state + b * torch.einsum("bhn,bhp->bhnp", k, value[:, t])
        results.append(torch.einsum("bhnp,bhn->bhp", state, q))
    return torch.stack(results, 1), state


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 50])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_equal_the_recurrence(length: int, chunk: int) -> None:
    given_ = inputs(2, length)
    for ours, theirs in zip(delta_rule(**given_, chunk_size=chunk), step_by_step(**given_), strict=True):
        assert_close(ours, theirs)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(2, 60), data=st.data())
def test_a_text_may_be_cut_anywhere(length: int, data: st.DataObject) -> None:
    whole = inputs(2, length, seed=data.draw(st.integers(0, 9)))
    assert_parts_equal_the_whole(delta_rule, whole, data.draw(st.integers(1, length - 1)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 64])
def test_inverse_of_a_triangle(size: int) -> None:
    lower = random(2, size, size).tril(-1) * 0.3
    assert_close(invert_unit_triangular(lower), torch.linalg.inv(torch.eye(size, dtype=lower.dtype) + lower))


def test_repeated_keys_lose_no_precision() -> None:
    """With equal keys, a rate of 1 and no decay, powers of the triangle exceed 1e17; its inverse is small."""
    lower = torch.ones(64, 64)
    exact = torch.eye(64) - torch.eye(64).roll(1, 0).tril(-1)
    assert torch.equal(invert_unit_triangular(lower), exact)
    values = inputs(1, 65)
    values |= {
        "key": values["key"][:, :1].expand(-1, 65, -1, -1),
        "rate": torch.ones(1, 65, HEADS, dtype=torch.float64),
        "decay": torch.zeros(1, 65, HEADS, dtype=torch.float64),
    }
    single = delta_rule(**{name: value.float() for name, value in values.items()}, chunk_size=64)
    for ours, theirs in zip(single, step_by_step(**values), strict=True):
        assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def layer(**options: int) -> GatedDeltaNet:
    torch.manual_seed(0)
    sizes = {"head_dim": 4, "num_key_heads": 2, "key_head_dim": 5, "kernel_size": 3, "chunk_size": 4}
    return GatedDeltaNet(8, 4, **{**sizes, **options}).eval().requires_grad_(False)


def test_half_precision_computes_the_recurrence_in_float32() -> None:
    """Over 200 tokens, the error is that of the dense layers alone."""
    ours, x = layer(), random(1, 200, 8).float()
    half = layer().bfloat16()
    ours.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    x = x.bfloat16().float()
    error = (half(x.bfloat16()).float() - ours(x)).abs().max(1).values
    assert error.max() < 0.05 * ours(x).abs().max()


def test_states_have_a_fixed_size() -> None:
    states = LayerStates()
    layer()(random(2, 9, 8).float(), states=states)
    assert {name: tuple(value.shape) for name, value in states.items()} == {
        "convolution": (2, 36, 2), "recurrence": (2, 4, 5, 4),
    }  # fmt: skip


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_key_heads 3"):
        layer(num_key_heads=3)


def test_norm_before_the_gate() -> None:
    norm = GatedRMSNorm(4, eps=1e-3, gate_first=False).double().requires_grad_(False)
    norm.weight.copy_(random(4))
    x, gate = random(2, 3, 4), random(2, 3, 4, seed=1)
    expected = torch.nn.functional.rms_norm(x, (4,), norm.weight, 1e-3) * torch.nn.functional.silu(gate)
    assert_close(norm(x, gate), expected)


def test_output_gate_of_attention() -> None:
    torch.manual_seed(0)
    gated = MultiHeadAttention(8, 2, head_dim=3, bias=False, output_gate=True).requires_grad_(False)
    x = torch.randn(2, 5, 8)
    open_ = MultiHeadAttention(8, 2, head_dim=3, bias=False).requires_grad_(False)
    open_.load_state_dict({name: value for name, value in gated.state_dict().items() if not name.startswith("gate")})
    heads: list[Tensor] = []
    open_.output.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    open_(x)
    assert_close(gated(x), gated.output(heads[0] * torch.sigmoid(gated.gate(x))))
