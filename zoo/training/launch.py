"""The start of training runs, and their continuation. Importing this module imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from zoo import plugins, system
from zoo.artifact import TOKENIZER, ModelDirectory, check_model_target
from zoo.artifact.provenance import Origin, base_name
from zoo.contract import Objective
from zoo.errors import ArtifactError, StorageError, values_of
from zoo.models import create, persist
from zoo.models.attachments import attach, attachments
from zoo.models.heads import retask
from zoo.models.tensors import stored_tensors
from zoo.plugins import Plugin
from zoo.registry import ModelSpec
from zoo.registry.recipes import find_recipe
from zoo.tokenizers.tokenizer import Tokenizer
from zoo.training.adapters.low_rank import Adapters, adapt
from zoo.training.cache import Progress
from zoo.training.data.labels import classes_of
from zoo.training.data.sources import Source
from zoo.training.findings import class_counts, classes_note, warn_of
from zoo.training.loop import Trainer
from zoo.training.plan import PLAN, TrainingPlan, make_plan
from zoo.training.processes import ALONE, Processes
from zoo.training.run import Outcome, Run, remove_leftovers
from zoo.training.settings import LowRankSettings
from zoo.training.setup import (
    data_digests,
    find_sources,
    fit_tokenizer,
    load_model,
    make_criterion,
    model_tokenizer,
    options_of,
    read_data,
    trainable,
)
from zoo.training.state import STATE
from zoo.training.tracking import Trackers

__all__ = ["resume", "start", "train"]


def start(
    plan: TrainingPlan,
    directory: Path,
    *,
    force: bool = False,
    processes: Processes = ALONE,
    progress: Progress | None = None,
) -> Run:
    """Prepare a run and write its first checkpoint, with the weights before training.

    Raises:
        UsageError: a setting is invalid, or the target exists.
        ArtifactError: the data cannot be read, or holds unusable rows.
        PluginError: no plugin, or more than one, provides the model or the objective.
    """
    settings, trackers = plan.settings, Trackers(plan.trackers)
    release = _lock(directory, processes)
    if processes.count > 1 and settings.micro_batch_size is None:
        share = -(-settings.batch_size // processes.count)
        plan = replace(plan, settings=replace(settings, micro_batch_size=share))
    if processes.count > 1 and plan.settings.fsdp:
        if processes.is_first:
            release()
            start(plan, directory, force=force, progress=progress).release()
        processes.wait()
        return resume(directory, processes=processes, progress=progress)
    fitted = fit_tokenizer(plan)
    spec, model, origin = load_model(plan, fitted.values)
    declared = {**plan.config, **fitted.values}
    if plan.task is not None:
        declared["task"] = plan.task
    plugin, objective = plugins.active().objective(plan.objective, str(declared.get("task", spec.task)))
    sources = find_sources(plan, objective)
    declared |= classes_of(spec, declared, objective, sources[0])
    retasked = retask(spec, model, declared, plan.settings.seed)
    persist.fill(
        create.build_on_meta(retasked.spec), stored_tensors(retasked.model)[0].items()
    )  # it can be loaded again
    origin = replace(origin, changes=(*origin.changes, *retasked.head.changes()))
    spec = replace(retasked.spec, name=base_name(directory))
    tokenizer = model_tokenizer(plan, spec, retasked.model)
    adapters = adapt(plan, spec, retasked.model, retasked.head.new)
    digests = data_digests(sources, tokenizer) | (adapters.digests() if adapters is not None else {})
    plan = replace(plan, objective=objective.name, digests=digests)
    parts = (plugin, objective, sources, tokenizer, origin, adapters, processes, progress, trackers, release)
    run = _make(plan, spec, retasked.model, directory, *parts)
    run.notes = (*([fitted.note] if fitted.note else []), *run.notes)
    has_tokenizer = TOKENIZER in attachments(retasked.model).files
    run.begin(plan.tokenizer or (None if has_tokenizer else spec.tokenizer), force=force)
    return run


def resume(
    directory: Path,
    *,
    data: Sequence[str] = (),
    validation: Sequence[str] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
    processes: Processes = ALONE,
    progress: Progress | None = None,
) -> Run:
    """Continue an unfinished run from its last checkpoint.

    Args:
        directory: the model directory.
        data: where the data is now, if it was moved or renamed.
        validation: the same for the data for evaluations.
        settings: settings that change, of :data:`zoo.training.settings.CHANGEABLE`.
        processes: those that share the run.
        progress: called with the number of rows read.

    Raises:
        UsageError: another setting would change.
        ArtifactError: the directory holds no unfinished run, or the data has changed since it was started.
    """
    release = _lock(directory, processes)
    stored = ModelDirectory.open(directory)
    if STATE not in stored.files:
        remove_leftovers(stored)
        raise ArtifactError("holds no unfinished training", directory, "start one without --resume")
    plan, so_far = TrainingPlan.read(stored.file(PLAN))
    plan = plan.changed(so_far.step, data=data, validation=validation, settings=settings)
    trackers = Trackers(plan.trackers)
    copy = not (plan.settings.fsdp and processes.count > 1)  # or each process copies its part
    if plan.lora is None:
        model, adapters = trainable(persist.load_directory(stored), copy=copy), None
    else:
        spec, base, _ = load_model(plan, {}, copy=copy)
        retasked = retask(spec, base, stored.spec.config.to_dict(), plan.settings.seed)
        model = attach(retasked.model, persist.read_companions(stored))
        adapters = adapt(plan, stored.spec, model, retasked.head.new)
    plugin, objective = plugins.active().objective(plan.objective, stored.spec.task)
    sources = find_sources(plan, objective)
    tokenizer = model_tokenizer(replace(plan, tokenizer=None), stored.spec, model)
    digests = data_digests(sources, tokenizer) | (adapters.digests() if adapters is not None else {})
    same = _without_names if data or validation else dict
    now, before = same(digests), same(plan.digests)
    changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    if changed:
        what = f"changed since training began: {', '.join(changed)}"
        raise ArtifactError(what, directory, "restore it, name its new place with --data, or start anew")
    plan = replace(plan, digests=digests)
    with values_of(directory / PLAN):
        origin = Origin.from_dict(so_far.origin)
        options_of(plan, plugin, objective)
    parts = (plugin, objective, sources, tokenizer, origin, adapters, processes, progress, trackers, release)
    run = _make(plan, stored.spec, model, directory, *parts)
    run.restore(so_far)
    return run


def _without_names(digests: Mapping[str, str]) -> dict[str, str]:
    """Return digests with the types of files in place of their names, such as ``data 0 *.txt``."""
    unnamed = {}
    for key, digest in digests.items():
        part, _, rest = key.partition(" ")
        number, _, name = rest.partition(" ")
        unnamed[f"{part} {number} *{Path(name).suffix.lower()}" if number.isdecimal() and name else key] = digest
    return unnamed


def _make(
    plan: TrainingPlan,
    spec: ModelSpec,
    model: nn.Module,
    directory: Path,
    plugin: Plugin,
    objective: Objective,
    sources: tuple[Source, Source | None],
    tokenizer: Tokenizer | None,
    origin: Origin,
    adapters: Adapters | None,
    processes: Processes,
    progress: Progress | None,
    trackers: Trackers,
    release: Callable[[], None],
) -> Run:
    criterion = make_criterion(plan, spec, plugin, objective, tokenizer)
    with processes.first():
        data = [
            read_data(plan, spec, plugin, objective, criterion, source, tokenizer, progress)
            for source in sources
            if source is not None
        ]
    if processes.is_first:
        warn_of(data[0].facts, sources[0].name)
    owner = spec.plugin if plugin.built_in else plugin
    trainer = Trainer(
        model,
        criterion,
        data[0].examples,
        plan.settings,
        validation=data[1].examples if len(data) > 1 else None,
        processes=processes,
        guard=lambda: plugins.blame(owner, f"cannot train {spec.architecture.name}"),
    )
    run = Run(plan, spec, trainer, directory, data[0], sources[0].name, origin, adapters, trackers, release)
    run.classes = class_counts(spec.config, data[0])
    run.notes = (classes_note(run.classes),) if run.classes else ()
    return run


def _lock(directory: Path, processes: Processes) -> Callable[[], None]:
    """Keep other processes from training in a directory. Returns a function that lets them again.

    Raises :class:`StorageError` if a run is in progress there.
    """
    release = system.lock_name(f"training {directory.resolve()}") if processes.is_first else lambda: None
    if release is None:
        raise StorageError("another run trains in this directory", directory, "wait until it ends")
    return release


def train(
    model: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    recipe: str | None = None,
    validation: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    objective: str | None = None,
    task: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    skip_bad: int = 0,
    lora: LowRankSettings | None = None,
    trackers: Sequence[str] = (),
    force: bool = False,
    **settings: Any,
) -> Outcome:
    """Train a preset or a model directory, and write a model directory.

    An interrupted run leaves its last checkpoint in the directory; ``zoo train DIRECTORY --resume`` continues it.

    Args:
        model: a preset or a model directory.
        directory: the target; it must not exist unless ``force``.
        data: files, directories, or the name of a data set; by default those of the recipe.
        recipe: data and settings from a table ``[recipes.NAME]``.
        validation: data for evaluations; by default the validation split of a data set.
        objective: its name; by default the first one for the task.
        task: the task of the trained model, if it differs from that of ``model``.
        tokenizer: ``bytes``, or the path of a tokenizer.json or of a vocabulary; by default the model's own.
        columns: the name in the data of each column that is not named after its role.
        options: settings of the objective.
        config: values that replace those of the model's configuration.
        skip_bad: number of unusable rows that may be left out.
        lora: low-rank adapters to train instead of the weights of a model directory. The result is a directory of
            adapters, see :func:`merge_adapter`.
        trackers: names of trackers of experiments, such as ``tensorboard``.
        force: replace an existing model directory.
        settings: see :class:`TrainingSettings`.

    Raises:
        UsageError: a name, key or value is unknown, or the target exists.
        ArtifactError: the data cannot be read, or holds unusable rows.
        TrainingError: a loss or a gradient is not finite; the last checkpoint stands.
    """
    check_model_target(Path(directory), force=force)
    plan = make_plan(
        os.fspath(model),
        recipe=find_recipe(recipe) if recipe is not None else None,
        settings=settings,
        options=options or {},
        config=config or {},
        task=task,
        tokenizer=os.fspath(tokenizer) if tokenizer is not None else None,
        objective=objective,
        data=_paths(data),
        validation=_paths(validation),
        columns=columns or {},
        skip_bad=skip_bad,
        lora=lora,
        trackers=trackers,
    )
    return start(plan, Path(directory), force=force).train()


def _paths(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    return [os.fspath(item) for item in ([given] if isinstance(given, str | os.PathLike) else given)]
