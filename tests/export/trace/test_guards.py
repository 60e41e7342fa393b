"""Branches of a model's code on sizes: refused if the graph would be wrong at another declared size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.errors import ParityError
from zoo.testing import find_subject
from zoo_export.trace.graph import trace_graph

Install = Callable[..., Path]

PLUGIN = """
import zoo

ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="branching", tasks=("text-generation",), config="{module}_config:Config",
                             model="{module}_model:Model", reference="A test")]
"""
CONFIG = """
from dataclasses import dataclass

import zoo

@dataclass(frozen=True, kw_only=True)
class Config(zoo.Config):
    task = "text-generation"
    vocab_size: int = 50
    max_seq_len: int = 128
    hidden_size: int = 16

    def graphs(self):
        return (zoo.causal_graph(vocab_size=self.vocab_size, num_layers=1, num_kv_heads=2, head_dim=8),)
"""
MODEL = """
from torch import nn

from zoo.nn import MultiHeadAttention, build_mask, tied_linear

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.token = nn.Embedding(c.vocab_size, c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, 2)
        self.head = tied_linear(self.token)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        batch, length = input_ids.shape
        past = past_key_values.length if past_key_values is not None else 0
        total = past + length
        mask = build_mask(length, total, padding=attention_mask, causal=True, device=input_ids.device)
        x = self.token(input_ids)
        BRANCH
        x = x + self.attention(x, mask=mask, cache=None if past_key_values is None else past_key_values[0])
        return self.head(x)
"""


def trace(install: Install, branch: str) -> bytes:
    install("zoo-branching", PLUGIN, files={
        "{module}_config.py": CONFIG, "{module}_model.py": MODEL.replace("BRANCH", branch),
    })  # fmt: skip
    spec = find_subject("branching").spec
    return trace_graph(spec, spec.graphs[0], "float32", opset=23)


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [
        ("if total - length > 20: x = 2 * x", "past_sequence 21"),
        pytest.param("if batch > 5: x = 2 * x", "batch 6", marks=pytest.mark.slow),
        pytest.param("if 20 < total < 60: x = 2 * x", "sequence 2, past_sequence 19", marks=pytest.mark.slow),
        pytest.param("if 100 < batch * length < 120: x = 2 * x", "batch", marks=pytest.mark.slow),
        pytest.param("if length % 4 == 0: x = 2 * x", "sequence 4", marks=pytest.mark.slow),
        pytest.param("x = x * (2 if length >= past else 1)", "sequence 2, past_sequence 2", marks=pytest.mark.slow),
    ],
)
def test_branch_on_a_free_size_is_refused(install: Install, branch: str, sizes: str) -> None:
    with pytest.raises(ParityError) as refused:
        trace(install, branch)
    message = str(refused.value)
    assert "the model branches on a size that is declared free" in message
    assert sizes in message
    assert "zoo_branching_model.py:20, in forward" in message


@pytest.mark.slow
def test_check_of_the_longest_input_is_accepted(install: Install) -> None:
    """It has the same outcome at every declared size."""
    assert trace(install, "assert total <= self.config.max_seq_len, 'too long'")
