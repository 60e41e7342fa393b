"""Configuration of Linformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zoo_plugins.bert.config import BERTConfig


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(BERTConfig):
    """BERT with Linformer's attention. All other fields are BERT's."""

    attention: Literal["linformer"] = "linformer"
    """Kind of attention."""
