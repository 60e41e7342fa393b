"""Relative position buckets and biases against transformers' T5, and their properties."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from zoo.checkpoints import Exact
from zoo.nn import LinearBiases, RelativePositionBias, relative_buckets

FAR = torch.arange(-5000, 5001)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (16, 32), (8, 20), (33, 100), (64, 256), (4, 5), (12, 1000)]
)
def test_buckets_equal_transformers(num_buckets: int, max_distance: int, causal: bool) -> None:
    """For all distances, including powers of two, where the logarithm is an integer."""
    expected = T5Attention._relative_position_bucket(
        FAR, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    assert relative_buckets(FAR, num_buckets, max_distance, causal=causal).equal(expected)


@given(num_buckets=st.integers(4, 70), farther=st.integers(1, 400), causal=st.booleans())
def test_buckets_grow_with_the_distance(num_buckets: int, farther: int, causal: bool) -> None:
    """Bucket numbers increase with the distance without gaps, and are constant from the maximum on."""
    max_distance = num_buckets // 2 + farther
    found = relative_buckets(FAR, num_buckets, max_distance, causal=causal)
    before, after = found[:5001].flip(0), found[5000:]
    sides = [(before, 0)] if causal else [(before, 0), (after[1:], num_buckets // 2)]
    for side, first in sides:
        assert (side.diff() >= 0).all()
        assert side[0] == first + (1 if first else 0)
        assert side[max_distance:].unique().tolist() == [first + (num_buckets if causal else num_buckets // 2) - 1]
    if causal:
        assert after.unique().tolist() == [0]


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "causal"), [(3, 128, False), (1, 128, True), (32, 8, False), (32, 16, True)]
)
def test_invalid_bucket_numbers_are_rejected(num_buckets: int, max_distance: int, causal: bool) -> None:
    """Too few buckets, or no distances left for the logarithmic ones."""
    message = f"{num_buckets} relative buckets do not fit a maximum distance of {max_distance}"
    with pytest.raises(ValueError, match=message):
        relative_buckets(FAR, num_buckets, max_distance, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_bias_equals_transformers(causal: bool) -> None:
    """With the same table, for whole texts and for tokens after a past."""
    config = T5Config(
        d_model=12, d_kv=4, num_heads=3, relative_attention_num_buckets=10, relative_attention_max_distance=17,
        is_decoder=causal,
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativePositionBias(3, num_buckets=10, max_distance=17, causal=causal)
    ours.table.load_state_dict(theirs.relative_attention_bias.state_dict())
    for length, past in ((1, 0), (40, 0), (1, 30), (5, 21)):
        expected = theirs.compute_bias(length, length + past, past_seen_tokens=past)
        assert_close(ours(length, length + past), expected, atol=0, rtol=0)


@given(length=st.integers(1, 12), past=st.integers(0, 30), causal=st.booleans())
def test_bias_depends_only_on_distance(length: int, past: int, causal: bool) -> None:
    """The bias is constant along diagonals, and the last queries have the last rows."""
    bias = RelativePositionBias(2, num_buckets=8, max_distance=9, causal=causal)
    whole = bias(length + past, length + past)
    assert whole.shape == (1, 2, length + past, length + past)
    assert whole[..., 1:, 1:].equal(whole[..., :-1, :-1])
    assert bias(length, length + past).equal(whole[:, :, past:])


def test_bias_is_learned() -> None:
    """A bucket's gradient is the number of pairs in it."""
    bias = RelativePositionBias(1, num_buckets=4, max_distance=3)
    nn.init.zeros_(bias.table.weight)
    bias(3, 3).sum().backward()
    assert bias.table.weight.grad is not None
    assert bias.table.weight.grad.flatten().tolist() == [3, 3, 0, 3]


@pytest.mark.parametrize("heads", [*range(1, 18), 32, 40, 64, 71, 112])
def test_linear_biases_equal_those_of_bloom_and_mpt(heads: int) -> None:
    """For any number of heads; BLOOM counts positions from the first key, MPT from the last, as zoo does."""
    x = torch.zeros(1, dtype=torch.float64)
    ours = LinearBiases(heads)(19, x)
    assert ours.shape == (1, heads, 1, 19)
    for exact, tolerance in ((False, 1e-5), (True, 1e-13)):  # both compute in float32 outside of the mode
        with Exact(nn.Identity()) if exact else nullcontext():
            bloom = build_alibi_tensor(torch.ones(1, 19), heads, torch.float64).view(1, heads, 1, 19)
            mpt = build_mpt_alibi_tensor(heads, 19)[None].double()
        assert_close(ours, bloom - bloom[..., -1:], rtol=0, atol=tolerance)
        assert_close(ours, mpt, rtol=0, atol=tolerance)


def test_linear_biases_of_eight_heads_equal_the_paper() -> None:
    """Press et al. 2022, section 3: slopes 1/2 to 1/256; scores fall with the distance of a key."""
    biases = LinearBiases(8)
    assert biases.slopes == tuple(2.0**-n for n in range(1, 9))
    assert biases(4, torch.zeros(1))[0, 1, 0].tolist() == [-0.75, -0.5, -0.25, 0.0]
    assert not biases.state_dict()


def test_linear_biases_in_narrow_types_are_rounded_once() -> None:
    """Positions beyond 256 are no bfloat16 numbers; the product is rounded, not its factors."""
    wide, narrow = (LinearBiases(5)(600, torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.dtype == torch.bfloat16
    assert narrow.equal(wide.bfloat16())
