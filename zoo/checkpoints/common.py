"""Configuration keys common to checkpoints of all families: token ids and class labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.artifact import GENERATION
from zoo.artifact.generation_config import chosen_values
from zoo.checkpoints.sentences import stated_activation
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.tokens import CheckpointTokenizer
from zoo.classes import default_names
from zoo.config import Config
from zoo.contract import standard_fields
from zoo.errors import ArtifactError, UsageError
from zoo.tokenizers.files.load import read_tokenizer
from zoo.tokenizers.files.vocabularies import class_files

__all__ = [
    "generation_config",
    "read_common",
    "require_tokens",
    "task_prefixes",
    "write_common",
    "write_token_files",
]

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_CHOSEN_TOKENS = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_MASKS = ("[MASK]", "<mask>")
"""Mask tokens of BERT and RoBERTa."""
_ACTIVATIONS = {
    "Identity": "regression", "Sigmoid": "multi_label_classification", "Softmax": "single_label_classification",
}  # fmt: skip
"""Problem types by the activation that sentence-transformers applies to logits."""
_SPECIAL = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token",
            "mask_token_id": "mask_token"}  # fmt: skip


def read_common(checkpoint: Checkpoint, cls: type[Config], tokenizer: CheckpointTokenizer | None) -> dict[str, Any]:
    """Read the common values of a checkpoint for which zoo's configuration has fields."""
    fields, hub = cls.field_types(), checkpoint.config
    generation, stated = checkpoint.json(GENERATION), _generation_settings(checkpoint)
    values: dict[str, Any] = {}
    for key in _TOKENS:
        value = generation.get(key, stated.get(key))
        if value is not None:
            values[key] = value[0] if isinstance(value, list) and len(value) == 1 else value
    if "mask_token_id" in fields:
        values["mask_token_id"] = _mask_token(tokenizer)
    labels = _labels(hub, checkpoint)
    if hub.get("num_labels") not in (None, len(labels)):  # old files kept the default class names
        if labels not in ((), default_names(len(labels))):
            mismatch = f"id2label has {len(labels)} classes, but num_labels is {hub['num_labels']}"
            raise UsageError(mismatch, checkpoint.config_file)
        values["num_classes"], labels = hub["num_labels"], ()
    elif labels:
        values["num_classes"] = len(labels)
    if labels != default_names(len(labels)):
        values["labels"] = labels
    if (problem := _problem_type(checkpoint, one_class=values.get("num_classes") == 1)) is not None:
        values["problem_type"] = problem
    return {key: value for key, value in values.items() if key in fields}


def write_common(config: Config) -> dict[str, Any]:
    """Return the common values for config.json, from zoo's configuration."""
    hub: dict[str, Any] = {}
    fields = standard_fields(config)
    for key in _TOKENS:
        value = getattr(fields, key)
        if value is not None:
            hub[key] = list(value) if isinstance(value, tuple) else value
    if fields.num_classes is not None:
        labels = fields.labels or default_names(fields.num_classes)
        hub["id2label"] = {str(number): label for number, label in enumerate(labels)}
        hub["label2id"] = {label: number for number, label in enumerate(labels)}
    one_of_one = fields.num_classes == 1 and fields.problem_type == "single_label_classification"
    if fields.problem_type is not None and not one_of_one:  # of a detector, which has the class of no object beside it
        hub["problem_type"] = fields.problem_type
    return hub


def generation_config(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """Return generation_config.json for an old checkpoint whose config.json holds the generation settings.

    The result is empty if there are no such settings or if the checkpoint has the file. It includes the special tokens,
    because libraries that find the file do not look for them elsewhere.
    """
    stated = _generation_settings(checkpoint)
    suppressed = {} if (checkpoint.path / GENERATION).exists() else chosen_values(stated)
    values = {**stated, **write_common(config)}
    return {key: values[key] for key in _TOKENS if values.get(key) is not None} | suppressed if suppressed else {}


def _generation_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of generation in config.json: for an encoder-decoder of two models, the decoder's as well.

    transformers reads the latter where there is no generation_config.json.
    """
    decoder = checkpoint.config.get("decoder")
    parts = [checkpoint.config]
    if isinstance(decoder, dict) and not (checkpoint.path / GENERATION).exists():
        parts = [decoder, checkpoint.config]
    settings: dict[str, Any] = {}
    for part in parts:
        settings |= {key: part[key] for key in _TOKENS if part.get(key) is not None} | chosen_values(part)
    return settings


def require_tokens(checkpoint: Checkpoint, config: Config) -> None:
    """Raise :class:`UsageError` if generation would force or suppress tokens outside the vocabulary."""
    fields = standard_fields(config)
    size = fields.target_vocab_size or fields.vocab_size
    for where, said in (
        (checkpoint.config_file, checkpoint.config),
        (checkpoint.path / GENERATION, checkpoint.json(GENERATION)),
    ):
        for key in _CHOSEN_TOKENS:
            value = said.get(key)
            for token in value if isinstance(value, list) else [value]:
                if size is not None and isinstance(token, int) and token >= size:
                    raise UsageError(f"{key} {token} lies outside vocab_size {size}", where)


def task_prefixes(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the prefixes of ``task_specific_params`` in config.json, as T5 has them, by the name of the task."""
    tasks = checkpoint.config.get("task_specific_params")
    settings = {} if not isinstance(tasks, dict) else tasks
    return {
        str(name): values["prefix"]
        for name, values in settings.items()
        if isinstance(values, dict) and isinstance(values.get("prefix"), str)
    }


def write_token_files(config: Config, tokenizer: Path) -> dict[str, Any]:
    """Return the files that tell libraries how to use a tokenizer.json: objects of JSON, and text."""
    names = {}
    fields = standard_fields(config)
    for key, name in _SPECIAL.items():
        number = getattr(fields, key)
        token = read_tokenizer(tokenizer).id_to_token(number) if isinstance(number, int) else None
        if token is not None:
            names[name] = token
    types = ["token_type_ids"] if fields.type_vocab_size > 1 else []  # not an input by default
    masks = ["attention_mask"] if any(tensor.is_mask for tensor in config.graphs()[0].input_tensors()) else []
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *types, *masks],
    }
    files = {"special_tokens_map.json": names, "tokenizer_config.json": {**described, **names}}
    return {**files, **class_files(tokenizer)}


def _labels(hub: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of classes, in order."""
    names = hub.get("id2label") or {}
    try:
        numbers = sorted(names, key=int)
        if [int(key) for key in numbers] != list(range(len(numbers))):
            problem = f"id2label has the classes {', '.join(map(str, numbers))}, not 0 to {len(numbers) - 1}"
            raise ArtifactError(problem, checkpoint.config_file)
        labels = [names[key] for key in numbers]
    except (TypeError, ValueError) as error:
        raise ArtifactError("id2label does not map numbers to names", checkpoint.config_file) from error
    for label in labels:
        if not isinstance(label, str | int | float):
            raise ArtifactError(f"id2label has {label!r:.40}, which is no name", checkpoint.config_file)
    return tuple(map(str, labels))


def _problem_type(checkpoint: Checkpoint, *, one_class: bool) -> str | None:
    """Return ``problem_type``, or the one that follows from the activation of a cross-encoder, or None."""
    stated: str | None = checkpoint.config.get("problem_type")
    activation, where = stated_activation(checkpoint, one_class=one_class)
    name = str(activation).rpartition(".")[2]
    if activation is None or (name == "Identity" and not one_class):  # the default for several classes of any kind
        return stated
    implied = _ACTIVATIONS.get(name)
    if implied is None:
        activations = ", ".join(_ACTIVATIONS)
        raise UsageError(f"activation {activation!r} is not supported", where, f"known: {activations}")
    if stated not in (None, implied):
        problem = f"problem_type {stated!r} disagrees with activation {activation!r}"
        raise UsageError(problem, where, "correct one of the two")
    return implied


def _mask_token(tokenizer: CheckpointTokenizer | None) -> int | None:
    """Return the id of the mask token, which old files do not name."""
    if tokenizer is None:
        return None
    stated, name = tokenizer.names("mask")
    backend = tokenizer.backend
    names = (name,) if stated else _MASKS
    return next((number for name in names if name and (number := backend.token_to_id(name)) is not None), None)
