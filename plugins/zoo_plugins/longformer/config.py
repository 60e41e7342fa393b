"""Configuration of Longformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo_plugins.bert.config import BERTConfig


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(BERTConfig):
    """BERT with Longformer's attention, and one global token by default."""

    attention: Literal["longformer"] = "longformer"
    """How tokens see each other."""
    global_tokens: int = 1
    """The first tokens, which see all and are seen by all."""
