"""The model that checks look at, and what several of them need of it, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from zoo import plugins
from zoo.contract import Architecture, Graph
from zoo.errors import UsageError, nearest
from zoo.plugins import Plugin
from zoo.registry import ModelSpec, Summary, config_class, registry

if TYPE_CHECKING:
    from torch import nn
    from zoo_export.parity import Report

__all__ = ["Subject", "declared", "find_subject"]


@dataclass(frozen=True)
class Subject:
    """One model of an architecture. Checks change nothing of it."""

    spec: ModelSpec

    @property
    def plugin(self) -> Plugin:
        """The architecture's provider."""
        return self.spec.plugin

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs."""
        return self.spec.graphs

    @cached_property
    def longest(self) -> int:
        """Tokens in the longest input: ``max_seq_len``, or what the comparison of exports takes where there is none."""
        from zoo_export.grid import DEFAULT_MAX

        return int(getattr(self.spec.config, "max_seq_len", DEFAULT_MAX))

    @cached_property
    def exact(self) -> nn.Module:
        """The model in float64 with noise on every weight, in evaluation mode."""
        from zoo.testing.compute import perturb

        model = self.build().double()
        perturb(model)
        return model

    def build(self, *, seed: int = 0, dtype: str = "float32") -> nn.Module:
        """A fresh model in evaluation mode."""
        from zoo import models

        return models.build(self.spec, seed=seed, dtype=dtype)

    @cached_property
    def onnx(self) -> dict[str, bytes] | Exception:
        """Every graph by its name as ONNX, pointing nowhere yet, or why the model cannot be exported."""
        from zoo_export.exporter import Options, unlinked_graphs

        try:
            return unlinked_graphs(self.spec, "float32", Options())
        except Exception as error:
            return error

    @cached_property
    def report(self) -> Report | Exception | None:
        """How the comparison of the ONNX graphs came out, or why it could not be made; None without graphs."""
        from zoo_export.parity import compare

        from zoo.errors import ZooError

        if isinstance(self.onnx, Exception):
            return None
        from zoo.testing.compute import stored_model

        try:
            with stored_model(self, self.build()) as (stored, graphs):
                return compare(stored, graphs)
        except ZooError as error:
            return error


def declared(name: str) -> Architecture:
    """The architecture of that name, or of the preset of that name."""
    if _is_architecture(name):
        return plugins.active().architecture(name)[1]
    return registry().resolve(name).architecture


def _is_architecture(name: str) -> bool:
    """Whether it is one, or else a preset; what is neither is a :class:`UsageError`."""
    architectures = {*plugins.active().architecture_names(), *plugins.active().qualified_names()}
    presets = set(registry().names())
    if name not in architectures and name.rpartition(":")[2] not in presets:
        raise UsageError(f"no architecture or model {name!r}", None, nearest(name, architectures | presets))
    return name in architectures


def find_subject(name: str) -> Subject:
    """The model of a preset; of an architecture its smallest preset, or its defaults where it has none.

    Raises :class:`zoo.UsageError` for an unknown name, and :class:`zoo.PluginError` for what its plugin does wrong.
    """
    known = registry()
    if not _is_architecture(name):
        return Subject(known.resolve(name))
    plugin, architecture = plugins.active().architecture(name)
    found = [
        item
        for item in known.search(architecture=architecture.name)
        if isinstance(item, Summary) and item.plugin is plugin
    ]
    if found:
        return Subject(known.resolve(_smallest(found)))
    with plugins.blame(plugin, f"cannot configure {architecture.name}"):
        config = config_class(plugin, architecture).from_dict({}, architecture.name)
    return Subject(ModelSpec(architecture.name, plugin, architecture, config))


def _smallest(found: Sequence[Summary]) -> str:
    """The preset of the fewest parameters, which are counted where no closed form tells and there is a choice."""

    def size(item: Summary) -> int:
        return registry().resolve(item.name).parameters() if item.parameters is None else item.parameters

    return found[0].name if len(found) == 1 else min(found, key=size).name
