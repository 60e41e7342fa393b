"""Tokenizers that a user gives: a model's, a file, or the folder of a checkpoint with settings beside the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zoo.artifact import CONFIG, MANIFEST, TOKENIZER
from zoo.artifact.weights import load_json
from zoo.errors import UsageError
from zoo.tokenizers.files.declared import read_declared
from zoo.tokenizers.files.load import BYTES, VOCABULARIES, find_tokenizer, read_tokenizer, write_tokenizer
from zoo.tokenizers.files.settings import BESIDE, SettledTokenizer, read_beside, settle

__all__ = ["given_tokenizer", "write_given"]


def given_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer with the tokens and settings that the files beside a tokenizer.json state.

    A model directory has them in its tokenizer.json already.

    Args:
        source: a tokenizer file, its directory, a model directory, or ``bytes``.

    Raises:
        ArtifactError: the tokenizer is missing or broken, or a file beside it is.
        UsageError: a setting cannot be applied, or the class of the tokenizer is unknown.
    """
    settled = _settled(source)
    return read_tokenizer(os.fspath(source)) if settled is None else settled.backend


def write_given(source: str | os.PathLike[str], target: Path, vocab_size: int | None) -> None:
    """Write the tokenizer that :func:`given_tokenizer` reads as tokenizer.json, as :func:`write_tokenizer` does."""
    settled = _settled(source)
    changed = settled.backend if settled is not None and settled.changed else None
    write_tokenizer(os.fspath(source), target, vocab_size, changed)


def _settled(source: str | os.PathLike[str]) -> SettledTokenizer | None:
    """Return a tokenizer.json or a vocabulary with the files beside it applied; None if there are none, or for another
    format."""
    path = Path(source)
    try:
        is_folder = path.is_dir()
    except OSError:  # a name that no file can have, which the reader reports
        return None
    folder = path if is_folder else path.parent
    if source == BYTES or (folder / MANIFEST).is_file():
        return None
    file = find_tokenizer(path) if is_folder else path
    beside = [name for name in (*BESIDE, CONFIG) if (folder / name).is_file()]
    if file is None or not file.is_file() or not beside:
        return None
    if file.suffix in (".model", ".spm"):
        _require_pieces(file)
    if file.name not in (TOKENIZER, *VOCABULARIES):
        return None
    config = load_json(folder / CONFIG) if CONFIG in beside else {}
    family, overrides = _family(config, folder)
    stated = {key: value for key, value in config.items() if key != "vocab_size"}  # of a model that is not made
    return settle(file, stated, family=family, overrides=overrides, strict=False)


def _require_pieces(path: Path) -> None:
    """Raise :class:`UsageError` for tokens that files declare beside a SentencePiece model that lacks them."""
    tokenizer, where = read_tokenizer(path), path.with_name(BESIDE[0])
    settings, names, added = read_beside(path)
    declared = read_declared(settings, names, added, (), where).all_texts
    missing = [text for text in declared if tokenizer.token_to_id(text) is None]
    if missing:
        shown = ", ".join([*map(repr, missing[:5]), *(["..."] if len(missing) > 5 else [])])
        problem = f"the files beside it declare tokens that the SentencePiece model lacks: {shown}"
        raise UsageError(problem, path, "save tokenizer.json beside it with transformers")


def _family(config: dict[str, Any], folder: Path) -> tuple[str, bool]:
    """Return the class of the tokenizers of a model type, and whether it is used even if another one is declared.

    The class is empty if no importer of zoo knows the type. Raises :class:`UsageError` if no file declares one then.
    """
    from zoo import plugins
    from zoo.registry.spec import load_reference

    model_type = config.get("model_type")
    if model_type is None:
        return "", False
    try:
        plugin, importer = plugins.active().importer(str(model_type), folder / CONFIG)
    except UsageError as error:
        where = folder / BESIDE[0]
        declared = load_json(where) if where.is_file() else {}
        if declared.get("tokenizer_class") or config.get("tokenizer_class"):
            return "", False
        problem = f"zoo does not know how transformers reads the tokenizer of model_type {model_type!r:.80}"
        remedy = "state tokenizer_class, or copy tokenizer.json alone to another folder"
        raise UsageError(problem, where, remedy) from error
    layout = load_reference(importer.layout, plugin)
    return layout.tokenizer, layout.overrides_tokenizer
