"""Truncation of texts to the number of tokens that a model reads."""

from __future__ import annotations

from typing import Any, Literal

from zoo.artifact import SENTENCES, TOKENIZER_CONFIG, ModelDirectory
from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UsageError, Wording

__all__ = ["Truncation", "text_limit"]

_UNLIMITED = 10**9
"""``model_max_length`` from which it means no limit; transformers writes 1e30."""


def text_limit(stored: ModelDirectory, truncate: bool | None) -> int | None:
    """Return the number of tokens to which texts are truncated, special tokens included; None if they are not.

    It is ``max_seq_length`` of a sentence encoder, else ``model_max_length`` of the tokenizer, and at most the number
    of positions.

    Args:
        stored: the model directory.
        truncate: None truncates only for a sentence encoder with sentence_bert_config.json.

    Raises:
        UsageError: truncation is requested, but no file states a length.
        ArtifactError: the stated length is not a positive integer.
    """
    encodes_sentences = SENTENCES in stored.files and stored.spec.task == "sentence-embedding"
    if truncate is False or (truncate is None and not encodes_sentences):
        return None
    stated = _stated(stored, SENTENCES, "max_seq_length") if encodes_sentences else None
    if stated is None:
        stated = _stated(stored, TOKENIZER_CONFIG, "model_max_length")
    positions = getattr(stored.spec.config, "max_seq_len", None)
    bounds = [bound for bound in (stated, positions) if bound is not None and bound < _UNLIMITED]
    if not bounds and truncate is None:
        return None
    if not bounds:
        remedy = f"set model_max_length in {TOKENIZER_CONFIG} of the checkpoint"
        raise UsageError("the model has no maximum length to truncate to", stored.path, remedy)
    return min(bounds)


def _stated(stored: ModelDirectory, name: str, key: str) -> int | None:
    value = load_json(stored.path / name).get(key) if name in stored.files else None
    if isinstance(value, float) and value >= _UNLIMITED:
        return None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ArtifactError(f"{key} must be a positive integer, got {value!r}", stored.path / name)
    return value


class Truncation:
    """Truncates texts, keeping special tokens, and counts those that were too long.

    Of a pair, the longer text loses tokens first.

    Args:
        tokenizer: the tokenizer, which is not modified.
        limit: maximum number of tokens, special tokens included.
        direction: the side on which tokens are removed.
    """

    def __init__(self, tokenizer: Any, limit: int, direction: Literal["left", "right"] = "right") -> None:
        from tokenizers import Tokenizer

        self.limit = limit
        self.count = 0
        """Number of texts that were too long, a pair being one."""
        self._tokenizer: Any = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.enable_truncation(limit, direction=direction)

    def __str__(self) -> str:
        return f"{self.count} {'text' if self.count == 1 else 'texts'} truncated to {self.limit} tokens"

    def encode(self, number: int, *texts: str, special_tokens: bool) -> Any:
        """Return the ``Encoding`` of input ``number``, a text or a pair that is too long."""
        encoded = self._tokenizer.encode(*texts, add_special_tokens=special_tokens)
        if len(encoded.ids) > self.limit:
            what = f"special tokens leave no room for a text of {self.limit} tokens"
            raise ArtifactError(what, f"input {number}", Wording("pass special_tokens=False", "pass --no-special"))
        self.count += 1
        return encoded
