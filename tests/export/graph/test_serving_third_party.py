"""The profile ``serving`` for architectures of other authors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import text_generator

Zoo = Callable[..., Any]

HYBRID = {
    "{module}_config.py": """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class Settings(zoo.Config):
    task: Literal["text-generation"] = "text-generation"
    vocab_size: int = 260
    max_seq_len: int = 128

    def graphs(self):
        states = (
            zoo.floats("convolution", "batch", 16 + 2 * 8, 3),
            zoo.floats("recurrence", "batch", 2, 8, 8),
        )
        inputs = (
            zoo.token_ids("input_ids", self.vocab_size),
            zoo.mask("attention_mask", length="past_sequence + sequence", padding="left"),
        )
        past = (
            zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=8),
            zoo.States(num_layers=1, states=states),
        )
        logits = zoo.floats("logits", "batch", "sequence", self.vocab_size)
        return (zoo.Graph(inputs=inputs, outputs=(logits,), past=past),)
""",
    "{module}_model.py": """
import torch
from torch import nn
from zoo.nn import Cache, LayerStates, StateSpaceMixer

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, 16)
        self.position = nn.Embedding(c.max_seq_len, 16)
        self.mixer = StateSpaceMixer(16, 16, head_dim=8, state_size=8)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, c.vocab_size)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, past_states=None):
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        if attention_mask is None:
            attention_mask = torch.ones(input_ids.shape[0], total, dtype=torch.int64)
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
        x = self.embedding(input_ids) + self.position(places)
        states = past_states[0] if past_states is not None else None
        x = x + self.mixer(x, attention_mask[:, -length:], states)
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if past_key_values is not None:
            key, value = past_key_values[0].extend(key, value)
        order = torch.arange(total)
        seen = order <= order[total - length :].unsqueeze(1)
        seen = seen & attention_mask.bool()[:, None, None, :]
        scores = query @ key.transpose(-1, -2) / 8**0.5
        weights = scores.masked_fill(~seen, -1e30).softmax(-1)
        return self.head(x + (weights @ value).transpose(1, 2).flatten(2))
""",
    "presets.toml": 'schema = 1\n[models.both]\narch = "both"\ntokenizer = "bytes"\n',
}
"""Keys and values beside states, with attention, masks and positions of its own."""


@pytest.mark.slow
def test_keys_and_values_beside_states(install: Any, zoo: Zoo) -> None:
    install("zoo-both", text_generator("both"), files=HYBRID)
    said = zoo("export", "both", "--onnx", "--profile", "serving")
    assert said.status == 0, said.err
    assert json.loads(Path("both/parity.serving.json").read_text())["verified"]
    assert zoo("export", "both", "--onnx").status == 0
    texts = ("time flies", "an arrow", "x")
    plain, served = (zoo("run", "both", *texts, "--variant", variant).out for variant in ("", "serving"))
    assert plain == served != ""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "preset"), [("sliding", "sliding-tiny"), ("aft", "aft-tiny")])
def test_other_attention(third_party: Callable[[str], None], zoo: Zoo, package: str, preset: str) -> None:
    """Windows, and attention that is no scaled dot product."""
    third_party(package)
    said = zoo("export", preset, "--onnx", "--profile", "serving", "--set", "max_seq_len=32")
    assert said.status == 0, said.err
