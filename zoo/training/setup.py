"""What a run is made of: the model, its tokenizer, the criterion and the data. Importing this module imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo import plugins
from zoo.artifact import TARGET_TOKENIZER, TOKENIZER, ModelDirectory
from zoo.artifact.provenance import Origin
from zoo.config import Settings
from zoo.contract import Objective, standard_fields
from zoo.errors import UsageError
from zoo.models import create, persist
from zoo.models.attachments import attachments
from zoo.plugins import Plugin
from zoo.registry import ModelSpec, load_reference, registry
from zoo.tokenizers.files.given import given_tokenizer
from zoo.tokenizers.files.load import parse_tokenizer, require_ids
from zoo.tokenizers.library import guarded
from zoo.tokenizers.special import Fit, fit
from zoo.tokenizers.tokenizer import Tokenizer
from zoo.training.cache import SHORTER, Data, Progress, prepare
from zoo.training.criterion import Criterion
from zoo.training.data.saved import saved_splits
from zoo.training.data.sources import Source, find_source
from zoo.training.plan import TrainingPlan
from zoo.version import __version__

__all__ = ["data_digests", "find_sources", "fit_tokenizer", "load_model", "make_criterion",
           "model_tokenizer", "options_of", "read_data", "trainable"]  # fmt: skip


def load_model(
    plan: TrainingPlan, fitted: Mapping[str, Any], *, copy: bool = True
) -> tuple[ModelSpec, nn.Module, Origin]:
    """Return the model to start from, in float32. Weights that are stored so are mapped into memory unless ``copy``.

    ``fitted`` are values of a preset that follow from the tokenizer; see :func:`fit_tokenizer`.
    """
    if Path(plan.model).is_dir():
        stored = ModelDirectory.open(plan.model)
        return stored.spec, trainable(persist.load_directory(stored), copy=copy), stored.origin
    spec = registry().resolve(plan.model, values={**plan.config, **fitted})
    model = create.build(spec, seed=plan.settings.seed, dtype="float32")
    return spec, model, Origin(kind="initialised", seed=plan.settings.seed)


def fit_tokenizer(plan: TrainingPlan) -> Fit:
    """Return the configuration values that follow from the tokenizer of the user's own.

    Raises :class:`UsageError` if it does not fit the weights of a model directory, or as :func:`fit`.
    """
    if not Path(plan.model).is_dir():
        return fit(registry().resolve(plan.model), plan.tokenizer, plan.config, task=plan.task)
    spec = ModelDirectory.open(plan.model, weights=False).spec
    if plan.tokenizer is not None:
        size, remedy = standard_fields(spec.config).vocab_size, "use the model's own, or train a preset"
        require_ids(given_tokenizer(plan.tokenizer), size, plan.tokenizer, remedy)
    return fit(spec, plan.tokenizer, plan.config, task=plan.task, resize=False)


def trainable(model: nn.Module, *, copy: bool = True) -> nn.Module:
    """Return a model in float32, with weights of its own instead of mapped ones if ``copy``."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=copy)
    return model


def find_sources(plan: TrainingPlan, objective: Objective) -> tuple[Source, Source | None]:
    """Return the data to learn from, and that for evaluations."""
    training = find_source(plan.data, objective, plan.columns)
    if plan.validation:
        return training, find_source(plan.validation, objective, plan.columns, split="validation")
    if len(plan.data) == 1 and "validation" in saved_splits(Path(plan.data[0])):
        return training, find_source(plan.data, objective, plan.columns, split="validation")
    provided = {item.name: item for _, item in plugins.active().datasets()}
    dataset = provided.get(training.name)
    if dataset is not None and "validation" in dataset.splits and not Path(plan.data[0]).exists():
        return training, find_source(plan.data, objective, plan.columns, split="validation")
    return training, None


def model_tokenizer(plan: TrainingPlan, spec: ModelSpec, model: nn.Module) -> Tokenizer | None:
    """Return the tokenizer that is given, or the model's."""
    if plan.tokenizer is not None:
        return Tokenizer(given_tokenizer(plan.tokenizer))
    content, target = (attachments(model).files.get(name) for name in (TOKENIZER, TARGET_TOKENIZER))
    if content is not None:
        read = None if target is None else Tokenizer(parse_tokenizer(target.decode()))
        return Tokenizer(parse_tokenizer(content.decode()), target=read)
    return Tokenizer(given_tokenizer(spec.tokenizer)) if spec.tokenizer else None


def digest_of(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    parts = [tokenizer] if tokenizer.target is tokenizer else [tokenizer, tokenizer.target]
    with guarded():
        return hashlib.sha256("".join(part.backend.to_str() for part in parts).encode()).hexdigest()


def data_digests(sources: tuple[Source, Source | None], tokenizer: Tokenizer | None) -> dict[str, str]:
    digests = {f"data {name}": digest for name, digest in sources[0].digests.items()}
    if sources[1] is not None:
        digests |= {f"validation {name}": digest for name, digest in sources[1].digests.items()}
    return {**digests, "tokenizer": digest_of(tokenizer)}


def options_of(plan: TrainingPlan, plugin: Plugin, objective: Objective) -> Settings:
    """Return the options of a plan's objective. Raises :class:`UsageError` if they are not valid."""
    options: type[Settings] = load_reference(objective.options, plugin) if objective.options else Settings
    return options.from_dict(plan.options, "options")


def make_criterion(
    plan: TrainingPlan, spec: ModelSpec, plugin: Plugin, objective: Objective, tokenizer: Tokenizer | None
) -> Criterion:
    options = options_of(plan, plugin, objective)
    criterion = load_reference(objective.criterion, plugin)
    with plugins.blame(plugin, f"cannot construct {objective.criterion}"):
        if not issubclass(criterion, Criterion):
            raise TypeError(f"{objective.criterion} is not a zoo.training Criterion")
        limit = _longest_example(plan, spec) if criterion.has_length else 0
        if plan.settings.max_length is not None and not limit:
            raise UsageError(f"objective {objective.name} has no lengths", "max_length", "leave it out")
        try:
            return criterion(spec.config, tokenizer, options, limit)
        except ValueError as error:
            raise UsageError(str(error), f"objective {objective.name}") from error


def _longest_example(plan: TrainingPlan, spec: ModelSpec) -> int:
    """Return the length to which examples are cut, in tokens."""
    longest = standard_fields(spec.config).max_seq_len
    limit = plan.settings.max_length or longest
    if limit is None:
        raise UsageError("the model has no longest input", "max_length", "set max_length")
    if longest is not None and limit > longest:
        raise UsageError(f"max_length {limit} exceeds the model's longest input {longest}", "max_length")
    return limit


def read_data(
    plan: TrainingPlan,
    spec: ModelSpec,
    plugin: Plugin,
    objective: Objective,
    criterion: Criterion,
    source: Source,
    tokenizer: Tokenizer | None,
    progress: Progress | None = None,
    *,
    shorter: str = SHORTER,
) -> Data:
    """Return the examples of a source, from the cache if nothing that determines them has changed.

    ``shorter`` is that of :func:`zoo.training.cache.prepare`.
    """
    key = [
        __version__, plugin.fingerprint, objective.criterion, dict(plan.options), dict(plan.columns),
        criterion.max_length, spec.config.to_dict(), digest_of(tokenizer), dict(source.digests),
    ]  # fmt: skip
    return prepare(
        source.rows, criterion, key, name=source.name, skip_bad=plan.skip_bad, shorter=shorter, progress=progress
    )
