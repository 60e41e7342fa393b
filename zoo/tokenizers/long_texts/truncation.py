"""The number of tokens to which texts are truncated."""

from __future__ import annotations

from zoo.artifact import SENTENCES, TOKENIZER_CONFIG, ModelDirectory
from zoo.artifact.weights import load_json
from zoo.contract import standard_fields
from zoo.errors import ArtifactError, UsageError
from zoo.terminal import shown

__all__ = ["text_limit", "trained_length", "truncated_texts"]

_UNLIMITED = 10**9
"""``model_max_length`` from which it means no limit; transformers writes 1e30."""


def text_limit(stored: ModelDirectory, truncate: bool | int | None) -> int | None:
    """Return the number of tokens to which texts are truncated, special tokens included; None if they are not.

    It is the length with which zoo trained the model, else ``max_seq_length`` of a sentence encoder, else
    ``model_max_length`` of the tokenizer, and at most the number of positions.

    Args:
        stored: the model directory.
        truncate: None truncates only for a model that zoo trained on truncated texts, and for a sentence encoder with
            sentence_bert_config.json. A number replaces those of the files.

    Raises:
        UsageError: truncation is requested, but no file states a length; or the number is not positive, or exceeds the
            positions.
        ArtifactError: the stated length is not a positive integer.
    """
    positions = standard_fields(stored.spec.config).max_seq_len
    if not isinstance(truncate, int | None):
        raise UsageError(
            f"truncate must be True, False, None or a number of tokens, got {shown(truncate)}", stored.path
        )
    if truncate is not None and not isinstance(truncate, bool):
        if truncate < 1 or (positions is not None and truncate > positions):
            range_ = "be positive" if positions is None else f"be from 1 to the model's {positions} positions"
            raise UsageError(f"truncate must {range_}, got {truncate}", stored.path)
        return truncate
    encodes_sentences = SENTENCES in stored.files and stored.spec.task == "sentence-embedding"
    trained = trained_length(stored)
    if truncate is False or (truncate is None and not encodes_sentences and trained is None):
        return None
    stated = trained
    if stated is None and encodes_sentences:
        stated = _stated(stored, SENTENCES, "max_seq_length")
    if stated is None:
        stated = _stated(stored, TOKENIZER_CONFIG, "model_max_length", "max_len")
    bounds = [bound for bound in (stated, positions) if bound is not None and bound < _UNLIMITED]
    if not bounds and truncate is None:
        return None
    if not bounds:
        remedy = f"set model_max_length in {TOKENIZER_CONFIG} of the checkpoint"
        raise UsageError("the model has no maximum length to truncate to", stored.path, remedy)
    return min(bounds)


def trained_length(stored: ModelDirectory) -> int | None:
    """Return the length to which zoo truncated the texts that it trained the model on; None if it did not."""
    record = stored.origin.last_training
    return None if record is None else record.max_length


def _stated(stored: ModelDirectory, name: str, *keys: str) -> int | None:
    """Return the length that a file states under the first of these keys that it has."""
    content = load_json(stored.path / name) if name in stored.files else {}
    key = next((key for key in keys if key in content), keys[0])
    value = content.get(key)
    if isinstance(value, float) and value >= _UNLIMITED:
        return None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ArtifactError(f"{key} must be a positive integer, got {value!r}", stored.path / name)
    return value


def truncated_texts(count: int, limit: int | None) -> str:
    """Return how many texts were truncated, for a warning."""
    return f"{count:,} {'text' if count == 1 else 'texts'} truncated to {limit:,} tokens"
