"""The model directory: its files, its manifest and the exports in it."""

from __future__ import annotations

from zoo.artifact.coverage import abridged, coverage_summary
from zoo.artifact.description import describe
from zoo.artifact.directory import ModelDirectory, check_model_target, new_model
from zoo.artifact.exports import Export, Record, copy_model, declared_graphs, find_exports, find_records
from zoo.artifact.layout import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTERS,
    ATTENTIONS,
    CARD,
    CHAT_TEMPLATE,
    COMPANIONS,
    CONFIG,
    GENERATION,
    HALVES,
    LOOP,
    MANIFEST,
    PRECISIONS,
    PREFIXES,
    PROFILES,
    SENTENCES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    export_file,
    is_reserved,
    is_weights,
    write_json,
)
from zoo.artifact.manifest import entry_of

__all__ = [
    "ADAPTER",
    "ADAPTERS",
    "ADAPTER_CONFIG",
    "ATTENTIONS",
    "CARD",
    "CHAT_TEMPLATE",
    "COMPANIONS",
    "CONFIG",
    "GENERATION",
    "HALVES",
    "LOOP",
    "MANIFEST",
    "PRECISIONS",
    "PREFIXES",
    "PROFILES",
    "SENTENCES",
    "TOKENIZER",
    "TOKENIZER_CONFIG",
    "TOKENIZER_FILES",
    "Export",
    "ModelDirectory",
    "Record",
    "abridged",
    "check_model_target",
    "copy_model",
    "coverage_summary",
    "declared_graphs",
    "describe",
    "entry_of",
    "export_file",
    "find_exports",
    "find_records",
    "is_reserved",
    "is_weights",
    "new_model",
    "write_json",
]
