"""The files of a model directory beside weights and configuration, as an import writes them."""

from __future__ import annotations

from pathlib import Path

from zoo.artifact import (
    CHAT_TEMPLATE,
    COMPANIONS,
    GENERATION,
    PREFIXES,
    PROMPTS,
    SENTENCES,
    TARGET_TOKENIZER,
    TOKENIZER,
    TOKENIZER_CONFIG,
    write_json,
)
from zoo.artifact.prefixes import MATRYOSHKA
from zoo.checkpoints.common import generation_config, task_prefixes
from zoo.checkpoints.sentences import encoder_settings
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.tokens import CheckpointTokenizer
from zoo.contract import standard_fields
from zoo.reading import read_bytes
from zoo.registry import ModelSpec
from zoo.tokenizers.files.load import write_tokenizer
from zoo.tokenizers.files.sentencepiece import MARIAN
from zoo.tokenizers.inputs import segments_of
from zoo.tokenizers.surplus import Surplus, without_tokens

__all__ = ["write_companions"]

_TEMPLATE = "chat_template.json"
"""The file of a processor's chat template in earlier versions of transformers."""


def write_companions(
    stage: Path,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    tokenizer: CheckpointTokenizer | None,
    *,
    drop_tokens: bool,
) -> Surplus | None:
    """Write the tokenizer and the companion files of a checkpoint.

    Args:
        stage: the folder to write to.
        checkpoint: the checkpoint.
        spec: the model, with the task of the checkpoint.
        tokenizer: the tokenizer of the checkpoint, if it has one.
        drop_tokens: leave out added tokens whose ids lie beyond the rows of the embedding.

    Returns:
        the tokens that were left out, if any.
    """
    surplus = None if tokenizer is None else _write_tokenizers(stage, spec, tokenizer, drop_tokens)
    for companion in COMPANIONS:
        if _has(checkpoint, companion):
            (stage / companion).write_bytes(read_bytes(checkpoint.path / companion))
    template = checkpoint.json(_TEMPLATE).get("chat_template")
    if isinstance(template, str) and not (stage / CHAT_TEMPLATE).exists():
        (stage / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    if surplus is not None:
        for companion in (TOKENIZER_CONFIG, "special_tokens_map.json"):
            if (stage / companion).exists():
                write_json(stage / companion, without_tokens(checkpoint.json(companion), surplus.tokens))
    if not (stage / SENTENCES).exists() and (sentences := encoder_settings(checkpoint)[0]):
        write_json(stage / SENTENCES, sentences)  # from a file of an older name
    if stated := {key: checkpoint.config[key] for key in MATRYOSHKA if key in checkpoint.config}:
        write_json(stage / PROMPTS, checkpoint.json(PROMPTS) | stated)
    if generation := generation_config(checkpoint, spec.config):
        write_json(stage / GENERATION, generation)
    if not (stage / PREFIXES).exists() and (prefixes := task_prefixes(checkpoint)):
        write_json(stage / PREFIXES, prefixes)
    return surplus


def _write_tokenizers(
    stage: Path, spec: ModelSpec, tokenizer: CheckpointTokenizer, drop_tokens: bool
) -> Surplus | None:
    """Write the tokenizer, and that of the decoder if it has its own. Returns the tokens that were left out."""
    fields, segments = standard_fields(spec.config), segments_of(spec.graphs[0])
    surplus = tokenizer.write(stage / TOKENIZER, fields.vocab_size, segments=segments, drop_tokens=drop_tokens)
    if tokenizer.path.name == MARIAN[0]:
        target = tokenizer.path.with_name(MARIAN[1])
        write_tokenizer(target, stage / TARGET_TOKENIZER, fields.target_vocab_size)
    return surplus


def _has(checkpoint: Checkpoint, companion: str) -> bool:
    """Return whether a checkpoint has a companion file with content; JSON must be valid."""
    if companion.endswith(".json"):
        return bool(checkpoint.json(companion))
    return (checkpoint.path / companion).is_file()
