"""A training run: from a plan to a trained model directory, with checkpoints. Importing this module imports torch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from zoo import plugins
from zoo.artifact import CARD, TOKENIZER, ModelDirectory, check_model_target, describe, new_model, write_json
from zoo.artifact.card import adapter_card
from zoo.artifact.layout import CONFIG, SCHEMA
from zoo.artifact.provenance import Origin, Training, base_name
from zoo.contract import Objective
from zoo.errors import ArtifactError
from zoo.models import persist
from zoo.models.attachments import attach, attachments
from zoo.plugins import Plugin
from zoo.registry import ModelSpec
from zoo.registry.recipes import find_recipe
from zoo.training.adapters import Adapters, adapt
from zoo.training.curve import CURVE, draw_curve, training_section
from zoo.training.data import Data, Progress
from zoo.training.heads import retask
from zoo.training.loop import Evaluation, Step, Trainer
from zoo.training.plan import PLAN, Plan, make_plan
from zoo.training.processes import ALONE, Processes
from zoo.training.settings import LowRankSettings
from zoo.training.setup import (
    classes_of,
    data_digests,
    find_sources,
    load_model,
    make_criterion,
    model_tokenizer,
    read_data,
    trainable,
)
from zoo.training.sources import Source
from zoo.training.state import STATE, read_state, write_state
from zoo.version import __version__

__all__ = ["METRICS", "Outcome", "Run", "resume", "start", "train"]

METRICS = "metrics.jsonl"
BEST = "best.safetensors"
"""The trained weights of the best evaluation so far, while the run is unfinished."""
Report = Callable[["Run", Step, Evaluation | None], None]
"""Called after each step that is logged or evaluated."""


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    directory: Path
    steps: int
    """Number of steps done; the number planned unless the run stopped early."""
    kept: int
    """The step whose weights were kept."""
    loss: float
    """Training loss of the last step."""
    evaluation: Evaluation | None
    """The evaluation of the weights that were kept, if there was data for it."""


class Run:
    """A run in progress.

    Args:
        plan: its description.
        spec: the model, for config.json.
        trainer: trains the model.
        directory: the model directory that is written.
        training: the examples.
        name: the name of the data, without a path.
        origin: the origin of the weights before training.
        adapters: the adapters that are trained instead of the model's weights.
    """

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        trainer: Trainer,
        directory: Path,
        training: Data,
        name: str,
        origin: Origin,
        adapters: Adapters | None = None,
    ) -> None:
        self.plan, self.spec, self.trainer, self.directory = plan, spec, trainer, directory
        self.data, self._name, self._origin, self._adapters = training, name, origin, adapters
        self.metrics: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        """The step, the loss and the accuracy of the best evaluation so far."""
        self._worse = 0

    # Checkpoints

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint says of the run so far, apart from tensors."""
        return {"step": self.trainer.done, "best": self.best, "worse": self._worse, "origin": self._origin.to_dict()}

    def _described(self, stage: Path) -> None:
        """Write the files of the model, or of its adapters, to a stage, config.json included."""
        record = Training(objective=self.plan.objective, data=self._name, steps=self.trainer.done)
        origin = self._origin.derive("trained", training=record)
        description = describe(self.spec, dtype="float32")
        model = self.trainer.model
        if self._adapters is None:
            origin = persist.write_model(stage, self.spec, model, origin=origin)
        else:
            persist.write_companions(stage, self.spec, model)
            self._adapters.write(stage, model)
            card = adapter_card(self.spec, origin, self._adapters.base, self.trainer.size)
            (stage / CARD).write_text(card, encoding="utf-8")
            description["adapter"] = self._adapters.record()
        description["origin"] = origin.to_dict()
        write_json(stage / CONFIG, {"schema": SCHEMA, **description})

    def checkpoint(self) -> None:
        """Write the weights and the state of the run to the directory. A crash leaves the old checkpoint or the new."""
        if self.trainer.processes.is_first:
            self._checkpoint()
        self.trainer.processes.wait()

    def _checkpoint(self) -> None:
        with ModelDirectory.open(self.directory, weights=False).adding(action="trained") as stage:
            with self.trainer.averaged():
                self._described(stage)
                if self.best is not None and self.best["step"] == self.trainer.done:
                    weights = {name: value.detach().cpu().contiguous() for name, value in self.trainer.trained()}
                    save_file(weights, stage / BEST)
            write_state(self.trainer, stage / STATE, alone=self._adapters is not None)
            self.plan.write(stage / PLAN, self.progress())
            self._write_metrics(stage)

    def _write_metrics(self, stage: Path) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in self.metrics)
        (stage / METRICS).write_text(lines, encoding="utf-8")

    # The run

    def train(self, report: Report = lambda run, step, evaluation: None) -> Outcome:
        """Do the remaining steps and complete the directory.

        Raises :class:`zoo.training.loop.TrainingError` if training cannot go on; the last checkpoint stands.
        """
        trainer, settings = self.trainer, self.plan.settings
        evaluate_every = settings.evaluate_every or trainer.steps_per_epoch
        checkpoint_every = settings.checkpoint_every or evaluate_every
        step: Step | None = None
        for step in trainer.run():
            last = step.number == trainer.steps
            evaluation = None
            if trainer.validation is not None and (last or step.number % evaluate_every == 0):
                evaluation = self._evaluate()
            stopping = settings.patience is not None and self._worse >= settings.patience
            if last or stopping or evaluation is not None or step.number % settings.log_every == 0:
                self._log(step, evaluation)
                report(self, step, evaluation)
            improved = evaluation is not None and self.best is not None and self.best["step"] == step.number
            if last or stopping or improved or step.number % checkpoint_every == 0:
                self.checkpoint()
            if stopping:
                break
        return self._finish(step)

    def _evaluate(self) -> Evaluation:
        evaluation = self.trainer.evaluate()
        if self.best is None or evaluation.loss < self.best["loss"]:
            self.best, self._worse = {"step": self.trainer.done, **asdict(evaluation)}, 0
        else:
            self._worse += 1
        return evaluation

    def _log(self, step: Step, evaluation: Evaluation | None) -> None:
        row = {"step": step.number, **{key: value for key, value in asdict(step).items() if key != "number"}}
        if evaluation is not None:
            row["evaluation"] = asdict(evaluation)
        self.metrics.append(row)

    def _finish(self, step: Step | None) -> Outcome:
        """Put the weights to keep into the directory, and remove the state."""
        if self.trainer.processes.is_first:
            self._complete()
        self.trainer.processes.wait()
        best = self._kept_evaluation()
        kept = best["step"] if best is not None else self.trainer.done
        loss = step.loss if step is not None else self.metrics[-1]["loss"] if self.metrics else float("nan")
        evaluation = Evaluation(**{key: best[key] for key in ("loss", "accuracy", "targets")}) if best else None
        return Outcome(self.directory, self.trainer.done, kept, loss, evaluation)

    def _kept_evaluation(self) -> dict[str, Any] | None:
        """Return the evaluation whose weights are kept; None if the last weights are, whatever it says."""
        return self.best if self.plan.settings.keep == "best" else None

    def _complete(self) -> None:
        best = self._kept_evaluation()
        directory = ModelDirectory.open(self.directory, weights=False)
        removed = [name for name in (STATE, BEST) if name in directory.files]
        with directory.adding(removed=removed, action="trained") as stage:
            if best is not None and best["step"] != self.trainer.done:
                with safe_open(self.directory / BEST, framework="pt") as reader, torch.no_grad():
                    for name, parameter in self.trainer.trained():
                        parameter.copy_(reader.get_tensor(name))
                self._described(stage)
            else:
                with self.trainer.averaged():
                    self._described(stage)
            record = self._record()
            write_json(stage / PLAN, record)
            self._write_metrics(stage)
            card = stage / CARD
            curve = draw_curve(self.metrics, stage / CURVE) if self.metrics else False
            card.write_text(card.read_text(encoding="utf-8") + training_section(record, curve=curve), encoding="utf-8")

    def _record(self) -> dict[str, Any]:
        """Return the record of the finished run: everything but paths."""
        plan = self.plan
        return {
            "schema": 1,
            "model": base_name(plan.model),
            "objective": plan.objective,
            "options": dict(plan.options),
            "data": self._name,
            "digests": dict(plan.digests),
            "rows": asdict(self.data.facts),
            "settings": plan.settings.to_dict(),
            "lora": plan.lora and plan.lora.to_dict(),
            "steps": self.trainer.done,
            "loss": self.metrics[-1]["loss"] if self.metrics else None,
            "best": self.best,
            "zoo": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }


def start(
    plan: Plan,
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
    settings = plan.settings
    if processes.count > 1 and settings.micro_batch_size is None:
        share = -(-settings.batch_size // processes.count)
        plan = replace(plan, settings=replace(settings, micro_batch_size=share))
    spec, model, origin = load_model(plan)
    declared = dict(plan.config)
    if plan.task is not None:
        declared["task"] = plan.task
    plugin, objective = plugins.active().objective(plan.objective, str(declared.get("task", spec.task)))
    sources = find_sources(plan, objective)
    declared |= classes_of(spec, declared, objective, sources[0])
    found = retask(spec, model, declared, plan.settings.seed)
    if found.fresh or found.dropped:
        changes = [f"fresh {name}" for name in found.fresh] + [f"without {name}" for name in found.dropped]
        origin = replace(origin, changes=(*origin.changes, *changes))
    spec = replace(found.spec, name=base_name(directory))
    tokenizer = model_tokenizer(plan, spec, found.model)
    adapters = adapt(plan, spec, found.model, found.fresh)
    digests = data_digests(sources, tokenizer) | (adapters.digests() if adapters is not None else {})
    plan = replace(plan, objective=objective.name, digests=digests)
    parts = (plugin, objective, sources, tokenizer, origin, adapters, processes, progress)
    run = _make(plan, spec, found.model, directory, *parts)
    if processes.is_first:
        label = plan.tokenizer or (spec.tokenizer if TOKENIZER not in attachments(found.model).files else None)
        if adapters is None:
            persist.save_spec(spec, found.model, directory, tokenizer=label, force=force, origin=origin)
        else:
            with new_model(directory, describe(spec, dtype="float32"), force=force) as stage:
                persist.write_companions(stage, spec, found.model, label)
        attached = attachments(found.model)
        if (directory / TOKENIZER).is_file():
            files = {**attached.files, TOKENIZER: (directory / TOKENIZER).read_bytes()}
            attach(found.model, replace(attached, files=files))
    run.checkpoint()
    return run


def resume(directory: Path, *, processes: Processes = ALONE, progress: Progress | None = None) -> Run:
    """Continue an unfinished run from its last checkpoint.

    Raises:
        ArtifactError: the directory holds no unfinished run, or the data has changed since it was started.
    """
    stored = ModelDirectory.open(directory)
    if STATE not in stored.files:
        raise ArtifactError("holds no unfinished training", directory, "start one without --resume")
    plan, so_far = Plan.read(stored.file(PLAN))
    if plan.lora is None:
        model, adapters = trainable(persist.load_directory(stored)), None
    else:
        spec, base, _ = load_model(plan)
        found = retask(spec, base, stored.spec.config.to_dict(), plan.settings.seed)
        model = attach(found.model, persist.read_companions(stored))
        adapters = adapt(plan, stored.spec, model, found.fresh)
    plugin, objective = plugins.active().objective(plan.objective, stored.spec.task)
    sources = find_sources(plan, objective)
    tokenizer = model_tokenizer(replace(plan, tokenizer=None), stored.spec, model)
    digests = data_digests(sources, tokenizer) | (adapters.digests() if adapters is not None else {})
    names = digests.keys() | plan.digests.keys()
    changed = ", ".join(sorted(name for name in names if digests.get(name) != plan.digests.get(name)))
    if changed:
        raise ArtifactError(f"changed since training began: {changed}", directory, "restore it, or start anew")
    origin = Origin.from_dict(so_far["origin"], directory / PLAN)
    parts = (plugin, objective, sources, tokenizer, origin, adapters, processes, progress)
    run = _make(plan, stored.spec, model, directory, *parts)
    read_state(run.trainer, stored.file(STATE))
    run.best, run._worse = so_far["best"], so_far["worse"]
    lines = (directory / METRICS).read_text(encoding="utf-8").splitlines()
    run.metrics = [json.loads(line) for line in lines]
    return run


def _make(
    plan: Plan,
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
) -> Run:
    criterion = make_criterion(plan, spec, plugin, objective, tokenizer)
    with processes.first():
        data = [
            read_data(plan, spec, plugin, objective, criterion, source, tokenizer, progress)
            for source in sources
            if source is not None
        ]
    validation = data[1].examples if len(data) > 1 else None
    trainer = Trainer(model, criterion, data[0].examples, plan.settings, validation=validation, processes=processes)
    return Run(plan, spec, trainer, directory, data[0], sources[0].name, origin, adapters)


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
    )
    return start(plan, Path(directory), force=force).train()


def _paths(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    return [os.fspath(item) for item in ([given] if isinstance(given, str | os.PathLike) else given)]
