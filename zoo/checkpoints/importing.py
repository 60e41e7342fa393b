"""Import of foreign checkpoints. Every tensor must be accounted for, or nothing is written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zoo import plugins
from zoo.artifact import (
    CARD,
    COMPANIONS,
    GENERATION,
    PREFIXES,
    PROMPTS,
    SENTENCES,
    TARGET_TOKENIZER,
    TOKENIZER,
    TOKENIZER_CONFIG,
    describe,
    new_model,
    write_json,
)
from zoo.artifact.card import model_card
from zoo.artifact.prefixes import read_prompts
from zoo.artifact.provenance import Origin, base_name
from zoo.artifact.weights import DTYPES, dtype_name
from zoo.checkpoints.answers import AnswerComparison, Answers
from zoo.checkpoints.common import generation_config, read_common, require_tokens, task_prefixes
from zoo.checkpoints.files import require_own_files
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Comparison, compare
from zoo.checkpoints.quantized import require_plain_weights
from zoo.checkpoints.reader import TensorReader
from zoo.checkpoints.sentences import encoder_settings, require_supported
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.tokens import CheckpointTokenizer
from zoo.classes import ClassifierConfig
from zoo.config import Config
from zoo.contract import standard_fields
from zoo.errors import ArtifactError, PluginError, UsageError, Wording, argument
from zoo.models import create, persist
from zoo.models.count import parameter_count
from zoo.models.heads import HeadChange
from zoo.models.tensors import stored_tensors
from zoo.plugins import Plugin
from zoo.reading import read_bytes
from zoo.registry import ModelSpec, config_class, load_reference
from zoo.tokenizers.inputs import segments_of
from zoo.tokenizers.load import write_tokenizer
from zoo.tokenizers.sentencepiece import MARIAN
from zoo.tokenizers.special import check_ids
from zoo.tokenizers.surplus import without_tokens

__all__ = ["Imported", "find_layout", "import_checkpoint", "read_configuration"]

_MAX_RATIO = 100
"""Parameters of a configuration per element of the files, beyond which the two cannot belong together."""


@dataclass(frozen=True)
class Imported:
    """The result of importing a checkpoint."""

    spec: ModelSpec
    head: HeadChange
    """Tensors that were initialised, and tensors of the checkpoint that the model does not have."""
    comparison: Comparison
    """Comparison with the original implementation, or why there is none."""
    answers: Answers
    """Comparison from text to answer, and what could not be compared."""
    notes: tuple[str, ...] = ()
    """What was changed to read the checkpoint, as recorded in the origin of the model."""


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    name: str | None = None,
    revision: str | None = None,
    model_type: str | None = None,
    task: str | None = None,
    seed: int = 0,
    strict: bool = False,
    dtype: str | torch.dtype | None = None,
    settings: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_keys: Sequence[str] = (),
    drop_tokens: bool = False,
    verify: bool | None = None,
    force: bool = False,
    progress: persist.Progress | None = None,
) -> Imported:
    """Read a checkpoint and write a model directory.

    Tensors are read and written one at a time.

    Args:
        source: a directory in the hub's layout, or a file of tensors.
        target: the model directory to create.
        name: hub id of the source, recorded as its origin; by default the last part of its path.
        revision: commit of the hub id.
        model_type: the importer; by default ``model_type`` of config.json.
        task: the task of the model, by default that of the checkpoint's class. The trunk is kept bit for bit. A head
            that the checkpoint has for the task is used, otherwise one is initialised; other tensors are dropped.
        seed: for the tensors of a new head.
        strict: refuse to drop and to initialise tensors.
        dtype: convert the weights to this dtype; by default their dtype is kept.
        settings: ``KEY=VALUE`` of zoo's configuration, for values that the checkpoint lacks.
        allow_missing: initialise missing tensors whose name, in the checkpoint or in zoo, matches these patterns.
        allow_keys: ignore unknown keys of config.json that match these patterns.
        drop_tokens: leave out added tokens of the tokenizer whose ids lie beyond the rows of the embedding.
        verify: compare outputs, tokens and answers with those of the original; by default if that is installed.
        force: replace an existing model directory.
        progress: called with the number of weight bytes written so far and in total.

    Raises:
        UsageError: there is no importer for this model type, a configuration value is not understood, or ``strict``
            refuses tensors; all such tensors are listed.
        ArtifactError: a file is missing or invalid or a link out of the checkpoint, or tensors are missing, unexpected
            or of the wrong shape; all such tensors are listed.
        ParityError: outputs, tokens or answers differ from those of the original.
    """
    source, target = Path(source), Path(target)
    checkpoint = Checkpoint.open(source)
    require_own_files(checkpoint.path)
    model_type = model_type or checkpoint.model_type
    plugin, becomes, layout = find_layout(model_type, checkpoint.config_file)
    owner, architecture = plugins.active().architecture(becomes)
    cls = config_class(owner, architecture)
    chosen = cls.parse_settings(settings, "--set")
    require_plain_weights(checkpoint, allow_keys)

    def fit(checkpoint: Checkpoint) -> tuple[ModelSpec, Config | None, TensorReader]:
        """Return the description of the model, its configuration for another task, and the reader of its tensors."""
        blamed = plugins.blame(plugin, f"cannot import {source.name}", fault=ArtifactError)
        with blamed, _reading(checkpoint.config_file):
            config, moved = _configurations(layout, checkpoint, cls, chosen, task, allow_keys)
        has_tokenizer = CheckpointTokenizer.find(checkpoint, layout) is not None
        own = ModelSpec(base_name(target), owner, architecture, config, tokenizer="file" if has_tokenizer else None)
        _check_size(own, checkpoint)
        require_tokens(checkpoint, config)
        model = create.build_on_meta(own, dtype or _dtype(checkpoint))
        return own, moved, TensorReader(own, model, layout, checkpoint, allow_missing, seed=seed)

    own, moved, whole = _without_wrapper(checkpoint, fit)
    notes = [whole.checkpoint.removed] if whole.checkpoint.removed else []
    notes += layout.notes(own.config) if layout.notes is not None else []
    checkpoint, config, original, read = whole.checkpoint, own.config, whole.model, whole
    if (checkpoint.path / PROMPTS).exists():
        read_prompts(checkpoint.path / PROMPTS)
    require_supported(checkpoint, (moved or config).task, is_chosen=task is not None)
    tokenizer = CheckpointTokenizer.find(checkpoint, layout)
    if tokenizer is not None and chosen:
        check_ids(config, tokenizer.backend, tokenizer.path, chosen)
    spec, model = own, original
    if moved is not None:
        spec = replace(own, config=moved)
        model = create.build_on_meta(spec, read.dtype)
        read = TensorReader(spec, model, layout, checkpoint, of=whole, seed=seed)
    head = HeadChange(tuple(read.initialised), read.dropped)
    if strict:
        head.require_none(checkpoint.where)
    description = describe(spec, dtype=dtype_name(read.dtype))
    with new_model(target, description, force=force) as stage:
        tensors, aliases = stored_tensors(model)
        digest = persist.write_weights(stage, tensors, read, aliases=aliases, progress=progress)
        surplus = None
        if tokenizer is not None:
            size, segments = standard_fields(config).vocab_size, segments_of(own.graphs[0])
            surplus = tokenizer.write(stage / TOKENIZER, size, segments=segments, drop_tokens=drop_tokens)
            if tokenizer.path.name == MARIAN[0]:
                size = standard_fields(config).target_vocab_size
                write_tokenizer(tokenizer.path.with_name(MARIAN[1]), stage / TARGET_TOKENIZER, size)
        for companion in COMPANIONS:
            if _has(checkpoint, companion):
                (stage / companion).write_bytes(read_bytes(checkpoint.path / companion))
        if not (stage / SENTENCES).exists() and (sentences := encoder_settings(checkpoint)[0]):
            write_json(stage / SENTENCES, sentences)  # from a file of an older name
        if surplus is not None:
            notes.append(f"without {len(surplus.tokens)} tokens of the tokenizer that the model lacks: {surplus}")
            for companion in (TOKENIZER_CONFIG, "special_tokens_map.json"):
                if (stage / companion).exists():
                    write_json(stage / companion, without_tokens(checkpoint.json(companion), surplus.tokens))
        if generation := generation_config(checkpoint, config):
            write_json(stage / GENERATION, generation)
        if not (stage / PREFIXES).exists() and (prefixes := task_prefixes(checkpoint)):
            write_json(stage / PREFIXES, prefixes)
        dropped = () if surplus is None else surplus.tokens
        answers = AnswerComparison(stage, description, own, checkpoint, verify, dropped)
        answers.compare_tokens()
        missing = f"{len(whole.initialised)} tensors were missing and initialised" if whole.initialised else None
        weights = ((name, whole(name)) for name in whole.groups)
        comparison = compare(
            weights,
            own,
            original,
            checkpoint,
            layout,
            wanted=verify,
            hindrance=missing,
            chosen=chosen,
            then=answers.compare_classes,
        )
        if comparison.reason is None:
            answers.compare_library(original)
        origin = Origin(
            kind="imported",
            source=name or base_name(source),
            revision=revision,
            format=model_type,
            license=checkpoint.license,
            # The reason for a missing comparison may quote another library, and with it local paths.
            comparison=str(comparison) if comparison.reason is None else "not compared with the original",
            answers=answers.found.recorded,
            seed=seed if head.new else None,
            changes=(*notes, *head.changes(), *([f"converted to {dtype_name(dtype)}"] if dtype else [])),
            weights=digest,
        )
        description["origin"] = origin.to_dict()
        (stage / CARD).write_text(
            model_card(spec, description["dtype"], origin, parameter_count(spec)), encoding="utf-8"
        )
    return Imported(spec, head, comparison, answers.found, tuple(notes))


Fitted = tuple[ModelSpec, Config | None, TensorReader]


def _without_wrapper(checkpoint: Checkpoint, fit: Callable[[Checkpoint], Fitted]) -> Fitted:
    """Return the result of ``fit``; if it fails, that without what wrappers add to the names of tensors.

    Raises the error without a change of the names if no change fits, or if several do and lead to different models.
    """
    try:
        return fit(checkpoint)
    except (ArtifactError, UsageError) as error:
        found, candidates = [], []
        with suppress(ArtifactError):  # the tensors cannot be read
            candidates = list(checkpoint.unwrapped())
        for unwrapped in candidates:
            with suppress(ArtifactError, UsageError):
                found.append(fit(unwrapped))
        places = [{ours: place for ours, (_, place) in reader.sources.items()} for *_, reader in found]
        if not found or any(other != places[0] for other in places):
            raise error
        return found[0]


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Blame a file for exceptions of code that computes with its values: they may have any type."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactError(f"has a value that cannot be read ({type(error).__name__}: {error})", file) from error


def _check_size(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise :class:`ArtifactError` for a configuration of far more parameters than the files have, before the model is
    built; otherwise the tensors that do not fit are listed later."""
    stored = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    if spec.cost is not None and spec.cost.parameters > _MAX_RATIO * max(stored, 1):
        what = f"the configuration requires {spec.cost.parameters:,} parameters, but the files have {stored:,}"
        raise ArtifactError(what, checkpoint.config_file, "correct the sizes")


def _has(checkpoint: Checkpoint, companion: str) -> bool:
    """Return whether a checkpoint has a companion file with content; JSON must be valid."""
    if companion.endswith(".json"):
        return bool(checkpoint.json(companion))
    return (checkpoint.path / companion).is_file()


def _configurations(
    layout: Layout,
    checkpoint: Checkpoint,
    cls: type[Config],
    chosen: Mapping[str, Any],
    task: str | None,
    allow_keys: Sequence[str],
) -> tuple[Config, Config | None]:
    """Return the configuration of the checkpoint's own task, and that for another task or None."""
    if task is None:
        return read_configuration(layout, checkpoint, cls, chosen=chosen, allow_keys=allow_keys), None
    where = checkpoint.config_file
    cls.check_field("task", task, argument("task", task))
    head = {key: value for key, value in chosen.items() if key in cls.head_fields and key != "task"}
    shared = {key: value for key, value in chosen.items() if key not in head}
    own, stated = _read_values(layout, checkpoint, cls, shared, allow_keys)
    moved = own.with_task(task, head, where)
    if layout.read_extra is not None and task != own.task:  # where a layout keeps the pooler depends on the task
        extra = layout.read_extra(checkpoint, {**own.to_dict(), "task": task})
        left = [key for key in cls.head_fields if key not in head and getattr(moved, key) == getattr(own, key)]
        moved = moved.with_task(task, {key: extra[key] for key in left if key in extra and key != "task"}, where)
    if task == own.task and not head.keys() & {"num_classes", "problem_type"}:
        _require_problem_type(own, stated, where)
    return own, moved if moved != own else None


def find_layout(model_type: str | None, where: object) -> tuple[Plugin, str, Layout]:
    """Return the plugin that imports a model type, the name of the resulting architecture, and the layout."""
    plugin, importer = plugins.active().importer(model_type, where)
    layout = load_reference(importer.layout, plugin)
    if not isinstance(layout, Layout):
        raise PluginError(f"{plugin}: {importer.layout} is not a zoo.checkpoints.Layout")
    return plugin, importer.architecture, layout


def read_configuration(
    layout: Layout,
    checkpoint: Checkpoint,
    cls: type[Config],
    *,
    chosen: Mapping[str, Any] | None = None,
    allow_keys: Sequence[str] = (),
) -> Config:
    """Read zoo's configuration from a checkpoint; ``chosen`` values from the user take precedence.

    Raises:
        UsageError: a value is missing or not understood, or the checkpoint does not say whether the single number of
            its head is a probability.
    """
    config, stated = _read_values(layout, checkpoint, cls, chosen or {}, allow_keys)
    _require_problem_type(config, stated, checkpoint.config_file)
    return config


def _read_values(
    layout: Layout, checkpoint: Checkpoint, cls: type[Config], chosen: Mapping[str, Any], allow_keys: Sequence[str]
) -> tuple[Config, str | None]:
    """Read zoo's configuration, and the problem type that is stated or None."""
    known = {**read_common(checkpoint, cls, CheckpointTokenizer.find(checkpoint, layout)), **chosen}
    values = layout.read_config(checkpoint, allowed=allow_keys, chosen=known)
    return cls.from_dict(values, checkpoint.config_file), values.get("problem_type")


def _require_problem_type(config: Config, stated: str | None, where: object) -> None:
    """Raise :class:`UsageError` if a head has one class and no problem type is stated."""
    one = isinstance(config, ClassifierConfig) and config.num_classes == 1 and config.problem_type is not None
    if one and stated is None:  # transformers trains for regression; its pipelines take a sigmoid
        names = "multi_label_classification for a probability (sigmoid), regression for a number"
        remedy = Wording(f"pass settings=['problem_type=NAME']: {names}", f"pass --set problem_type=NAME: {names}")
        raise UsageError("the head has one class, but no problem_type is stated", where, remedy)


def _dtype(checkpoint: Checkpoint) -> str:
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype.is_floating_point}
    names = {dtype_name(dtype) for dtype in dtypes}
    if not names:
        raise ArtifactError("none of the weights has a floating-point dtype", checkpoint.where)
    if len(names) != 1 or not names <= set(DTYPES):
        raise UsageError(
            f"the weights have dtypes {', '.join(sorted(names))}",
            checkpoint.where,
            argument("dtype", text="choose one with {}"),
        )
    return names.pop()
