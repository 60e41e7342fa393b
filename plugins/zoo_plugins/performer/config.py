"""Configuration of Performer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo_plugins.bert.config import BERTConfig


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(BERTConfig):
    """BERT with Performer's attention. All other fields are BERT's."""

    attention: Literal["performer"] = "performer"
    """Kind of attention."""
