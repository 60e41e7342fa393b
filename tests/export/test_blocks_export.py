"""Exports of models with blocks that no preset has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exported import Builder
from zoo_export.export import export_model

CONFIG = """
from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class NarrowConfig(zoo.Config):
    vocab_size: int = 20
    input_size: int = 6
    output_size: int = 12
    task = "feature-extraction"

    def graphs(self):
        inputs = zoo.token_ids("input_ids", self.vocab_size), zoo.mask("attention_mask")
        output = zoo.floats("last_hidden_state", "batch", "sequence", self.output_size)
        return (zoo.Graph(inputs=inputs, outputs=(output,), causal=True),)
"""
MODEL = """
from torch import nn

from zoo.nn import MultiHeadAttention, build_mask


class Narrow(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.input_size)
        self.attention = MultiHeadAttention(c.input_size, 3, output_size=c.output_size, bias=(True, False, True))

    def forward(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        mask = build_mask(length, length, padding=attention_mask, causal=True, device=input_ids.device)
        return self.attention(self.embedding(input_ids), mask=mask)
"""
PLUGIN = """
import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="narrow",
            tasks=("feature-extraction",),
            config="narrow_config:NarrowConfig",
            model="narrow_model:Narrow",
            reference="none",
        )
    ]
"""


@pytest.mark.slow
def test_attention_between_widths_is_exported(install: Callable[..., Path], zoo: Callable[..., Any]) -> None:
    """Attention from 6 to 12 numbers, with biases on some projections, passes the comparison."""
    install("narrow", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL})
    Path("zoo.toml").write_text('schema = 1\n[models.narrow]\narch = "narrow"\n')
    assert zoo("build", "narrow").status == 0
    assert "verified" in zoo("export", "narrow", "--onnx").out


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["sum", "mean"])
def test_merged_layers_are_exported(exported_build: Builder, merge: str) -> None:
    folder = exported_build("bert-tiny", "feature_layers=-2,-1", f"feature_merge={merge}", noise=True)
    assert export_model(folder).passed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_annotated_norm_is_exported(exported_build: Builder, dtype: str) -> None:
    """In both dtypes, with random weights and biases of the norms."""
    folder = exported_build("bert-tiny", "norm=annotated", "num_layers=1", dtype=dtype, noise=True)
    assert export_model(folder).passed
