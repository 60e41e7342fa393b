"""Linformer against the paper's equation, and against full attention at full rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.errors import UsageError
from zoo.nn import LinformerAttention, MultiHeadAttention
from zoo.registry import registry
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.model import BERT

SIZES = {"vocab_size": 53, "max_seq_len": 12, "hidden_size": 24, "num_layers": 2, "num_heads": 3}


def attention(length: int, rank: int) -> LinformerAttention:
    """Build a float64 layer, 24 wide with 3 heads, with random weights."""
    module = LinformerAttention(24, 3, length, rank).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(module: LinformerAttention, x: Tensor, mask: Tensor) -> np.ndarray:
    """Compute equation 7 for each head of each row, with padding removed before the projections."""
    out = np.zeros(x.shape)
    weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}

    def dense(name: str, values: np.ndarray) -> np.ndarray:
        return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    for row in range(len(x)):
        kept = mask[row].nonzero().squeeze(1).numpy()
        heads = []
        for head in range(3):
            part = slice(8 * head, 8 * head + 8)
            query, key, value = (dense(name, x[row].numpy())[:, part] for name in ("query", "key", "value"))
            mixed_key = weights["key_mixture"][:, kept] @ key[kept]
            mixed_value = weights["value_mixture"][:, kept] @ value[kept]
            scores = np.exp(query @ mixed_key.T / np.sqrt(8))
            heads.append(scores / scores.sum(1, keepdims=True) @ mixed_value)
        out[row] = dense("output", np.concatenate(heads, 1))
    return out


@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_equals_the_equation(rank: int, length: int) -> None:
    """For every rank, including shorter inputs and holes in the mask."""
    module, x = attention(12, rank), randn(3, length, 24)
    mask = (torch.arange(length) != 1) & (torch.arange(length) < torch.tensor([[length], [3], [1]]))
    expected = torch.from_numpy(by_hand(module, x, mask))
    assert_close(module(x, mask=mask.long()), expected, atol=1e-12, rtol=0)


def test_full_rank_identity_equals_full_attention() -> None:
    """With k = n and E = F = I."""
    module, full, x = attention(12, 12), MultiHeadAttention(24, 3).double(), randn(2, 12, 24)
    with torch.no_grad():
        module.key_mixture.copy_(torch.eye(12))
        module.value_mixture.copy_(torch.eye(12))
    full.load_state_dict({name: value for name, value in module.state_dict().items() if "mixture" not in name})
    assert_close(module(x), full(x), atol=1e-12, rtol=0)


def test_full_rank_identity_encoder_equals_bert() -> None:
    """For the whole encoder."""
    full, ours = BERT(BERTConfig(**SIZES)), BERT(BERTConfig(**SIZES, attention="linformer", attention_rank=12))
    missing = ours.load_state_dict(full.state_dict(), strict=False)
    assert missing.unexpected_keys == []
    assert {name.rpartition(".")[2] for name in missing.missing_keys} == {"key_mixture", "value_mixture"}
    with torch.no_grad():
        for name in missing.missing_keys:
            ours.get_parameter(name).copy_(torch.eye(12))
    ids = torch.randint(0, 53, (2, 12), generator=torch.Generator().manual_seed(0))
    found, expected = (model.double().eval()(ids)["pooler_output"] for model in (ours, full))
    assert_close(found, expected, atol=1e-12, rtol=0)


def test_mixtures_preserve_lengths_on_average() -> None:
    """The mean of |E x|^2 is |x|^2: it is a sum of R squares, each of variance |x|^2 / R."""
    torch.manual_seed(0)
    module, x = LinformerAttention(8, 2, 1000, 250), torch.randn(1000, 4)
    ratio = (module.key_mixture @ x).square().sum(0) / x.square().sum(0)
    assert_close(ratio, torch.ones(4), atol=4 * (2 / 250) ** 0.5, rtol=0)


def test_default_rank_is_half_the_length() -> None:
    """Half of the length, as in the paper's 512 and 256; 1 for a single token."""
    ranks = {n: registry().resolve("linformer-tiny", [f"max_seq_len={n}"]).config.attention_rank for n in (512, 9, 1)}
    assert ranks == {512: 256, 9: 4, 1: 1}
    assert registry().resolve("bert-tiny").config.attention_rank is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("linformer-tiny", ["attention_rank=129"], "attention_rank 129 exceeds max_seq_len 128"),
        ("linformer-tiny", ["attention_rank=0"], "attention_rank must be positive, got 0"),
        ("linformer-tiny", ["attention=full"], "attention must be one of 'linformer', got 'full'"),
        ("bert-tiny", ["attention=linfomer"], "attention must be one of 'full', .*'linformer'.*, got 'linfomer'"),
        ("bert-tiny", ["attention_rank=5"], "attention 'full' has no rank, but attention_rank is 5"),
    ],
)
def test_invalid_configurations(name: str, settings: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve(name, settings)


@pytest.mark.parametrize("rank", [0, 13])
def test_invalid_rank(rank: int) -> None:
    """The block itself rejects it, too."""
    with pytest.raises(ValueError, match=f"rank {rank} lies outside 1 ... max_seq_len 12"):
        LinformerAttention(24, 3, 12, rank)
