"""A decoder of token ids whose tokens see later ones of their block, as a plugin provides it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo_export.parity.laws import LawError, check_laws

Zoo = Callable[..., Result]
Install = Callable[..., Path]
PLUGIN = """
import zoo

ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="blocks", tasks=("text-generation",), config=f"{module}_config:BlocksConfig",
            model=f"{module}_model:Blocks", reference="A test",
        )
    ]
"""
CONFIG = """
from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class BlocksConfig(zoo.Config):
    task = "text-generation"
    vocab_size: int = 40
    max_seq_len: int = 24
    hidden_size: int = 16

    def graphs(self):
        tokens = zoo.token_ids("input_ids", self.vocab_size)
        mask = zoo.mask("attention_mask", length="past_sequence + sequence")
        past = zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=self.hidden_size // 2)
        logits = zoo.floats("logits", "batch", "sequence", self.vocab_size)
        return (zoo.Graph(inputs=(tokens, mask, zoo.block_ids("block_ids", 3)), outputs=(logits,), past=past),)
"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional

from zoo.nn import MultiHeadAttention, SinusoidalPositions, build_mask, positions_of


class Blocks(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = SinusoidalPositions(c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, 2)
        self.head = nn.Linear(c.hidden_size, c.vocab_size)

    def forward(self, input_ids, attention_mask, block_ids, past_key_values=None):
        length = input_ids.shape[1]
        past = past_key_values.length if past_key_values is not None else 0
        total, device = length + past, input_ids.device
        blocks = functional.pad(block_ids, (past, 0))
        seen = (block_ids[:, :, None] == blocks[:, None]) & (block_ids > 0)[:, :, None]
        causal = build_mask(length, total, padding=attention_mask, causal=True, device=device)
        mask = causal | (seen & (attention_mask > 0)[:, None])[:, None]
        x = self.embedding(input_ids)
        x = x + self.positions(positions_of(length, total, padding=attention_mask, device=device), x.dtype)
        cache = past_key_values[0] if past_key_values is not None else None
        return self.head(x + self.attention(x, mask=mask, cache=cache))
"""
SEEN = "(block_ids[:, :, None] == blocks[:, None]) & (block_ids > 0)[:, :, None]"
BUGS = {
    "blocks see each other": ("(block_ids > 0)[:, :, None] & (blocks > 0)[:, None]", "before its block"),
    "one number works": (f"{SEEN} & (block_ids == 1)[:, :, None]", "the block has no effect"),
    "no short blocks": (
        f"{SEEN}\n        real = seen & (attention_mask > 0)[:, None]\n"
        "        seen = seen & (real.sum(-1, keepdim=True) > 2)",
        "the block has no effect",
    ),
    "none": (f"{SEEN} & (block_ids < 0)[:, :, None]", "the block has no effect"),
    "tokens in no block": ("(block_ids[:, :, None] == blocks[:, None])", "law"),
}


def provide(install: Install, seen: str = SEEN) -> None:
    assert MODEL.count(SEEN) == 1
    files = {"{module}_config.py": CONFIG, "{module}_model.py": MODEL.replace(SEEN, seen)}
    install("zoo-blocks", PLUGIN, files=files)
    Path("zoo.toml").write_text('schema = 1\n[models.blocks-small]\narch = "blocks"\n')


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bug", BUGS)
def test_block_that_a_decoder_does_not_respect_breaks_a_law(install: Install, zoo: Zoo, bug: str) -> None:
    seen, said = BUGS[bug]
    provide(install, seen)
    assert zoo("build", "blocks-small", "-o", "model").status == 0
    with pytest.raises(LawError, match=said):
        check_laws(ModelDirectory.open(Path("model")))


@pytest.mark.slow
def test_decoder_of_tokens_with_blocks_is_verified(install: Install, zoo: Zoo) -> None:
    """The tokens that it generates are in no block."""
    provide(install)
    assert zoo("build", "blocks-small", "-o", "model").status == 0
    exported = zoo("export", "model", "--onnx")
    assert (exported.status, exported.err) == (0, "")
    assert "verified on cpu" in exported.out
