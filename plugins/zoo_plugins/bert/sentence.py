"""Directories of sentence-transformers: an encoder's checkpoint plus pooling and normalisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo import ArtifactError, UsageError
from zoo.checkpoints import Checkpoint

__all__ = ["sentence_encoder", "sentence_files"]

_POOLING = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip
_MODULES = ("Transformer", "Pooling", "Normalize")


def sentence_encoder(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return task, pooling and normalisation of a sentence-transformers directory; empty for other directories.

    Raises :class:`UsageError` for unsupported modules and poolings.
    """
    pooling = checkpoint.json("1_Pooling/config.json")
    if not pooling:
        return {}
    where = checkpoint.path / "1_Pooling/config.json"
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise UsageError(f"pooling {', '.join(modes)} is not supported", where, f"known: {', '.join(_POOLING)}")
    modules = _modules(checkpoint.path / "modules.json")
    unknown = [module for module in modules if module not in _MODULES]
    if unknown:
        what = f"the module {unknown[0]} is not supported"
        raise UsageError(what, checkpoint.path / "modules.json", f"known: {', '.join(_MODULES)}")
    prompt = checkpoint.json("config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        stated = checkpoint.path / "config_sentence_transformers.json"
        remedy = "set it to null, and write the prompt before each text"
        raise UsageError(f"default_prompt_name {prompt!r} is not supported", stated, remedy)
    return {"task": "sentence-embedding", "pooling": _POOLING[modes[0]], "normalize": "Normalize" in modules}


def sentence_files(c: Any) -> Mapping[str, Any]:
    """Return the files that describe a sentence encoder to sentence-transformers; none for other tasks.

    The configuration has the fields ``hidden_size``, ``pooling`` and ``normalize``.
    """
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
    """Return the class names listed in modules.json."""
    try:
        return [str(entry["type"]).rpartition(".")[2] for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ArtifactError("not a list of modules of sentence-transformers", path) from error
