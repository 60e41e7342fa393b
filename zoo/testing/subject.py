"""The model under test, with objects that several checks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zoo import plugins
from zoo.contract import Architecture, Graph
from zoo.errors import UsageError, nearest
from zoo.models.count import parameter_count
from zoo.plugins import Plugin
from zoo.registry import ModelSpec, PresetSummary, config_class, registry

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Subject", "declared", "find_subject"]


@dataclass(frozen=True)
class Subject:
    """The model under test. Checks must not modify it."""

    spec: ModelSpec
    shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Results shared between checks, by name."""
    values: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Stored values, by the tensor's first name, that replace those of the constructor where the shapes agree."""
    special: tuple[int, ...] = ()
    """Token ids to place among the random ones of inputs."""
    dtype: str = "float32"
    """The dtype that its code is also checked for."""

    @property
    def plugin(self) -> Plugin:
        """The plugin that provides the architecture."""
        return self.spec.plugin

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs, with keys and values of all positions in every layer of a past."""
        return self.spec.graphs

    @property
    def windowed(self) -> tuple[Graph, ...]:
        """The declared graphs with windows, which limit the past of layers; the same as ``graphs`` without any."""
        return self.spec.windowed_graphs

    @cached_property
    def longest(self) -> int:
        """Maximum input length, as in the comparison of exports."""
        from zoo.probe.grid import longest_length

        return longest_length(self.spec.config, self.graphs)

    @cached_property
    def exact(self) -> nn.Module:
        """The model in float64 and evaluation mode, with noise added to every weight."""
        from zoo.probe.module import perturb

        model = self.build().double()
        perturb(model)
        return model

    def build(self, *, seed: int = 0, dtype: str = "float32") -> nn.Module:
        """Build a new model in evaluation mode."""
        from zoo.models import create, persist

        model = create.build(self.spec, seed=seed, dtype=dtype)
        if self.values:
            persist.fill(model, self._fitting(model))
        return model

    def _fitting(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the stored values that fit a model, by name."""
        from zoo.models.tensors import tensor_groups

        for name, (tensor, _) in tensor_groups(model).items():
            value = self.values.get(name)
            if value is not None and value.shape == tensor.shape:
                yield name, value.detach().to(tensor.dtype, copy=True)


def declared(name: str) -> Architecture:
    """Return the architecture of that name, or of the preset of that name."""
    if _is_architecture(name):
        return plugins.active().architecture(name)[1]
    return registry().resolve(name).architecture


def _is_architecture(name: str) -> bool:
    """Whether the name is an architecture's rather than a preset's. Raises :class:`UsageError` if it is neither."""
    architectures = {*plugins.active().architecture_names(), *plugins.active().qualified_names()}
    presets = set(registry().names())
    if name not in architectures and name.rpartition(":")[2] not in presets:
        raise UsageError(f"no architecture or model {name!r}", None, nearest(name, architectures | presets))
    return name in architectures


def find_subject(name: str) -> Subject:
    """Return the subject for a preset, or for an architecture's smallest preset, or its defaults if it has no presets.

    Raises :class:`zoo.UsageError` for an unknown name, and :class:`zoo.PluginError` for faults of its plugin.
    """
    presets = registry()
    if not _is_architecture(name):
        return Subject(presets.resolve(name))
    plugin, architecture = plugins.active().architecture(name)
    summaries = [
        item
        for item in presets.search(architecture=architecture.name)
        if isinstance(item, PresetSummary) and item.plugin is plugin
    ]
    if summaries:
        return Subject(presets.resolve(_smallest(summaries)))
    with plugins.blame(plugin, f"cannot configure {architecture.name}"):
        config = config_class(plugin, architecture).from_dict({}, architecture.name)
    return Subject(ModelSpec(architecture.name, plugin, architecture, config))


def _smallest(found: Sequence[PresetSummary]) -> str:
    """Return the preset with the fewest parameters, counting those without a closed form if there are several."""

    def size(item: PresetSummary) -> int:
        return parameter_count(registry().resolve(item.name)) if item.parameters is None else item.parameters

    return found[0].name if len(found) == 1 else min(found, key=size).name
