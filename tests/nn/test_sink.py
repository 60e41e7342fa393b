"""Attention sinks, against transformers' gpt-oss and against the equation in numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from zoo.nn import (
    LayerCache,
    MultiHeadAttention,
    add_sink,
    attend_to_sink,
    attention_weights,
    build_mask,
    recorded_scores,
    scaled_dot_product_attention,
)

HEADS, SHARED, SIZE = 4, 2, 6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(queries: int = 5, keys: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and sinks."""
    key, value = normal(3, SHARED, keys, SIZE, seed=1), normal(3, SHARED, keys, SIZE, seed=2)
    return normal(3, HEADS, queries, SIZE), key, value, 2 * normal(HEADS, seed=3)


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One query of one head at a time: the weights of its keys are e^s_j / (e^z + sum_k e^s_k)."""
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, t in np.ndindex(*query.shape[:3]):
        group, visible = h * key.shape[1] // query.shape[1], np.flatnonzero(seen[b, 0, t])
        scores = np.exp(key[b, group, visible].numpy() @ query[b, h, t].numpy() * scale)
        out[b, h, t] = scores @ value[b, group, visible].numpy() / (np.exp(sink[h].item()) + scores.sum())
    return torch.from_numpy(out)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("form", ["boolean", "real", "none"])
def test_result_equals_transformers_and_the_equation(form: str, scale: float | None) -> None:
    query, key, value, sink = drawn()
    seen = build_mask(5, 7, padding=torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [1] * 7]), causal=form != "none")
    assert seen is not None
    seen = seen if form != "none" else torch.ones(3, 1, 5, 7, dtype=torch.bool)
    real = torch.zeros(()).double().masked_fill(~seen, -torch.inf)
    mask = {"boolean": seen, "real": real, "none": None}[form]
    found = attend_to_sink(query, key, value, mask, sink, scale)
    scale = SIZE**-0.5 if scale is None else scale
    assert_close(found, by_hand(query, key, value, seen, sink, scale))
    module: Any = SimpleNamespace(sinks=sink, num_key_value_groups=HEADS // SHARED, training=False)
    theirs, weights = eager_attention_forward(module, query, key, value, real, scale)
    assert_close(found, theirs.transpose(1, 2))
    with recorded_scores() as scores:
        again = scaled_dot_product_attention(query, key, value, mask=seen, sink=sink, scale=scale)
    assert_close(again, found)
    assert_close(scores[0].weights[..., 1:], weights)
    assert_close(scores[0].weights.sum(-1), torch.ones(3, HEADS, 5).double())


def test_a_query_without_keys_gives_zero() -> None:
    """All weight is that of the sink."""
    query, key, value, sink = drawn()
    mask = torch.zeros(3, 1, 5, 7, dtype=torch.bool)
    assert not attend_to_sink(query, key, value, mask, sink).any()
    with recorded_scores() as scores:
        scaled_dot_product_attention(query, key, value, mask=mask, sink=sink)
    assert torch.equal(scores[0].weights[..., 0], torch.ones(3, HEADS, 5).double())


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_extreme_scores_are_finite(score: float) -> None:
    query, key, value, _ = drawn()
    found = attend_to_sink(query, key, value, None, torch.full((HEADS,), score).double())
    plain = scaled_dot_product_attention(query, key, value)
    assert_close(found, plain if score < 0 else torch.zeros_like(plain))


def test_recorded_scores_give_the_weights() -> None:
    """With a bias of scores and a limit of them, which the sink does not have."""
    query, key, value, sink = drawn()
    mask, bias = build_mask(5, 7, causal=True), normal(1, HEADS, 5, 7, seed=4)
    with recorded_scores() as scores:
        scaled_dot_product_attention(query, key, value, mask=mask, bias=bias, sink=sink, softcap=1.5)
    (item,) = scores
    assert item.key is not None
    assert item.bias is not None
    assert item.key.shape == (3, SHARED, 8, SIZE)
    assert_close(item.bias[..., 0], sink.view(1, -1, 1).expand(3, -1, 5))
    assert item.seen is not None
    again = attention_weights(query, item.key, mask=item.seen.bool(), bias=item.bias, softcap=item.softcap)
    assert_close(again, item.weights)


def test_gradients_equal_differences() -> None:
    query, key, value, sink = (tensor.requires_grad_() for tensor in drawn(2, 3))
    mask = build_mask(2, 3, causal=True)
    assert torch.autograd.gradcheck(
        lambda query, key, value, sink: attend_to_sink(query, key, value, mask, sink), (query, key, value, sink)
    )


def test_dropout_leaves_out_weights() -> None:
    """Including that of the sink, as the softmax is over all of them."""
    query, key, value, sink = drawn(50, 40)
    torch.manual_seed(0)
    dropped = [scaled_dot_product_attention(query, key, value, sink=sink, dropout=0.5) for _ in range(300)]
    assert_close(torch.stack(dropped).mean(0), attend_to_sink(query, key, value, None, sink), atol=0.15, rtol=0)
    assert not torch.equal(dropped[0], dropped[1])


def layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    made = MultiHeadAttention(24, HEADS, num_kv_heads=SHARED, sink=True, **options).double().requires_grad_(False)
    assert made.sink is not None
    made.sink.copy_(normal(HEADS))
    return made


def test_a_new_layer_has_a_score_of_zero() -> None:
    """The softmax whose denominator has one more summand (Xiao et al. 2023, equation 2)."""
    made = MultiHeadAttention(24, HEADS, sink=True)
    assert made.sink is not None
    assert torch.equal(made.sink, torch.zeros(HEADS))
    assert MultiHeadAttention(24, HEADS).sink is None


@pytest.mark.parametrize("window", [None, 3])
def test_calls_on_parts_equal_one_call(window: int | None) -> None:
    made, x = layer(), normal(2, 9, 24)
    whole = made(x, mask=build_mask(9, 9, causal=True, window=window))
    cache, parts = LayerCache(window=window), []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        mask = build_mask(end - start, end, causal=True, window=window)
        parts.append(made(x[:, start:end], mask=mask, cache=cache))
    assert_close(torch.cat(parts, 1), whole)


def test_weights_have_that_of_the_sink_first() -> None:
    made, x = layer(), normal(2, 9, 24)
    mask = build_mask(9, 9, causal=True)
    output, weights = made.with_weights(x, mask=mask)
    assert_close(output, made(x, mask=mask))
    assert weights.shape == (2, HEADS, 9, 10)
    assert not weights[..., 1:].triu(1).any()


def test_added_keys_and_values_are_zero() -> None:
    query, key, value, sink = drawn()
    longer, values, bias = add_sink(query, key, value, None, sink)
    assert not longer[:, :, 0].any()
    assert not values[:, :, 0].any()
    assert torch.equal(longer[:, :, 1:], key)
    assert not bias[..., 1:].any()
