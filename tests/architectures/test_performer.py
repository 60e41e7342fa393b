"""Performer against the paper's equations, and against the softmax attention that it approximates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from zoo.errors import UsageError
from zoo.nn import PerformerAttention, attention_weights, orthogonal_features
from zoo.registry import registry
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.model import BERT

# Relative error of the estimated kernel for queries and keys from N(0, 0.3^2) of size 32, by number of features.
TABLE = {32: 0.177, 128: 0.097, 512: 0.051, 2048: 0.027, 8192: 0.017}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def phi(x: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Compute exp(w x - |x|^2 / 2) / sqrt(m) of x / d^(1/4) for the rows of a matrix."""
    x = x / x.shape[1] ** 0.25
    return np.exp(x @ features.T - (x**2).sum(1, keepdims=True) / 2) / np.sqrt(len(features))


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), length=st.integers(1, 9), gain=st.floats(0.1, 3.0), seed=st.integers(0, 999))
def test_equals_the_equation(count: int, length: int, gain: float, seed: int) -> None:
    """phi(q) . phi(k) in place of exp(q . k), for each head and each row."""
    torch.manual_seed(seed)
    module = PerformerAttention(12, 2, count).double()
    query, key, value = gain * randn(3, 2, 2, length, 6, seed=seed)
    mask = torch.rand(2, length) < 0.7
    mask[torch.arange(2), torch.randint(length, (2,))] = True
    found, features = module.mix(query, key, value, mask.long()), module.features.numpy()
    for row in range(2):
        kept = mask[row].numpy()
        for head in range(2):
            q, k, v = (x[row, head].numpy() for x in (query, key, value))
            weights = phi(q, features) @ phi(k[kept], features).T
            expected = weights / weights.sum(1, keepdims=True) @ v[kept]
            assert_close(found[row, head], torch.from_numpy(expected), atol=1e-10, rtol=0)


def kernel_error(count: int, seed: int) -> float:
    """Return the relative error of phi(Q) phi(K)^T with respect to exp(Q K^T / sqrt(d)), for 256 queries and keys."""
    torch.manual_seed(seed)
    query, key = (0.3 * randn(2, 256, 32, seed=seed)).numpy()
    features = orthogonal_features(count, 32).double().numpy()
    exact = np.exp(query @ key.T / math.sqrt(32))
    return float(np.linalg.norm(phi(query, features) @ phi(key, features).T - exact) / np.linalg.norm(exact))


def test_kernel_error_matches_the_table() -> None:
    """Within a third of the table's values, on average over eight draws."""
    for count, expected in TABLE.items():
        assert np.mean([kernel_error(count, seed) for seed in range(8)]) == pytest.approx(expected, rel=1 / 3)


@pytest.mark.slow
def test_error_halves_with_four_times_the_features() -> None:
    """The error of the output with respect to softmax attention falls as the power -1/2 of 32 to 8192 features."""
    errors = []
    for count in TABLE:
        found = []
        for seed in range(6):
            torch.manual_seed(seed)
            module = PerformerAttention(128, 4, count).double()
            query, key, value = 0.3 * randn(3, 1, 4, 128, 32, seed=seed)
            exact = attention_weights(query, key) @ value
            found.append(float((module.mix(query, key, value, None) - exact).norm() / exact.norm()))
        errors.append(np.mean(found))
    slope, _ = np.polyfit(np.log(list(TABLE)), np.log(errors), 1)
    assert slope == pytest.approx(-0.5, abs=0.05)
    assert errors[-1] < 0.015


def test_kernel_estimate_is_unbiased() -> None:
    """The mean over 20,000 draws of 8 directions is within four standard errors, for near and distant pairs."""
    torch.manual_seed(0)
    query, key = (0.7 * randn(2, 6, 8)).numpy()
    features = orthogonal_features(8 * 20_000, 8).double().numpy()
    scale = np.sqrt(len(features))
    draws = (scale * phi(query, features)[:, None] * scale * phi(key, features)[None]).reshape(6, 6, -1, 8).mean(-1)
    exact = np.exp(query @ key.T / math.sqrt(8))
    standard_error = draws.std(-1) / math.sqrt(draws.shape[-1])
    assert (np.abs(draws.mean(-1) - exact) < 4 * standard_error).all()
    assert (standard_error < 0.05 * exact).all()


def test_directions_are_orthogonal_with_chi_squared_lengths() -> None:
    """Orthogonal within blocks of 16, the last one truncated. Squared lengths are chi-squared: mean 16, variance 32."""
    torch.manual_seed(0)
    features = orthogonal_features(16 * 200 + 5, 16)
    assert features.shape == (3205, 16)
    for block in features.split(16):
        inner = block @ block.T
        assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)
    lengths = features.square().sum(1)
    assert lengths.mean() == pytest.approx(16, abs=4 * (32 / 3205) ** 0.5)
    assert lengths.var() == pytest.approx(32, rel=0.2)
    assert features.mean() == pytest.approx(0, abs=4 * (3205 * 16) ** -0.5)


@pytest.mark.parametrize("gain", [1.0, 30.0])
def test_large_inputs_neither_overflow_nor_underflow(gain: float) -> None:
    """In float32 without rescaling, exp would underflow or overflow at the larger gain, and 0 / 0 give NaN."""
    torch.manual_seed(0)
    module = PerformerAttention(64, 2, 64)
    query, key, value = randn(3, 2, 2, 50, 32)
    found = module.mix((gain * query).float(), (gain * key).float(), value.float(), None)
    expected = module.double().mix(gain * query, gain * key, value, None)
    assert_close(found.double(), expected, atol=2e-5 * gain, rtol=0)


def test_half_precision_over_many_tokens() -> None:
    """Sums over 3,000 tokens and 64 features exceed float16's range unless they are normalised."""
    torch.manual_seed(0)
    module = PerformerAttention(64, 2, 64).double()
    query, key, value = 0.3 * randn(3, 1, 2, 3000, 32)
    expected = module.mix(query, key, value, None)
    found = module.half().mix(query.half(), key.half(), value.half(), None)
    assert_close(found.double(), expected, atol=2e-3, rtol=0)


def test_directions_are_saved_and_seeded() -> None:
    """They are a buffer of each block, which BERT does not have, and follow from the seed."""
    c = BERTConfig(vocab_size=53, max_seq_len=12, hidden_size=24, num_layers=2, num_heads=3, attention="performer")
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append({name: value for name, value in BERT(c).state_dict().items() if name.endswith("features")})
    first, again, other = states
    assert [value.shape for value in first.values()] == [(256, 8), (256, 8)]
    assert all(first[name].equal(again[name]) and not first[name].equal(other[name]) for name in first)
    full = BERT(BERTConfig(vocab_size=53, max_seq_len=12, hidden_size=24, num_layers=2, num_heads=3))
    keys = BERT(c).load_state_dict(full.state_dict(), strict=False)
    assert keys.unexpected_keys == []
    assert keys.missing_keys == [f"blocks.{block}.attention.features" for block in range(2)]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("performer-tiny", ["attention_rank=0"], "attention_rank must be positive, got 0"),
        ("performer-tiny", ["attention_rank=-3"], "attention_rank must be positive, got -3"),
        ("performer-tiny", ["attention=linformer"], "attention must be one of 'performer', got 'linformer'"),
    ],
)
def test_invalid_configurations(name: str, settings: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve(name, settings)


def test_zero_features_are_rejected() -> None:
    """The block itself rejects it, too."""
    with pytest.raises(ValueError, match="num_features must be positive, got 0"):
        PerformerAttention(24, 3, 0)
