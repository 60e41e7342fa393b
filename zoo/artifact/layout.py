"""The names and purposes of the files in a model directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from zoo.artifact.weights import INDEX, SINGLE

__all__ = [
    "ADAPTER",
    "ADAPTERS",
    "ADAPTER_CONFIG",
    "ATTENTIONS",
    "ATTENTION_INPUTS",
    "CARD",
    "CHAT_TEMPLATE",
    "COMPANIONS",
    "CONFIG",
    "EVIDENCE_NAME",
    "GENERATION",
    "HALVES",
    "INT8_CACHE",
    "INT8_CACHES",
    "LOOP",
    "MANIFEST",
    "PRECISIONS",
    "PREFILL",
    "PREFIXES",
    "PROFILES",
    "PROMPTS",
    "SCHEMA",
    "SENTENCES",
    "SERVING",
    "TARGET_TOKENIZER",
    "TOKENIZER",
    "TOKENIZER_CONFIG",
    "TOKENIZER_FILES",
    "WEB",
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
SENTENCES = "sentence_bert_config.json"
"""The maximum length of the texts of a sentence encoder, as sentence-transformers states it."""
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
    SENTENCES,
    "special_tokens_map.json",
    TARGET_TOKENIZER,
    TOKENIZER_CONFIG,
)
"""Files of the hub's layout that are copied unchanged with a model."""
TOKENIZER_FILES = (TOKENIZER, CHAT_TEMPLATE, "special_tokens_map.json", TARGET_TOKENIZER, TOKENIZER_CONFIG)
"""Files that describe the tokenizer; attaching another tokenizer replaces all of them."""
LOOP = "generate"
"""The variant with a single graph for the whole generation loop, and the name of that graph."""
ATTENTIONS = "attentions"
"""The variant whose graphs also return their attention weights."""
ATTENTION_INPUTS = "attention_inputs"
"""The entry of its evidence that says what the weights are computed from, if the graphs return that too."""
ADAPTERS = "adapters"
"""The variant whose graphs contain low-rank adapters and choose one for each row."""
PROFILES = ("cpu", "cuda")
"""The variants optimised for one execution provider."""
WEB = "web"
"""The variant in operators that onnxruntime-web has WebGPU kernels for."""
SERVING = "serving"
"""The variant with fixed sizes, in which every row has a past of its own."""
PREFILL = "prefill"
"""The graph of that variant that reads several tokens of a row; the declared one reads one token."""
HALVES = ("float16", "bfloat16")
"""The variants in a half-precision dtype, named after it."""
PRECISIONS = (*HALVES, "int8", "int4")
"""The variants with their own weights, such as model.int8.safetensors."""
INT8_CACHE = "int8-cache"
"""The variant with keys and values in int8, and the last part of the names of :data:`INT8_CACHES`."""
INT8_CACHES = {INT8_CACHE: "", **{f"{base}-{INT8_CACHE}": base for base in ("cpu", "int8", "int4")}}
"""The variants with keys and values in int8, each with the variant whose graphs it changes."""
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
    """Return whether a file of this name is part of the model, its manifest, or evidence for an export."""
    return name == MANIFEST or is_own(name) or bool(EVIDENCE_NAME.fullmatch(name))


def is_own(name: str) -> bool:
    """Return whether a file of this name is part of the model itself."""
    return name in (CONFIG, TOKENIZER, CARD, *COMPANIONS) or is_weights(name)
