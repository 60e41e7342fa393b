"""Presets and architectures resolved into model descriptions, with the origin of every value."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from zoo import __version__, isolation, loading, plugins
from zoo.cache import Memo
from zoo.config import Config
from zoo.contract import Architecture, Graph
from zoo.cost import Cost
from zoo.discovery import DISTRIBUTION
from zoo.errors import PluginError, UsageError, ZooError, nearest
from zoo.plugins import Plugin, Plugins, blame, clash
from zoo.presets import Preset, known_provider, preset_layers, read_presets

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelSpec", "Origin", "Registry", "Summary", "load_reference", "registry"]

DEFAULT = "default"


def load_reference(reference: str, plugin: Plugin) -> Any:
    """Import ``module:Object``. Whatever goes wrong is the plugin's fault and a :class:`PluginError`."""
    module, _, name = reference.partition(":")
    with blame(plugin, f"cannot load {reference}"):
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value was set."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list says of a preset."""

    name: str
    architecture: str
    task: str
    parameters: int | None
    """Known in closed form, or counted because a filter asked."""
    plugin: Plugin
    description: str


@dataclass(frozen=True)
class ModelSpec:
    """A model, fully described: enough to build it, and to say why each value is what it is."""

    name: str
    plugin: Plugin
    architecture: Architecture
    config: Config
    description: str = ""
    tokenizer: str | None = None
    origins: Mapping[str, Sequence[Origin]] | None = None
    """For each key every value it was given, the last of which holds."""

    @cached_property
    def cost(self) -> Cost | None:
        """Closed-form parameters and FLOPs, when the architecture states them."""
        with blame(self.plugin, f"cannot tell the cost of {self.name}"):
            return self.config.cost()

    @cached_property
    def task(self) -> str:
        """What the model is for."""
        with blame(self.plugin, f"cannot tell the task of {self.name}"):
            return self.config.task

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that an export of the model holds."""
        with blame(self.plugin, f"cannot declare the graphs of {self.name}"):
            return tuple(self.config.graphs())

    def parameters(self) -> int:
        """Exact parameter count. Without a closed form the model is built on the meta device."""
        if self.cost is not None:
            return self.cost.parameters
        from zoo.models import build_on_meta, count_parameters

        return count_parameters(build_on_meta(self))

    def model_class(self) -> type[nn.Module]:
        """The model's class. This imports torch."""
        cls: type[nn.Module] = load_reference(self.architecture.model, self.plugin)
        return cls


def config_class(plugin: Plugin, architecture: Architecture) -> type[Config]:
    """The configuration class of an architecture."""
    cls = load_reference(architecture.config, plugin)
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        raise PluginError(f"{plugin}: {architecture.config} is not a subclass of zoo.Config")
    return cls


def _description(entries: Sequence[Preset]) -> str:
    return next((entry.description for entry in reversed(entries) if entry.description), "")


class _Gathered(NamedTuple):
    """Every entry that shapes a preset, the weakest first, and the architecture that it is of."""

    entries: Sequence[Preset]
    plugin: Plugin
    architecture: Architecture


def _make_spec(
    name: str, gathered: _Gathered, settings: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> ModelSpec:
    """What entries, values and settings make of an architecture, each overriding those before it."""
    entries, plugin, architecture = gathered
    short = name.rpartition(":")[2]
    cls = config_class(plugin, architecture)
    origins: dict[str, list[Origin]] = {}
    with blame(plugin, f"cannot configure {short}"):
        for entry in entries:
            for key, value in entry.config.items():
                origins.setdefault(key, []).append(Origin(cls.check_field(key, value, entry.where), entry.where))
        for key, value in (values or {}).items():
            origins.setdefault(key, []).append(Origin(cls.check_field(key, value, name), "argument"))
        for setting in settings:
            key, separator, text = setting.partition("=")
            if not separator:
                raise UsageError(f"{setting!r} is not key=value", "--set")
            origins.setdefault(key, []).append(Origin(cls.parse_setting(key, text), f"--set {setting}"))
        where = " ".join([name, *(f"--set {setting}" for setting in settings)]) if settings else entries[-1].where
        config = cls.from_dict({key: given[-1].value for key, given in origins.items()}, where)
        for key, value in config.to_dict().items():
            origins.setdefault(key, [Origin(value, DEFAULT)])
    return ModelSpec(
        name=short,
        plugin=plugin,
        architecture=architecture,
        config=config,
        description=_description(entries),
        tokenizer=next((entry.tokenizer for entry in reversed(entries) if entry.tokenizer), None),
        origins=origins,
    )


class Registry:
    """Every preset of the built-in file, the plugins, the user and the project, in that order of precedence."""

    def __init__(self, loaded: Plugins) -> None:
        self.plugins = loaded
        own = Plugin("zoo", "zoo", DISTRIBUTION, __version__, built_in=True)
        files = [read_presets(path, label) for path, label in preset_layers()]
        own.presets = files[0]
        self._providers: dict[str, list[Plugin]] = {}
        self._layers: list[Mapping[str, Preset]] = []
        for plugin in (own, *loaded.loaded()):
            self._layers.append(plugin.presets)
            for name in plugin.presets:
                self._providers.setdefault(name, []).append(plugin)
        self._layers += files[1:]

    def names(self) -> list[str]:
        """Every preset's name, sorted."""
        return sorted({name for layer in self._layers for name in layer})

    def resolve(self, name: str, settings: Sequence[str] = (), *, values: Mapping[str, Any] | None = None) -> ModelSpec:
        """Resolve a preset, or ``distribution:preset``, with values and ``key=value`` settings on top.

        Raises :class:`UsageError` for an unknown name, key or value and :class:`PluginError` when no plugin, or
        more than one, provides what is asked for.
        """
        return _make_spec(name, self._gather(name), settings, values)

    def _gather(self, name: str) -> _Gathered:
        """What a preset is made from. No plugin is imported."""
        owner = name.rpartition(":")[0]
        entries = self._chain(name)
        arch, arch_where = next(((entry.arch, entry.where) for entry in reversed(entries) if entry.arch), ("", ""))
        if not arch:
            raise UsageError("no architecture", entries[-1].where, "give it an arch or a base")
        if owner and f"{owner}:{arch}" in self.plugins.qualified_names():
            arch = f"{owner}:{arch}"
        plugin, architecture = self.plugins.architecture(arch, arch_where)
        return _Gathered(entries, plugin, architecture)

    def _chain(self, name: str) -> list[Preset]:
        """Every entry that shapes ``name``, the weakest first: the base's chain, then each layer's own entry."""
        chain: list[Preset] = []
        seen: list[str] = []
        base: str | None = name
        while base is not None:
            if base in seen:
                cycle = " -> ".join((*seen, base))
                raise UsageError(f"presets inherit in a cycle ({cycle})", self._entries(base)[-1].where)
            entries = self._entries(base)
            if not entries:
                where = f"base of {chain[0].where}" if chain else None
                remedy = known_provider(base) or nearest(base, self.names())
                raise UsageError(f"unknown model {base!r}", where, remedy)
            chain, seen = [*entries, *chain], [*seen, base]
            base = next((entry.base for entry in reversed(entries) if entry.base), None)
        return chain

    def _entries(self, name: str) -> list[Preset]:
        owner, _, short = name.rpartition(":")
        providers = self._providers.get(short, [])
        if owner:
            return [plugin.presets[short] for plugin in providers if plugin.distribution == owner]
        if len(providers) > 1:
            raise clash("model", short, providers)
        return [layer[short] for layer in self._layers if short in layer]

    def search(
        self,
        pattern: str = "*",
        *,
        task: str | None = None,
        architecture: str | None = None,
        min_parameters: int | None = None,
        max_parameters: int | None = None,
    ) -> list[Summary | tuple[str, ZooError]]:
        """Presets that match every filter; one that cannot be resolved comes as its name and the reason.

        What is known of a preset from an earlier search holds as long as its values, and its plugin's files, do: then
        no configuration is imported.
        """
        unfiltered = (task, architecture, min_parameters, max_parameters) == (None,) * 4
        found: list[Summary | tuple[str, ZooError]] = []
        for name, summary in self._summarize([name for name in self.names() if fnmatchcase(name, pattern)]).items():
            if isinstance(summary, ZooError):
                if unfiltered:
                    found.append((name, summary))
                continue
            if (min_parameters, max_parameters) != (None, None) and summary.parameters is None:
                summary = replace(summary, parameters=self.resolve(name).parameters())
            if (
                task in (None, summary.task)
                and architecture in (None, summary.architecture)
                and (min_parameters is None or (summary.parameters or 0) >= min_parameters)
                and (max_parameters is None or (summary.parameters or 0) <= max_parameters)
            ):
                found.append(summary)
        return found

    def _summarize(self, names: Sequence[str]) -> dict[str, Summary | ZooError]:
        """Task and size of presets, or why they cannot be had.

        What was found out earlier holds as long as a preset's values, and its plugin's files, do. Otherwise the
        configuration is imported: a third party's in another process, since it may do there what it likes.
        """
        memo = Memo("presets")
        found: dict[str, Summary | ZooError] = {}
        unknown: dict[str, _Gathered] = {}
        for name in names:
            try:
                gathered = self._gather(name)
                size = memo.get(_facts(gathered))
                if size is None and gathered.plugin.built_in:
                    size = memo.put(_facts(gathered), _size(_make_spec(name, gathered)))
                if size is None:
                    unknown[name] = gathered
                else:
                    found[name] = _summary(name, gathered, size)
            except ZooError as error:
                found[name] = error
        jobs = {name: _plain(gathered) for name, gathered in unknown.items()}
        for outcome in isolation.run("zoo.registry:measure", jobs, seconds=loading.seconds()) if jobs else ():
            gathered = unknown[outcome.job]
            name, value = outcome.job, outcome.value
            if outcome.failure is not None:
                found[name] = PluginError(f"{gathered.plugin} cannot configure {name} ({outcome.failure})")
            elif "error" in value:
                found[name] = (UsageError if value["usage"] else PluginError)(value["error"])
            else:
                found[name] = _summary(name, gathered, memo.put(_facts(gathered), value["size"]))
        memo.keep()
        return {name: found[name] for name in names}


def _facts(gathered: _Gathered) -> Any:
    """What task and size of a preset follow from; None where its plugin's fingerprint does not tell."""
    plugin, architecture = gathered.plugin, gathered.architecture
    own = architecture.config.partition(".")[0] == plugin.module.partition(".")[0]
    if plugin.fingerprint is None or not own:
        return None
    return plugin.fingerprint, architecture.config, [dict(entry.config) for entry in gathered.entries]


def _size(spec: ModelSpec) -> tuple[str, int | None]:
    return spec.task, spec.cost.parameters if spec.cost else None


def _summary(name: str, gathered: _Gathered, size: tuple[str, int | None]) -> Summary:
    return Summary(name, gathered.architecture.name, *size, gathered.plugin, _description(gathered.entries))


def _plain(gathered: _Gathered) -> dict[str, Any]:
    """As JSON, for another process."""
    data = {
        "plugin": gathered.plugin.identity,
        "architecture": asdict(gathered.architecture),
        "entries": [asdict(entry) for entry in gathered.entries],
    }
    plain: dict[str, Any] = json.loads(json.dumps(data, default=str))
    return plain


def measure(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Task and size of a preset, in the process that may import its configuration."""
    entries = [Preset(**entry) for entry in data["entries"]]
    gathered = _Gathered(entries, Plugin(**data["plugin"]), Architecture(**data["architecture"]))
    try:
        return {"size": _size(_make_spec(name, gathered))}
    except ZooError as error:
        return {"error": str(error), "usage": isinstance(error, UsageError)}


def registry() -> Registry:
    """The registry as it is now: files are read afresh, plugins once a process."""
    return Registry(plugins.active())
