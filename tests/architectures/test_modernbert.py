"""Invariances of ModernBERT; tests/checkpoints/test_modernbert.py compares it with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_plugins.modernbert.config import ModernBERTConfig
from zoo_plugins.modernbert.model import ModernBERT

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "max_seq_len": 20,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "intermediate_size": 40,
    "norm_eps": 1e-3,
}


def make(**options: object) -> ModernBERT:
    """Build a small float64 model in evaluation mode with random weights."""
    model = ModernBERT(ModernBERTConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def tokens(batch: int, length: int) -> Tensor:
    """Draw token ids."""
    return torch.randint(53, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("window", [2, 4])
def test_receptive_field_is_the_sum_of_windows(window: int) -> None:
    """Each of three layers passes on tokens up to half a window away on either side, and none from further away."""
    model, ids = make(sliding_windows=(window,)), tokens(1, 20)
    before = model(ids)["last_hidden_state"][0, 10]
    for place in range(20):
        changed = ids.clone()
        changed[0, place] = (ids[0, place] + 1) % 53
        moved = float((model(changed)["last_hidden_state"][0, 10] - before).abs().max())
        assert moved > 1e-9 if abs(place - 10) <= 3 * window // 2 else moved == 0, place


def test_window_over_all_tokens_equals_no_window() -> None:
    """With the same rotary frequencies."""
    ids = tokens(2, 20)
    found = make(sliding_windows=(40,), local_rope_theta=50.0)(ids)["last_hidden_state"]
    wanted = make(sliding_windows=(0,), rope_theta=50.0)(ids)["last_hidden_state"]
    assert_close(found, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_changes_nothing(pooling: str) -> None:
    """A text has the same classes alone and padded in a batch, with any padding token."""
    model = make(task="text-classification", num_classes=5, pooling=pooling, sliding_windows=(0, 4))
    ids, lengths = tokens(3, 12), [12, 7, 1]
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    for filler in (0, 7):
        logits = model(ids.masked_fill(mask == 0, filler), mask)["logits"]
        for row, length in enumerate(lengths):
            assert_close(logits[row], model(ids[row : row + 1, :length])["logits"][0], atol=1e-11, rtol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_heads": 5}, "hidden_size 24 is not divisible by num_heads 5"),
    "odd": ({"num_heads": 8}, "hidden_size / num_heads must be even for rotary positions, got 3"),
    "window": ({"sliding_windows": (4, 3)}, r"one or more even numbers, got \(4, 3\)"),
    "no windows": ({"sliding_windows": ()}, r"one or more even numbers, got \(\)"),
    "base": ({"local_rope_theta": 0.0}, "local_rope_theta must be positive, got 0.0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_configurations_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModernBERTConfig(**{**SIZES, **options})
