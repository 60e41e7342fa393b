"""Rotary positions that count padding satisfy the laws, although their tables are rounded to float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import zoo_plugins.llama.model as llama
from zoo.registry import registry
from zoo.testing import Subject, all_checks, run_check

LAWS = ("padding-invariance", "cache")


class TheirPositions(nn.Module):
    """The tables of transformers, computed in float32."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.table = LlamaRotaryEmbedding(LlamaConfig(hidden_size=head_dim, num_attention_heads=1))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cosine, sine = self.table(torch.zeros(1, dtype=dtype), positions)
        return cosine.unsqueeze(1), sine.unsqueeze(1)


def counting(length: int, total: int, *, padding: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    return torch.arange(total - length, total, device=device).unsqueeze(0)


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """A Llama whose positions count padding."""
    monkeypatch.setattr(llama, "positions_of", counting)
    found = Subject(registry().resolve("llama-tiny"))
    found.exact.positions = TheirPositions(found.spec.config.key_size)  # type: ignore[attr-defined]
    return found


def happened(subject: Subject) -> dict[str, str]:
    return {check.name: run_check(check, subject).happened for check in all_checks() if check.name in LAWS}


def test_rounded_tables_are_within_the_tolerance(subject: Subject) -> None:
    assert happened(subject) == dict.fromkeys(LAWS, "")


@pytest.mark.parametrize("size", [1e-2, 1e-5])
def test_absolute_positions_that_count_padding_are_not(
    subject: Subject, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little the outputs depend on them, beyond float32 rounding."""
    rotate: Callable[..., Tensor] = llama.LlamaBlock.forward

    def forward(block: nn.Module, x: Tensor, rotation: tuple[Tensor, Tensor], *rest: object) -> Tensor:
        return rotate(block, x + size * rotation[1][:, 0, :, :1], rotation, *rest)

    monkeypatch.setattr(llama.LlamaBlock, "forward", forward)
    found = happened(subject)
    assert "of its largest value" in found["padding-invariance"]
    assert found["cache"] == ""
