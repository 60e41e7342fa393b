"""The description of a model: architecture, configuration, and the source of each value."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zoo.config import OPTIONAL_MEMBERS, Config
from zoo.contract import Architecture, Graph, near_misses
from zoo.cost import Cost
from zoo.errors import PluginError, UsageError
from zoo.plugins import Plugin, blame

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Assignment", "ModelSpec", "PresetSummary", "config_class", "load_reference"]


def load_reference(reference: str, plugin: Plugin) -> Any:
    """Import ``module:Object``. Any failure is a :class:`PluginError` of the plugin."""
    module, _, name = reference.partition(":")
    with blame(plugin, f"cannot load {reference}"):
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value and the source that set it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class PresetSummary:
    """A preset's entry in a listing."""

    name: str
    architecture: str
    task: str
    parameters: int | None
    """From a closed form, or counted for a filter by size; otherwise None."""
    plugin: Plugin
    description: str
    source: str | None
    """Published weights on the hub, as in the preset file."""


@dataclass(frozen=True)
class ModelSpec:
    """The complete description of a model, sufficient to build it and to explain each value."""

    name: str
    plugin: Plugin
    architecture: Architecture
    config: Config
    description: str = ""
    tokenizer: str | None = None
    source: str | None = None
    """Published weights of a preset: ``OWNER/NAME@REVISION`` on the hub."""
    origins: Mapping[str, Sequence[Assignment]] | None = None
    """All values assigned to each key, in order; the last one applies."""
    training: Mapping[str, Sequence[Assignment]] = field(default_factory=dict)
    """The same for a preset's defaults of training. Values are as written: see ``zoo.training.defaults``."""

    @cached_property
    def cost(self) -> Cost | None:
        """Parameters and FLOPs in closed form, or None if the architecture does not provide them."""
        with blame(self.plugin, f"cannot compute the cost of {self.name}", fault=UsageError):
            return self.config.cost()

    @cached_property
    def task(self) -> str:
        """The task that the model's configuration declares."""
        with blame(self.plugin, f"cannot read the task of {self.name}", fault=UsageError):
            return self.config.task

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs of the model's export, with keys and values of all positions in every layer of a past."""
        return tuple(graph.without_windows() for graph in self.windowed_graphs)

    @cached_property
    def windowed_graphs(self) -> tuple[Graph, ...]:
        """The same with the windows that the configuration declares: see :class:`zoo.KeyValues`."""
        with blame(self.plugin, f"cannot declare the graphs of {self.name}", fault=UsageError):
            return tuple(self.config.graphs())

    def model_class(self) -> type[nn.Module]:
        """Import the model's class, and with it torch."""
        cls: type[nn.Module] = load_reference(self.architecture.model, self.plugin)
        return cls


def config_class(plugin: Plugin, architecture: Architecture) -> type[Config]:
    """Import the configuration class of an architecture.

    Raises :class:`PluginError` if it is none, or has a misspelt member.
    """
    cls = load_reference(architecture.config, plugin)
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        raise PluginError(f"{plugin}: {architecture.config} is not a subclass of zoo.Config")
    authored = [base for base in cls.__mro__ if not base.__module__.startswith(("zoo.", "builtins"))]
    names = {name for base in authored for name in vars(base)} - {field.name for field in fields(cls)}
    for name, member in near_misses(names, OPTIONAL_MEMBERS):
        remedy = f"rename it to {member}, or to a name less similar to that"
        raise PluginError(f"{plugin}: zoo does not read {cls.__qualname__}.{name}", None, remedy)
    return cls
