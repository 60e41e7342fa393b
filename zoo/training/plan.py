"""The description of a run, as it is stored in an unfinished model directory. Torch-free."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from zoo import plugins
from zoo.artifact import ModelDirectory
from zoo.artifact.weights import load_json
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError, argument, nearest
from zoo.plugins.plain import read_plain
from zoo.registry import load_reference, registry
from zoo.registry.nearby import check_name
from zoo.registry.recipes import TrainingRecipe
from zoo.terminal import is_unicode
from zoo.training.defaults import preset_defaults
from zoo.training.progress import Progress
from zoo.training.settings import CHANGEABLE, INEXACT, LowRankSettings, TrainingSettings

__all__ = ["PLAN", "TrainingPlan", "as_trained", "make_plan"]

PLAN = "training.json"
"""The plan of an unfinished run, or the record of a finished one."""
_SCHEMA = 1
_EXCLUDING = {"max_steps": "epochs", "epochs": "max_steps"}
"""Settings of which one is given."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Everything that determines a run, apart from the code and the contents of files.

    Raises :class:`UsageError` for the name of a file or column that is not UTF-8: the files of the model contain it.
    """

    model: str
    """A preset or a model directory."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's configuration."""
    task: str | None = None
    """The task of the trained model, if it differs from that of ``model``."""
    tokenizer: str | None = None
    objective: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the objective."""
    data: tuple[str, ...]
    """Files, directories, or the name of a data set."""
    validation: tuple[str, ...] = ()
    """The same for evaluations; by default the validation split of a data set."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The name in the data of each column, by role."""
    skip_bad: int = 0
    settings: TrainingSettings
    lora: LowRankSettings | None = None
    """Low-rank adapters to train instead of the model's weights."""
    trackers: tuple[str, ...] = ()
    """Names of trackers of experiments."""
    identity: str = ""
    """Hexadecimal digits by which trackers tell runs apart."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file of data and of the tokenizer, by name."""
    changes: tuple[str, ...] = ()
    """What was changed when the run was continued, for people."""

    def __post_init__(self) -> None:
        for name in (self.model, self.tokenizer or "", *self.data, *self.validation, *self.digests):
            if not is_unicode(name):
                raise UsageError("the name of the file is not UTF-8", name, "rename it")
        for role, name in self.columns.items():
            if not is_unicode(name):
                raise UsageError("the name of the column is not UTF-8", argument(f"{role}_column"), "rename it")

    def changed(
        self, step: int, *, data: Sequence[str] = (), validation: Sequence[str] = (), settings: Mapping[str, Any]
    ) -> Self:
        """Return the plan with other places of the data and other settings, which are recorded as changes.

        Args:
            step: number of steps that are done.
            data: the new places of the same data; by default the old ones.
            validation: the same for the data for evaluations.
            settings: those of :data:`CHANGEABLE`.

        Raises :class:`UsageError` for another setting whose value differs, or for an invalid value.
        """
        new = {key: value for key, value in settings.items() if getattr(self.settings, key) != value}
        if fixed := [key for key in new if key not in CHANGEABLE]:
            remedy = f"start anew with it; these can be changed: {', '.join(CHANGEABLE)}"
            raise UsageError("cannot be changed when training continues", fixed[0], remedy)
        updated = TrainingSettings.from_dict({**self.settings.to_dict(), **new}, "settings")
        texts = []
        for key, value in new.items():
            why = f" ({INEXACT[key]})" if key in INEXACT else ""
            texts.append(f"{key} {value} instead of {getattr(self.settings, key)} from step {step + 1}{why}")
        return replace(
            self,
            data=tuple(data) or self.data,
            validation=tuple(validation) or self.validation,
            settings=updated,
            changes=(*self.changes, *texts),
        )

    def write(self, file: Path, progress: Progress) -> None:
        """Write the plan and what is known of the run so far."""
        content = {"schema": _SCHEMA, "plan": asdict(self), "progress": asdict(progress)}
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> tuple[Self, Progress]:
        """Return the plan of an unfinished run and what :meth:`write` was given.

        Raises :class:`ArtifactError` if the file is malformed.
        """
        content = load_json(file)
        try:
            if content["schema"] != _SCHEMA:
                raise ValueError(f"schema {content['schema']} is unknown")
            plan = read_plain(cls, content["plan"], "the plan")
            if not plan.data:
                raise ValueError("data is empty")
            return plan, read_plain(Progress, content["progress"], "the progress")
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise ArtifactError(f"not the plan of a training run ({error})", file) from error


def make_plan(
    model: str,
    *,
    recipe: TrainingRecipe | None = None,
    texts: Sequence[str] = (),
    settings: Mapping[str, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
    config: Mapping[str, Any] = MappingProxyType({}),
    task: str | None = None,
    tokenizer: str | None = None,
    objective: str | None = None,
    data: Sequence[str] = (),
    validation: Sequence[str] = (),
    columns: Mapping[str, str],
    skip_bad: int = 0,
    lora: LowRankSettings | None = None,
    trackers: Sequence[str] = (),
) -> TrainingPlan:
    """Return the plan of a preset's defaults of training and of a recipe, overridden by what else is given.

    Args:
        model: a preset or a model directory.
        recipe: data and settings.
        texts: ``KEY=VALUE`` settings of training, of the objective or of the model's configuration, in this precedence.
        settings: settings of training; those that are None are not given.
        options: settings of the objective.
        config: values of the model's configuration.
        task: the task of the trained model, if it differs from that of ``model``.
        tokenizer: see :class:`TrainingPlan`.
        objective: its name; by default the first for the task.
        data: see :class:`TrainingPlan`.
        validation: see :class:`TrainingPlan`.
        columns: see :class:`TrainingPlan`.
        skip_bad: see :class:`TrainingPlan`.
        lora: low-rank adapters to train instead of the model's weights, and instead of those of the recipe.
        trackers: see :class:`TrainingPlan`.

    Raises:
        UsageError: a name, key or value is unknown, there is no data, or adapters are wanted for a preset.
    """
    recipe = recipe or TrainingRecipe("", {})
    is_directory = Path(model).is_dir()
    if not is_directory:
        check_name(model)
    spec = ModelDirectory.open(model, weights=False).spec if is_directory else registry().resolve(model)
    task = task or recipe.get("task")
    plugin, declared = plugins.active().objective(objective or recipe.get("objective"), task or spec.task)
    options_class: type[Settings] = load_reference(declared.options, plugin) if declared.options else Settings
    kinds: tuple[type[Settings], ...] = (TrainingSettings, options_class, type(spec.config))
    parts: tuple[dict[str, Any], ...] = tuple(recipe.table(name) for name in ("settings", "options", "config"))
    for key, value in preset_defaults(spec).items():
        place = next((number for number, kind in enumerate(kinds[:2]) if key in kind.field_types()), None)
        if place is not None and _EXCLUDING.get(key) not in parts[place]:  # not that of another objective
            parts[place].setdefault(key, value)
    parts[1].update(options)
    parts[2].update(config)
    for text in texts:
        key = text.partition("=")[0]
        place = next((number for number, kind in enumerate(kinds) if key in kind.field_types()), None)
        if place is None:
            names = {name for kind in kinds for name in kind.field_types()}
            raise UsageError(f"unknown key {key!r}", f"--set {text}", nearest(key, names))
        parts[place].update(kinds[place].parse_settings([text], "--set"))
    stated = {key: value for key, value in settings.items() if value is not None}
    for one, other in _EXCLUDING.items():
        if one in stated and other not in stated:
            parts[0].pop(other, None)
    adapters = lora or _recipe_adapters(recipe)
    if adapters is not None and not is_directory:
        remedy = "train adapters of a model directory"
        raise UsageError(f"{model} is a preset, without weights to adapt", argument("lora"), remedy)
    sources = tuple(data) or tuple(recipe.get("data", ()))
    if not sources:
        raise UsageError("no data", argument("data"), "name files, directories, or a data set")
    return TrainingPlan(
        model=model,
        config=parts[2],
        task=task,
        tokenizer=tokenizer or recipe.get("tokenizer"),
        objective=declared.name,
        options=options_class.from_dict(parts[1], "options").to_dict(),
        data=sources,
        validation=tuple(validation) or (() if data else tuple(recipe.get("validation", ()))),
        columns={**recipe.table("columns"), **columns},
        skip_bad=skip_bad,
        settings=TrainingSettings.from_dict({**parts[0], **stated}, "settings"),
        lora=adapters,
        trackers=tuple(trackers),
        identity=secrets.token_hex(8),
    )


def as_trained(plan: TrainingPlan, recipe: TrainingRecipe | None) -> TrainingPlan:
    """Return a plan with the options, the batch size and the length of its model's own training.

    Those that a recipe gives stand. The length is that of blocks and of parts of texts; the origin of the model records
    that to which texts were truncated. The plan is returned as it is if the model was not trained for its objective.

    Raises :class:`ArtifactError` if the record of the training is malformed.
    """
    stored = ModelDirectory.open(plan.model, weights=False)
    if PLAN not in stored.files:
        return plan
    content = load_json(stored.file(PLAN))
    recorded = content.get("plan", content)  # the plan of an unfinished run, or the record of a finished one
    recipe = recipe or TrainingRecipe("", {})
    try:
        if recorded["objective"] != plan.objective:
            return plan
        length, record = recorded["settings"].get("max_length"), stored.origin.last_training
        if record is not None and record.max_length is not None:
            length = None
        settings = {
            **plan.settings.to_dict(),
            "batch_size": recorded["settings"]["batch_size"],
            "max_length": length,
            "micro_batch_size": None,
        }
        return replace(
            plan,
            options={**plan.options, **recorded["options"], **recipe.table("options")},
            settings=TrainingSettings.from_dict({**settings, **recipe.table("settings")}, "settings"),
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise ArtifactError(f"not the record of a training run ({error})", stored.path / PLAN) from error


def _recipe_adapters(recipe: TrainingRecipe) -> LowRankSettings | None:
    table = recipe.table("lora")
    return LowRankSettings.from_dict(table, "lora") if table else None
