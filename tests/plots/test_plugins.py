"""Plots of a third party's architecture, whose modules are its own and those of zoo.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import text_generator
from tests.plots.reading import artists
from zoo import plots

CONFIG = """
from dataclasses import dataclass
import zoo

@dataclass(frozen=True, kw_only=True)
class Settings(zoo.Config):
    task: str = "text-generation"
    vocab_size: int = 260
    max_seq_len: int = 24
    hidden_size: int = 16

    def graphs(self):
        return (zoo.causal_graph(vocab_size=self.vocab_size, num_layers=1, num_kv_heads=2, head_dim=8, num_heads=2),)
"""
MODEL = """
from torch import nn
from zoo.nn import ProductKeyMemory, SpanAttention, build_mask, distances_of, positions_of

class Places(nn.Module):
    position_tensors = ("table*",)

    def __init__(self, c):
        super().__init__()
        self.tables = nn.Embedding(c.max_seq_len, c.hidden_size)

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.words = nn.Embedding(c.vocab_size, c.hidden_size)
        self.places = Places(c)
        self.distances = nn.Embedding(c.max_seq_len, c.hidden_size // 2)
        self.look = SpanAttention(c.hidden_size, 2, span=c.max_seq_len, ramp=4, initial_span=5.0)
        self.read = ProductKeyMemory(c.hidden_size, num_keys=6, top_k=3, num_heads=2, query_size=8)
        self.head = nn.Linear(c.hidden_size, c.vocab_size)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        places = positions_of(length, total, padding=attention_mask)
        mask = build_mask(length, total, padding=attention_mask, causal=True)
        x = self.words(input_ids) + self.places.tables(places)
        cache = past_key_values[0] if past_key_values is not None else None
        distances = distances_of(length, total, padding=attention_mask)
        x = x + self.look(x, self.distances.weight, distances, mask=mask, cache=cache)
        return self.head(x + self.read(x))
"""
PRESETS = """
schema = 1
[models.others-tiny]
arch = "others"
description = "another's"
tokenizer = "bytes"
"""


@pytest.fixture
def others(install: Callable[..., Any]) -> None:
    files = {"{module}_config.py": CONFIG, "{module}_model.py": MODEL, "presets.toml": PRESETS}
    install("zoo-others", text_generator("others"), files=files)


def test_models_of_plugins_are_drawn(others: None, zoo: Any) -> None:
    assert zoo("build", "others-tiny").status == 0
    stored = load_file("others-tiny/model.safetensors")
    (positions,) = artists(plots.positions("others-tiny"), "map-places.tables.weight")
    assert np.array_equal(positions.get_array(), stored["places.tables.weight"].T)
    (spans,) = artists(plots.spans("others-tiny"), "spans")
    assert np.array_equal(spans.get_array(), [[5.0, 5.0]])
    plot = plots.memory("others-tiny", "abc", head=1)
    assert plot.title == "others-tiny: product-key search in read, head 1, token 2 ('c')"
    (slots,) = artists(plot, "slots")
    assert len(slots.get_offsets()) == 3


@pytest.mark.slow
def test_exports_of_plugins_are_drawn(others: None, zoo: Any) -> None:
    assert zoo("export", "others-tiny", "--onnx", "--quiet").status == 0
    for arguments in (("show", "--of", "parity"), ("show", "--of", "coverage"), ("diff",), ("verify",)):
        file = f"{arguments[-1]}.svg"
        assert zoo(arguments[0], "others-tiny", *arguments[1:], "--figure", file).status == 0
    assert zoo("quantize", "others-tiny", "--dtype", "int8", "--figure", "layers.png").status == 0
    assert zoo("export", "others-tiny", "--onnx", "--attentions", "--quiet").status == 0
    assert zoo("show", "others-tiny", "abc", "--of", "attention", "--figure", "heads.svg").status == 0
    assert zoo("run", "others-tiny", "abc", "--task", "next-token", "--figure", "next.svg").status == 0
