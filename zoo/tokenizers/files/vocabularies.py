"""Vocabularies of classes of transformers that do not read tokenizer.json, written from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.artifact import TOKENIZER_CONFIG
from zoo.artifact.weights import load_json
from zoo.tokenizers.files.ctc import CTC_CLASS, ctc_files
from zoo.tokenizers.files.esm import ESM_CLASS, esm_files
from zoo.tokenizers.files.load import read_tokenizer

__all__ = ["class_files"]

_FILES = {CTC_CLASS: ctc_files, ESM_CLASS: esm_files}


def class_files(path: Path) -> dict[str, Any]:
    """Return the files that the class of a tokenizer needs beside tokenizer.json, objects of JSON or text, by name.

    The class is the one that tokenizer_config.json beside it names; most need no other file.
    """
    beside = path.with_name(TOKENIZER_CONFIG)
    settings = load_json(beside) if beside.exists() else {}
    files = _FILES.get(str(settings.get("tokenizer_class")))
    return {} if files is None else files(read_tokenizer(path), settings)
