"""Directories of sentence-transformers: an encoder's checkpoint, and how its hidden states become one vector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.checkpoints import Checkpoint
from zoo.errors import ArtifactError, UsageError
from zoo_plugins.bert.config import BERTConfig

__all__ = ["sentence_encoder", "sentence_files"]

_POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")


def sentence_encoder(checkpoint: Checkpoint) -> dict[str, Any]:
    """Task, pooling and normalisation, where sentence-transformers wrote the directory.

    Raises :class:`UsageError` for what it can be told to do besides.
    """
    pooling = checkpoint.json("1_Pooling/config.json")
    if not pooling:
        return {}
    where = checkpoint.path / "1_Pooling/config.json"
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise UsageError(f"pooling {', '.join(modes)} is not supported", where, f"known: {', '.join(_POOLING)}")
    modules = _modules(checkpoint.path / "modules.json")
    strange = [module for module in modules if module not in _MODULES]
    if strange:
        what = f"the module {strange[0]} is not supported"
        raise UsageError(what, checkpoint.path / "modules.json", f"known: {', '.join(_MODULES)}")
    return {"task": "sentence-embedding", "pooling": _POOLING[modes[0]], "normalize": "Normalize" in modules}


def sentence_files(c: BERTConfig) -> Mapping[str, Any]:
    """The parts of a sentence encoder, as sentence-transformers lists them; nothing for another task."""
    if c.task != "sentence-embedding":
        return {}
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if c.normalize else [])]
    return {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(parts)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": c.hidden_size,
            **{mode: c.pooling == ours for mode, ours in _POOLING.items()},
        },
    }


def _modules(path: Path) -> list[str]:
    """The classes of what a text goes through."""
    try:
        return [str(entry["type"]).rpartition(".")[2] for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ArtifactError("not a list of modules of sentence-transformers", path) from error
