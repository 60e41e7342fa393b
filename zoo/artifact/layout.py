"""The names and purposes of the files in a model directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from zoo.artifact.weights import INDEX, SINGLE

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "CARD",
    "CHAT_TEMPLATE",
    "COMPANIONS",
    "CONFIG",
    "EVIDENCE_NAME",
    "GENERATION",
    "MANIFEST",
    "PREFIXES",
    "PROMPTS",
    "RECORDED",
    "SCHEMA",
    "SENTENCES",
    "SIGNATURE",
    "TARGET_TOKENIZER",
    "TOKENIZER",
    "TOKENIZER_CONFIG",
    "TOKENIZER_FILES",
    "export_file",
    "is_own",
    "is_reserved",
    "is_weights",
    "write_json",
]

CONFIG = "config.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CARD = "README.md"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""The files of the PEFT library, of low-rank adapters without their base model."""
GENERATION = "generation_config.json"
PREFIXES = "task_prefixes.json"
"""Texts that a checkpoint expects before a source, by the name of the task."""
PROMPTS = "config_sentence_transformers.json"
"""Texts that a sentence encoder expects before its inputs, as sentence-transformers states them."""
RECORDED = "recorded"
"""First part of the names of files with samples of comparisons."""
SENTENCES = "sentence_bert_config.json"
"""The maximum length of the texts of a sentence encoder, as sentence-transformers states it."""
SIGNATURE = "model.sig"
"""A signature of all other files, in the format of model-signing. The manifest, which it covers, does not list it."""
TOKENIZER_CONFIG = "tokenizer_config.json"
TARGET_TOKENIZER = "target_tokenizer.json"
"""The tokenizer of target texts, if it is not that of the sources."""
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (
    CHAT_TEMPLATE,
    GENERATION,
    PREFIXES,
    PROMPTS,
    "preprocessor_config.json",
    "processor_config.json",
    SENTENCES,
    "special_tokens_map.json",
    TARGET_TOKENIZER,
    TOKENIZER_CONFIG,
)
"""Files of the hub's layout that are copied unchanged with a model."""
TOKENIZER_FILES = (TOKENIZER, CHAT_TEMPLATE, "special_tokens_map.json", TARGET_TOKENIZER, TOKENIZER_CONFIG)
"""Files that describe the tokenizer; attaching another tokenizer replaces all of them."""
SCHEMA = 1


def write_json(path: Path, data: object) -> None:
    """Write indented JSON, readable by people and in diffs."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export_file(stem: str, variant: str, suffix: str) -> str:
    """Return the name of a file of an export: ``STEM.SUFFIX`` or ``STEM.VARIANT.SUFFIX``."""
    return ".".join(filter(None, (stem, variant, suffix)))


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds the model's tensors, or is the index of their shards."""
    return name in (SINGLE, INDEX) or bool(re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name))


EVIDENCE_NAME = re.compile(r"parity(\.[\w-]+)?\.json|evidence(\.[\w-]+)+\.json")


def is_reserved(name: str) -> bool:
    """Return whether a file of this name is part of the model, its manifest or signature, or evidence for an export."""
    return name in (MANIFEST, SIGNATURE) or is_own(name) or bool(EVIDENCE_NAME.fullmatch(name))


def is_own(name: str) -> bool:
    """Return whether a file of this name is part of the model itself."""
    return name in (CONFIG, TOKENIZER, CARD, *COMPANIONS) or is_weights(name)
