"""Adaptive spans against the paper's equations in scalar loops, and properties of spans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from tests.architectures.span_reference import layer_norm, share, span_attention
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.nn import Cache, SpanAttention, build_mask, distances_of
from zoo.registry import registry
from zoo_plugins.adaptive_span.config import AdaptiveSpanConfig
from zoo_plugins.adaptive_span.model import AdaptiveSpanDecoder

SIZES = {
    "vocab_size": 31,
    "max_seq_len": 32,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 10,
    "span": 7,
    "span_ramp": 3,
    "norm_eps": 1e-4,
}
SPANS = [-2.0, 1.3, 2.0, 0.0, 9.0, 3.6]
"""One z per head of both layers: within the limits, at them and beyond."""


def make(**options: object) -> AdaptiveSpanDecoder:
    """Build a small float64 model in evaluation mode with random weights."""
    model = AdaptiveSpanDecoder(AdaptiveSpanConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.attention.adaptive.length.copy_(torch.tensor(SPANS[3 * layer : 3 * layer + 3]))
    return model.requires_grad_(False)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


def reference(model: AdaptiveSpanDecoder, ids: list[int], padding: list[int]) -> np.ndarray:
    """Compute the logits of one row."""
    c = model.config
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    x = weights["token_embedding.weight"][ids]
    for layer in range(c.num_layers):
        prefix = f"blocks.{layer}."
        w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        attention = {name.removeprefix("attention."): value for name, value in w.items()}
        table = weights["distance_embedding.weight"]
        x = x + span_attention(x, attention, table, padding, c.num_heads, c.span_ramp)
        x = layer_norm(x, w, "attention_residual", c.norm_eps)
        hidden = np.maximum(x @ w["mlp.up.weight"].T + w["mlp.up.bias"], 0)
        x = layer_norm(x + hidden @ w["mlp.down.weight"].T + w["mlp.down.bias"], w, "mlp_residual", c.norm_eps)
    return x @ weights["head.weight"].T


def attention_of(span: int, ramp: int | None, spans: list[float]) -> SpanAttention:
    """Build a random float64 attention of two heads with these z."""
    torch.manual_seed(2)
    attention = SpanAttention(8, 2, span=span, ramp=ramp).double().requires_grad_(False)
    if attention.adaptive is not None:
        attention.adaptive.length.copy_(torch.tensor(spans))
    return attention


def weights_of(attention: SpanAttention, length: int) -> Tensor:
    """Return the attention weights of a random text, (2, H, T, T)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, length, 8, dtype=torch.float64, generator=generator)
    positions = torch.randn(attention.span, 4, dtype=torch.float64, generator=generator)
    mask = build_mask(length, length, causal=True)
    return attention.weights(x, positions, distances_of(length, length), mask=mask)


@pytest.mark.parametrize("padding", [[1] * 14, [0] * 3 + [1] * 11, [1] * 9 + [0] * 5, [1, 0, 0, 1, 1, 0] + [1] * 8])
def test_equals_the_papers_equations(padding: list[int]) -> None:
    """For a text of twice the span, with padding on either side or within."""
    model, ids = make(), tokens(2, 14)
    actual = model(ids, torch.tensor([padding, [1] * 14]))
    for row, mask in enumerate((padding, [1] * 14)):
        expected = torch.from_numpy(reference(model, ids[row].tolist(), mask))
        counted = torch.tensor(mask).bool()
        assert_close(actual[row][counted], expected[counted], atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=40)
@given(
    ramp=st.integers(1, 12),
    spans=st.lists(st.floats(-3, 20, width=32), min_size=2, max_size=2),
    span=st.integers(1, 16),
    length=st.integers(1, 18),
)
def test_weights_are_zero_beyond_the_span_and_its_ramp(ramp: int, spans: list[float], span: int, length: int) -> None:
    """Rows sum to 1; weights are exactly 0 where m is 0, and positive elsewhere."""
    weights = weights_of(attention_of(span, ramp, spans), length)
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-12, rtol=0)
    for head, z in enumerate(spans):
        z = min(max(z, 0.0), span)
        for t in range(length):
            for s in range(length):
                seen = 0 <= t - s < min(span, z + ramp) and share(t - s, z, ramp) > 1e-6
                if seen:
                    assert (weights[:, head, t, s] > 0).all()
                elif not 0 <= t - s < min(span, z + ramp):
                    assert (weights[:, head, t, s] == 0).all()


@settings(deadline=None, max_examples=25)
@given(ramp=st.integers(1, 12), beyond=st.floats(0, 9), span=st.integers(1, 9), length=st.integers(1, 12))
def test_full_span_equals_causal_attention(ramp: int, beyond: float, span: int, length: int) -> None:
    """With the same positions, whatever the ramp: m is 1 for all keys within the span."""
    adaptive, plain = attention_of(span, ramp, [span + beyond] * 2), attention_of(span, None, [])
    assert_close(weights_of(adaptive, length), weights_of(plain, length), atol=1e-14, rtol=0)


def test_cached_tokens_beyond_the_span_have_no_effect() -> None:
    """With every z at its limit of 7, a token reads its own key and six cached ones."""
    model, ids = make(), tokens(2, 12)
    for block in model.blocks:
        block.attention.adaptive.length.fill_(7.0)
    for place, moves in ((5, False), (6, True)):
        results = []
        for change in (0.0, 100.0):
            cache = Cache.empty(2)
            model(ids, None, cache)
            for layer in cache.layers:
                layer.key[:, :, : place + 1] += change
                layer.value[:, :, : place + 1] -= change
            results.append(model(ids[:, :1], None, cache))
        assert results[0].equal(results[1]) != moves


def test_padding_between_calls_does_not_count_in_distances() -> None:
    """Continuing a right-padded prompt gives the same outputs as without padding."""
    model, ids = make(), tokens(1, 9)
    cache = Cache.empty(2)
    padding = torch.tensor([[1] * 5 + [0] * 4])
    model(torch.cat((ids[:, :5], ids[:, :4]), dim=1), padding, cache)
    actual = model(ids[:, 5:], torch.cat((padding, torch.ones(1, 4, dtype=torch.long)), dim=1), cache)
    assert_close(actual, model(ids)[:, 5:], atol=1e-12, rtol=0)


def test_span_penalty_is_the_mean_span() -> None:
    """lambda times the mean of the clamped z, with gradients for z within the limits."""
    model = make(span_penalty=0.5).requires_grad_(True)
    assert_close(model.spans().flatten().tolist(), [0.0, 1.3, 2.0, 0.0, 7.0, 3.6], atol=1e-6, rtol=0)
    penalty = model.training_penalty()
    assert penalty.item() == pytest.approx(0.5 * 13.9 / 6, abs=1e-6)
    penalty.backward()
    gradients = torch.stack([block.attention.adaptive.length.grad for block in model.blocks]).flatten()
    assert_close(gradients.tolist(), [0.0, 0.5 / 6, 0.5 / 6, 0.5 / 6, 0.0, 0.5 / 6], atol=1e-12, rtol=0)
    model.constrain_weights()
    assert model.blocks[0].attention.adaptive.length.tolist()[0] == 0.0
    assert model.blocks[1].attention.adaptive.length.tolist()[1] == 7.0


def test_gradient_of_a_span() -> None:
    """By finite differences, with some keys faded out and others not yet fading."""
    model, ids = make().requires_grad_(True), tokens(2, 12)
    model(ids).logsumexp(-1).sum().backward()
    for block in model.blocks:
        length, step = block.attention.adaptive.length, 1e-6
        for head in range(3):
            if abs(length[head].item() - round(length[head].item())) < 0.1:
                continue  # at integers a key starts to fade in, and the one-sided derivatives differ
            with torch.no_grad():
                sides = []
                for sign in (1, -1):
                    length[head] += sign * step
                    sides.append(model(ids).logsumexp(-1).sum().item())
                    length[head] -= sign * step
            expected = (sides[0] - sides[1]) / (2 * step)
            assert length.grad[head].item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
            assert abs(expected) > 1e-4
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # V E + S D + layers (4 E^2 + 2 E F + F + E + 4 E + H) + V E
        ("adaptive-span-12l", 2 * 205 * 512 + 8192 * 64 + 12 * (12 * 512**2 + 4 * 512 + 512 + 4 * 512 + 8)),
        (
            "adaptive-span-24l",
            2 * 205 * 768 + 8192 * 96 + 24 * (4 * 768**2 + 2 * 768 * 4096 + 4096 + 5 * 768 + 8),
        ),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    """39 and 209 million in table 1 of the paper."""
    assert parameter_count(registry().resolve(name)) == parameters
    assert round(parameters / 1e6) == {"adaptive-span-12l": 39, "adaptive-span-24l": 209}[name]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("span=0", "span must be positive, got 0"),
        ("span_ramp=0", "span_ramp must be positive, got 0"),
        ("initial_span=49", "initial_span 49.0 lies outside 0 ... span 48"),
        ("span_penalty=-1", "span_penalty must not be negative, got -1.0"),
        ("num_heads=5", "hidden_size 64 is not divisible by num_heads 5"),
    ],
)
def test_invalid_sizes_are_rejected(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry().resolve("adaptive-span-tiny", [setting])
