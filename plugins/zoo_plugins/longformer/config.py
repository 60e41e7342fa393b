"""Configuration of Longformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo_plugins.bert.config import BERTConfig


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(BERTConfig):
    """BERT with Longformer's attention, by default with one global token."""

    attention: Literal["longformer"] = "longformer"
    """Kind of attention."""
    global_tokens: int = 1
    """Number of leading tokens that see all tokens and are seen by all."""
