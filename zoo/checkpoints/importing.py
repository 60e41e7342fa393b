"""Import of foreign checkpoints. Every tensor must be accounted for, or nothing is written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zoo import plugins
from zoo.artifact import CARD, PROMPTS, TOKENIZER_CONFIG, describe, new_model
from zoo.artifact.card import model_card
from zoo.artifact.prefixes import read_prompts
from zoo.artifact.provenance import Origin, base_name
from zoo.artifact.weights import DTYPES, dtype_name
from zoo.checkpoints.answers import AnswerComparison, ComparedAnswers
from zoo.checkpoints.common import require_tokens
from zoo.checkpoints.companions import write_companions
from zoo.checkpoints.configuration import find_layout, read_configurations
from zoo.checkpoints.files import reading_values, require_own_files
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Comparison, compare
from zoo.checkpoints.quantized import require_plain_weights
from zoo.checkpoints.reader import TensorReader
from zoo.checkpoints.sentences import require_supported
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.tokens import CheckpointTokenizer
from zoo.config import Config
from zoo.contract import Architecture
from zoo.errors import ArtifactError, UsageError, argument
from zoo.models import create, persist
from zoo.models.count import parameter_count
from zoo.models.heads import HeadChange
from zoo.models.tensors import stored_tensors
from zoo.plugins import Plugin
from zoo.registry import ModelSpec, config_class
from zoo.tokenizers.special import check_ids

__all__ = ["Imported", "import_checkpoint"]

_PREPARED = ("images", "sounds")
"""Inputs whose preparation a file of the checkpoint describes."""
_LANGUAGE_MODEL = "language_model"
"""The folder with which a ``Wav2Vec2ProcessorWithLM`` decodes."""
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
    answers: ComparedAnswers
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
    request = _Request(
        name=base_name(target),
        importer=plugin,
        layout=layout,
        owner=owner,
        architecture=architecture,
        config_class=cls,
        values=cls.parse_settings(settings, "--set"),
        task=task,
        dtype=dtype,
        seed=seed,
        allow_missing=allow_missing,
        allow_keys=allow_keys,
    )
    require_plain_weights(checkpoint, allow_keys, layout.widens)
    fitted = _without_wrapper(checkpoint, request.fit)
    checkpoint = fitted.reader.checkpoint
    tokenizer = _checked_tokenizer(checkpoint, request, fitted)
    spec, reader = _of_task(fitted, layout, seed)
    head = HeadChange(tuple(reader.initialised), reader.dropped)
    if strict:
        head.require_none(checkpoint.where)
    description = describe(spec, dtype=dtype_name(reader.dtype))
    notes = [checkpoint.removed] if checkpoint.removed else []
    notes += layout.notes(fitted.spec.config) if layout.notes is not None else []
    named = checkpoint.json(TOKENIZER_CONFIG).get("tokenizer_class")
    if tokenizer is None and named:
        notes.append(f"the tokenizer is left out: zoo reads no file of {named}")
    if spec.task == "ctc-speech-recognition" and (checkpoint.path / _LANGUAGE_MODEL).exists():
        notes.append(f"texts are written without the {_LANGUAGE_MODEL} of the checkpoint")
    with new_model(target, description, force=force) as stage:
        tensors, aliases = stored_tensors(reader.model)
        digest = persist.write_weights(stage, tensors, reader, aliases=aliases, progress=progress)
        surplus = write_companions(stage, checkpoint, fitted.spec, tokenizer, drop_tokens=drop_tokens)
        if surplus is not None:
            notes.append(f"without {len(surplus.tokens)} tokens of the tokenizer that the model lacks: {surplus}")
        dropped = () if surplus is None else surplus.tokens
        answers = AnswerComparison(stage, description, fitted.spec, checkpoint, layout, verify, dropped)
        comparison = _compare(fitted, request, answers, verify)
        notes += [f"{comparison.against} changes {name}, which is as in the file" for name in comparison.altered]
        reasons = answers.found.reasons
        notes += [f"{kind} are prepared by default values: {reasons[kind]}" for kind in _PREPARED if kind in reasons]
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
        card = model_card(spec, description["dtype"], origin, parameter_count(spec))
        (stage / CARD).write_text(card, encoding="utf-8")
    return Imported(spec, head, comparison, answers.found, tuple(notes))


@dataclass(frozen=True)
class _Fitted:
    """A checkpoint as a model of zoo, with the checkpoint's own task."""

    spec: ModelSpec
    other: Config | None
    """The configuration for another task that the user asks for."""
    reader: TensorReader


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the user and the files say about an import."""

    name: str
    """The name of the model."""
    importer: Plugin
    layout: Layout
    owner: Plugin
    """The plugin of the architecture."""
    architecture: Architecture
    config_class: type[Config]
    values: Mapping[str, Any]
    """Values of the configuration from the user."""
    task: str | None
    dtype: str | torch.dtype | None
    seed: int
    allow_missing: Sequence[str]
    allow_keys: Sequence[str]

    def fit(self, checkpoint: Checkpoint) -> _Fitted:
        """Read the configuration, and account for every tensor. Raises as :func:`import_checkpoint`."""
        blamed = plugins.blame(self.importer, f"cannot import {checkpoint.where.name}", fault=ArtifactError)
        with blamed, reading_values(checkpoint.config_file):
            config, other = read_configurations(
                self.layout, checkpoint, self.config_class, self.values, self.task, self.allow_keys
            )
        tokenizer = "file" if CheckpointTokenizer.find(checkpoint, self.layout) is not None else None
        spec = ModelSpec(self.name, self.owner, self.architecture, config, tokenizer=tokenizer)
        _check_size(spec, checkpoint)
        require_tokens(checkpoint, config)
        model = create.build_on_meta(spec, self.dtype or _dtype(checkpoint))
        reader = TensorReader(spec, model, self.layout, checkpoint, self.allow_missing, seed=self.seed)
        return _Fitted(spec, other, reader)


def _checked_tokenizer(checkpoint: Checkpoint, request: _Request, fitted: _Fitted) -> CheckpointTokenizer | None:
    """Return the tokenizer of a checkpoint, if it has one, after the checks of the files beside it."""
    if (checkpoint.path / PROMPTS).exists():
        read_prompts(checkpoint.path / PROMPTS)
    task = (fitted.other or fitted.spec.config).task
    require_supported(checkpoint, task, is_chosen=request.task is not None)
    tokenizer = CheckpointTokenizer.find(checkpoint, request.layout)
    if tokenizer is not None and request.values:
        check_ids(fitted.spec.config, tokenizer.backend, tokenizer.path, request.values)
    return tokenizer


def _of_task(fitted: _Fitted, layout: Layout, seed: int) -> tuple[ModelSpec, TensorReader]:
    """Return the model for the task that the user asks for, and the reader of its tensors."""
    if fitted.other is None:
        return fitted.spec, fitted.reader
    spec = replace(fitted.spec, config=fitted.other)
    model = create.build_on_meta(spec, fitted.reader.dtype)
    return spec, TensorReader(spec, model, layout, fitted.reader.checkpoint, of=fitted.reader, seed=seed)


def _compare(fitted: _Fitted, request: _Request, answers: AnswerComparison, verify: bool | None) -> Comparison:
    """Compare images and tokens, then outputs, then answers with those of the original implementation.

    The model of the checkpoint's own task is compared, because a new head has no original.
    """
    answers.compare_inputs()
    reader = fitted.reader
    initialised = len(reader.initialised)
    comparison = compare(
        ((name, reader(name)) for name in reader.groups),
        fitted.spec,
        reader.model,
        reader.checkpoint,
        request.layout,
        wanted=verify,
        hindrance=f"{initialised} tensors were missing and initialised" if initialised else None,
        chosen=request.values,
        then=answers.compare_classes,
    )
    if comparison.reason is None:
        answers.compare_library(reader.model)
    return comparison


def _without_wrapper(checkpoint: Checkpoint, fit: Callable[[Checkpoint], _Fitted]) -> _Fitted:
    """Return the result of ``fit``; if it fails, that without what wrappers add to the names of tensors.

    Raises the error without a change of the names if no change fits, or if several do and lead to different models.
    """
    try:
        return fit(checkpoint)
    except (ArtifactError, UsageError) as error:
        fitted: list[_Fitted] = []
        candidates: list[Checkpoint] = []
        with suppress(ArtifactError):  # the tensors cannot be read
            candidates = list(checkpoint.unwrapped())
        for unwrapped in candidates:
            with suppress(ArtifactError, UsageError):
                fitted.append(fit(unwrapped))
        places = [{ours: place for ours, (_, place) in item.reader.sources.items()} for item in fitted]
        if not fitted or any(other != places[0] for other in places):
            raise error
        return fitted[0]


def _check_size(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise :class:`ArtifactError` for a configuration of far more parameters than the files have, before the model is
    built; otherwise the tensors that do not fit are listed later."""
    stored = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    if spec.cost is not None and spec.cost.parameters > _MAX_RATIO * max(stored, 1):
        what = f"the configuration requires {spec.cost.parameters:,} parameters, but the files have {stored:,}"
        raise ArtifactError(what, checkpoint.config_file, "correct the sizes")


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
