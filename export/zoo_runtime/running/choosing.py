"""What a session opens: the provider, the export of a model, and the runner of a task."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from zoo import plugins
from zoo.artifact import (
    OPENVINO,
    VARIANTS,
    Export,
    ModelDirectory,
    declared_graphs,
    find_exports,
    precision_variant,
    precisions,
    variant_of,
)
from zoo.artifact.weights import dtype_name
from zoo.errors import ArtifactError, PluginError, UnknownKeyError, UsageError, argument, close_to, nearest
from zoo.plugins import Plugin, ZooWarning
from zoo.registry import load_reference
from zoo_runtime.arguments import check_text
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype, loading_problem
from zoo_runtime.running.context import Internals
from zoo_runtime.running.runner import Runner

if TYPE_CHECKING:
    import torch

__all__ = ["check_export", "chosen_provider", "create_runner", "find_export", "parse_options", "runner_class"]

_OWNERS = 8
"""Most tasks that an error about an option names."""


def chosen_provider(provider: Provider | Literal["auto"], directory: Path) -> Provider:
    """Return a provider, or the one that ``auto`` stands for on this machine: CUDA if it loads, else the CPU."""
    if provider == "auto":
        problem = loading_problem("cuda")
        if problem is None:
            return "cuda"
        warnings.warn(f"running on the CPU ({problem}): {directory}: --provider auto", ZooWarning, stacklevel=3)
        return "cpu"
    names = get_args(Provider)
    if provider not in names:
        raise UsageError(f"unknown provider {provider!r}", None, nearest(str(provider), [*names, "auto"]))
    return provider


def find_export(
    stored: ModelDirectory,
    *,
    provider: Provider,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    task: str | None = None,
) -> Export:
    """Return the export that :func:`zoo_runtime.load_session` opens. It may not exist, or not be verified."""
    if task is not None:
        required = runner_class(task, stored.spec.task)[1].variant
        variant = required if variant is None and dtype is None else variant
    return _choose_export(stored, provider, None if dtype is None else dtype_name(dtype), variant)


def _choose_export(stored: ModelDirectory, provider: Provider, dtype: str | None, variant: str | None) -> Export:
    """Return the requested export, or the best one for the provider."""
    if variant is not None:
        if dtype is not None:
            raise UsageError(f"both variant {variant!r} and dtype {dtype!r}", stored.path, "give only one of them")
        names = {*VARIANTS, *(export.variant for export in find_exports(stored))}
        if variant and variant not in names:
            raise UsageError(f"unknown variant {variant!r}", stored.path, nearest(variant, filter(None, names)))
        declared_graphs(stored.spec, variant)  # raises if the model does not support the variant
        return Export(stored, variant)
    model_dtype = stored.dtype
    if dtype is not None and dtype != model_dtype:
        precise = precision_variant(dtype, provider)
        if precise is None:
            dtypes = [model_dtype, *precisions(provider)]
            on = f" on {OPENVINO}" if provider == OPENVINO else ""
            raise UsageError(f"this model is not available in {dtype!r}{on}", stored.path, nearest(dtype, dtypes))
        return Export(stored, precise)
    variants = (OPENVINO,) if provider == OPENVINO else (provider, "")
    exports = [export for export in (Export(stored, name) for name in variants) if export.exists]
    verified = [export for export in exports if export.is_verified()]
    return (*verified, *reversed(exports), Export(stored, variants[-1]))[0]


def check_export(export: Export, provider: Provider, *, unverified: bool = False) -> None:
    """Raise an error unless an export exists, is unaltered, runs on a provider and, by default, is verified."""
    if (export.traits.provider == OPENVINO) != (provider == OPENVINO):
        if provider == OPENVINO:
            given = argument("provider", provider)
            own = precision_variant(export.traits.precision or "", OPENVINO) or OPENVINO
            command = variant_of(own).command(export.stored.path)
            raise UsageError(f"the variant {export.variant or 'portable'} runs on onnxruntime only", given, command)
        problem = f"the variant {export.variant} runs on {OPENVINO} only"
        raise UsageError(problem, export.stored.path, argument("provider", OPENVINO))
    export.check()
    check_dtype(export.dtype, provider, export.stored.path)
    if not unverified:
        export.check_verified()


def runner_class(task: str, declared: str) -> tuple[Plugin, type[Runner[Any]]]:
    """Return the runner of ``task`` for models that declare the task ``declared``, with the plugin that provides it."""
    check_text("task", task)
    plugin, declaration = plugins.active().task(task, declared)
    cls = load_reference(declaration.run, plugin)
    if not (isinstance(cls, type) and issubclass(cls, Runner)):
        raise PluginError(f"{plugin}: {declaration.run} is not a subclass of zoo_runtime.Runner")
    with plugins.blame(plugin, f"cannot list the options of the task {task}"):
        cls.options.field_types()
    return plugin, cls


def parse_options(task: str, declared: str, texts: Iterable[str]) -> dict[str, Any]:
    """Return the options of ``task`` in settings ``KEY=VALUE``, for models that declare the task ``declared``."""
    _, cls = runner_class(task, declared)
    with _owners_named(cls):
        return cls.options.parse_settings(texts)


@contextmanager
def _owners_named(cls: type[Runner[Any]]) -> Iterator[None]:
    """Name the tasks that have an option which ``cls`` has not, in an error about it."""
    try:
        yield
    except UnknownKeyError as error:
        if close_to(error.key, cls.options.field_types()) is not None:
            raise
        owners = []
        for plugin in plugins.active().loaded():
            for item in plugin.tasks:
                other = load_reference(item.run, plugin)
                if isinstance(other, type) and issubclass(other, Runner) and error.key in other.options.field_types():
                    owners.append(item.name)
        if not owners:
            raise
        remedy = f"it is an option of {', '.join(owners[:_OWNERS])}" + (", ..." if len(owners) > _OWNERS else "")
        raise UsageError(error.what, error.where, remedy) from error


def create_runner(session: Internals, task: str, options: Mapping[str, Any]) -> Runner[Any]:
    """Create the runner of a task on a session, with the given options."""
    plugin, cls = runner_class(task, session.stored.spec.task)
    if session.chat is not None and not cls.chats:
        raise UsageError(f"the task {task} does not read chats", session.path, argument("chat", text="leave out {}"))
    with plugins.blame(plugin, f"cannot prepare the task {task}", fault=ArtifactError):
        where = f"task {task}"
        with _owners_named(cls):
            checked = {key: cls.options.check_field(key, value, where) for key, value in options.items()}
        runner = cls(session, cls.options.from_dict({**cls.defaults(session, checked), **checked}, where))
    runner.plugin = plugin
    return runner
