"""A small model and its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from zoo.config import Settings
from zoo.training.data.examples import Example
from zoo.training.loop import Trainer
from zoo.training.objectives.causal import CausalLM
from zoo.training.settings import TrainingSettings

LENGTH = 12


class Texts:
    """Random texts of the same length, of which each token is often the one before it plus 1."""

    lengths = None

    def __init__(self, count: int = 50) -> None:
        rng = np.random.default_rng(0)
        steps = np.where(rng.random((count, LENGTH + 1)) < 0.8, 1, rng.integers(0, 20, (count, LENGTH + 1)))
        self._ids = (steps.cumsum(1) % 20).astype(np.int32)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Example:
        return {"input_ids": self._ids[index]}


def small_gpt(dropout: float = 0.1) -> nn.Module:
    return zoo.create_model(
        "gpt-tiny", vocab_size=20, max_seq_len=LENGTH, hidden_size=16, num_layers=2, num_heads=2, dropout=dropout,
        eos_token_id=None,
    )  # fmt: skip


@pytest.fixture
def corpus() -> Path:
    """A short text to learn."""
    path = Path("corpus.txt")
    path.write_text("".join(f"line {number} of a text that counts to {number + 1}\n" for number in range(200)))
    return path


@pytest.fixture
def make_trainer() -> Callable[..., Trainer]:
    """Make a trainer of a small GPT, with settings."""

    def make(
        model: nn.Module | None = None, dtype: torch.dtype = torch.float32, count: int = 50, **settings: Any
    ) -> Trainer:
        model = (small_gpt() if model is None else model).to(dtype)
        criterion = CausalLM(model.config, None, Settings(), LENGTH)
        chosen = TrainingSettings(**{"batch_size": 8, "max_steps": 12, "learning_rate": 1e-2, **settings})
        return Trainer(model, criterion, Texts(count), chosen, validation=Texts(10))

    return make
