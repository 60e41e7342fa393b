"""Candidates for the arguments of commands, which shells complete with Tab. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from zoo import plugins
from zoo.config import Settings
from zoo.registry import ModelSpec, load_reference, registry
from zoo.registry.recipes import recipe_names

__all__ = [
    "complete_architectures",
    "complete_directories",
    "complete_models",
    "complete_offers",
    "complete_plugins",
    "complete_presets",
    "complete_recipes",
    "complete_settings",
    "complete_sources",
    "complete_tasks",
    "complete_training_settings",
    "complete_variants",
]

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]


def _completer(candidates: Callable[[click.Context, str], Iterable[CompletionItem[str]]]) -> Completer:
    """Return a function for click's ``shell_complete``, which has no candidates where it fails."""

    @wraps(candidates)
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        try:
            return list(candidates(ctx, incomplete))
        except Exception:  # a message would be printed into the command line that is being typed
            return []

    return complete


def _starting(incomplete: str, names: Iterable[str]) -> list[CompletionItem[str]]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _preset_names(incomplete: str) -> list[str]:
    """Return the names of presets, qualified by a distribution once that is typed, and the prefixes of libraries."""
    presets = registry()
    names = presets.qualified_names() if ":" in incomplete else presets.names()
    architectures = (item for plugin in presets.plugins.loaded() for item in plugin.architectures)
    libraries = {f"{item.library}:" for item in architectures if item.library}
    return [*names, *(libraries - {incomplete})]


def _directories(incomplete: str) -> tuple[list[str], list[str]]:
    """Return the model directories and the other directories whose paths start with a text."""
    from zoo.artifact.layout import CONFIG, MANIFEST

    start = os.path.split(incomplete)[1]
    parent = incomplete[: len(incomplete) - len(start)]
    models: list[str] = []
    others: list[str] = []
    with os.scandir(Path(parent).expanduser()) as entries:
        for entry in entries:
            if entry.name.startswith(start) and entry.name.startswith(".") <= start.startswith(".") and entry.is_dir():
                is_model = all(os.path.isfile(os.path.join(entry.path, name)) for name in (CONFIG, MANIFEST))  # noqa: PTH113, PTH118
                (models if is_model else others).append(parent + entry.name)
    return sorted(models), sorted(others)


def _paths(incomplete: str, names: Iterable[str], kind: str) -> list[CompletionItem[str]]:
    """Return model directories, then names, then other directories; without the first two, leave it to the shell."""
    models: list[str] = []
    others: list[str] = []
    with contextlib.suppress(OSError):
        models, others = _directories(incomplete)
    named = [item for item in _starting(incomplete, names) if item.value not in models]
    if not models and not named:
        return [CompletionItem(incomplete, type=kind)]
    return [*map(CompletionItem, models), *named, *(CompletionItem(f"{path}/") for path in others)]


@_completer
def complete_presets(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete the name of a preset."""
    return _starting(incomplete, _preset_names(incomplete))


@_completer
def complete_models(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete a model directory or the name of a preset."""
    return _paths(incomplete, _preset_names(incomplete), "dir")


@_completer
def complete_directories(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete a directory, model directories first."""
    return _paths(incomplete, (), "dir")


@_completer
def complete_sources(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete a path, model directories first."""
    return _paths(incomplete, (), "file")


@_completer
def complete_recipes(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete the name of a recipe for training."""
    return [
        CompletionItem(name, help=text or None) for name, text in recipe_names().items() if name.startswith(incomplete)
    ]


def complete_offers(kind: Literal["engines", "exporters", "importers", "objectives", "trackers"]) -> Completer:
    """Return a function that completes the name of what plugins offer."""

    @_completer
    def complete(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
        return _starting(
            incomplete, {item.name for plugin in plugins.active().loaded() for item in getattr(plugin, kind)}
        )

    return complete


@_completer
def complete_architectures(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete the name of an architecture."""
    return _starting(incomplete, plugins.active().architecture_names())


@_completer
def complete_plugins(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete the name of a plugin."""
    return _starting(incomplete, {plugin.name for plugin in plugins.active().all})


@_completer
def complete_variants(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete the name of a variant of an export."""
    from zoo.artifact.variants import VARIANTS

    return _starting(incomplete, filter(None, VARIANTS))


@_completer
def complete_tasks(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete a task: one that answers for the model of ``zoo run``, or one of the architecture for other commands."""
    loaded = list(plugins.active().loaded())
    spec = _named_model(ctx)
    if ctx.command.name == "run":
        served = (task for plugin in loaded for task in plugin.tasks)
        return _starting(incomplete, {task.name for task in served if spec is None or task.can_serve(spec.task)})
    architectures = [item for plugin in loaded for item in plugin.architectures]
    known = architectures if spec is None else [spec.architecture]
    return _starting(incomplete, {task for architecture in known for task in architecture.tasks})


@_completer
def complete_settings(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete ``KEY=VALUE`` of the configuration of the model that the command names."""
    spec = _named_model(ctx)
    return [] if spec is None else _settings(incomplete, [type(spec.config)])


@_completer
def complete_training_settings(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem[str]]:
    """Complete ``KEY=VALUE`` of training, of its objective, and of the configuration of the model."""
    from zoo.training.settings import TrainingSettings

    kinds: list[type[Settings]] = [TrainingSettings]
    if (spec := _named_model(ctx)) is not None:
        task = ctx.params.get("task") or spec.task
        plugin, objective = plugins.active().objective(ctx.params.get("objective"), task)
        if objective.options is not None:
            kinds.append(load_reference(objective.options, plugin))
        kinds.append(type(spec.config))
    return _settings(incomplete, kinds)


def _settings(incomplete: str, kinds: Iterable[type[Settings]]) -> list[CompletionItem[str]]:
    """Return the keys, or after ``KEY=`` the values of a field that has few."""
    fields: Mapping[str, Any] = {name: kind for each in kinds for name, kind in each.field_types().items()}
    key, separator, _ = incomplete.partition("=")
    if not separator:
        return _starting(incomplete, (f"{name}=" for name in fields))
    return _starting(incomplete, (f"{key}={value}" for value in _values(fields.get(key))))


def _values(kind: Any) -> list[str]:
    """Return the values of a boolean, a ``Literal``, or a union with one."""
    if kind is bool:
        return ["true", "false"]
    if kind is type(None):
        return ["none"]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return list(map(str, arguments))
    parts = arguments if typing.get_origin(kind) in (typing.Union, type(int | str)) else ()
    return [value for part in parts for value in _values(part)]


def _named_model(ctx: click.Context) -> ModelSpec | None:
    """Return the description of the model that is the command's first argument, or None if it cannot be read."""
    from zoo.cli.model_argument import find_model

    first = next((param for param in ctx.command.params if isinstance(param, click.Argument)), None)
    named = ctx.params.get(first.name or "") if first is not None else None
    if ctx.args:  # click assigns no arguments where the last option lacks its value
        named = ctx.args[0]
    try:
        return find_model(str(named), ())[0] if isinstance(named, str | Path) else None
    except Exception:
        return None
