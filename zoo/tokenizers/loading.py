"""The tokenizer of a model directory, or one that has no model."""

from __future__ import annotations

import os
from pathlib import Path

from zoo.artifact import MANIFEST, TARGET_TOKENIZER, TOKENIZER, ModelDirectory
from zoo.errors import UsageError
from zoo.tokenizers.files.given import given_tokenizer
from zoo.tokenizers.files.load import read_tokenizer
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["load_tokenizer", "model_tokenizer", "open_tokenizer"]


def load_tokenizer(
    directory: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    special_tokens: bool = True,
    truncate: bool | int | None = None,
    stride: int | None = None,
) -> Tokenizer:
    """Load the tokenizer of a model. Neither torch nor an export is needed.

    Args:
        directory: a model directory.
        tokenizer: a tokenizer file, or ``bytes``, to use instead of the model's own.
        special_tokens: whether to put special tokens, such as [CLS] and [SEP], around texts.
        truncate: truncate long texts, with a warning, to a number of tokens, or if True to the length with which zoo
            trained the model, else to ``max_seq_length`` of a sentence encoder, else to ``model_max_length`` of the
            tokenizer, and at most to the positions; otherwise texts longer than the positions are errors. By default
            only for models that zoo trained on truncated texts, and for sentence encoders with
            sentence_bert_config.json. A model that generates text loses the first tokens, others the last.
        stride: divide long texts into windows that share this number of tokens, instead of truncating them; requires a
            length, as for ``truncate``.

    Raises:
        ArtifactError: not a model directory, or the model has no tokenizer.
        UsageError: there is no length to truncate to, or it exceeds the positions.

    >>> import zoo
    >>> model = zoo.save(zoo.create_model("bert-tiny"), "reader", tokenizer="bytes")
    >>> tokenizer = zoo.load_tokenizer(model)
    >>> tokenizer(["tea", "no"])["attention_mask"]
    array([[1, 1, 1],
           [1, 1, 0]])
    """
    stored = ModelDirectory.open(Path(directory), weights=False)
    inputs = TextInputs(stored.spec.graphs, stored.spec.config, stored.path)
    limit = text_limit(stored, truncate)
    if stride is not None and limit is None:
        raise UsageError("windows need a length", "stride", "pass truncate=True, or a number of tokens")
    if stride is not None and stride < 0:
        raise UsageError(f"stride must not be negative, got {stride}")
    read = model_tokenizer(stored, inputs, tokenizer, special_tokens=special_tokens)
    return read.truncating(limit, stride=stride)


def model_tokenizer(
    stored: ModelDirectory,
    inputs: TextInputs,
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    special_tokens: bool = True,
) -> Tokenizer:
    """Return the tokenizer of a model, which does not truncate, with that of its targets.

    Args:
        stored: the model directory.
        inputs: the inputs of the model.
        tokenizer: a tokenizer file, or ``bytes``, to use for sources and targets instead of the model's own.
        special_tokens: whether to put special tokens around texts.

    Raises :class:`ArtifactError` if the model has no tokenizer.
    """
    has_target = tokenizer is None and TARGET_TOKENIZER in stored.files
    target = (
        Tokenizer(read_tokenizer(stored.file(TARGET_TOKENIZER)), special_tokens=special_tokens) if has_target else None
    )
    backend = read_tokenizer(stored.file(TOKENIZER)) if tokenizer is None else given_tokenizer(tokenizer)
    return Tokenizer(backend, inputs, special_tokens=special_tokens, target=target)


def open_tokenizer(source: str | os.PathLike[str], *, special_tokens: bool = True) -> Tokenizer:
    """Load the tokenizer of a model directory as :func:`load_tokenizer` does, or one that has no model.

    Args:
        source: a model directory, a tokenizer file, its directory, or ``bytes``.
        special_tokens: whether to put special tokens around texts.
    """
    if (Path(source) / MANIFEST).is_file():
        return load_tokenizer(source, special_tokens=special_tokens)
    return Tokenizer(given_tokenizer(source), special_tokens=special_tokens)
