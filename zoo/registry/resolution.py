"""Resolution of presets and architectures into model descriptions, with the source of every value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from zoo import plugins
from zoo.contract import Architecture
from zoo.errors import ArtifactError, PluginError, UsageError, ZooError, nearest
from zoo.memo import Memo
from zoo.plugins import Plugin, Plugins, blame, clash, loading
from zoo.plugins.discovery import DISTRIBUTION
from zoo.plugins.plain import read_plain
from zoo.plugins.presets import Preset, known_provider, preset_layers, read_presets
from zoo.registry.spec import Assignment, ModelSpec, PresetSummary, config_class
from zoo.version import __version__

__all__ = ["DEFAULT", "Registry", "registry"]

DEFAULT = "default"
_BASES = 64
"""Maximum number of presets of which each is the base of the one before."""


def _description(entries: Sequence[Preset]) -> str:
    return next((entry.description for entry in reversed(entries) if entry.description), "")


class _Gathered(NamedTuple):
    """The entries that define a preset, in increasing precedence, and its architecture."""

    entries: Sequence[Preset]
    plugin: Plugin
    architecture: Architecture
    source: str | None = None
    """Published weights, stated by the preset's own entries."""


def _make_spec(
    name: str, gathered: _Gathered, settings: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Configure an architecture by entries, values and settings, each overriding the previous ones."""
    entries, plugin, architecture, source = gathered
    short = name.rpartition(":")[2]
    cls = config_class(plugin, architecture)
    origins: dict[str, list[Assignment]] = {}
    training: dict[str, list[Assignment]] = {}
    for entry in entries:
        for key, value in entry.training.items():
            training.setdefault(key, []).append(Assignment(value, entry.where))
    with blame(plugin, f"cannot configure {short}", fault=UsageError):
        for entry in entries:
            for key, value in entry.config.items():
                origins.setdefault(key, []).append(Assignment(cls.check_field(key, value, entry.where), entry.where))
        for key, value in (values or {}).items():
            origins.setdefault(key, []).append(Assignment(cls.check_field(key, value, name), "argument"))
        for setting in settings:
            key, separator, text = setting.partition("=")
            if not separator:
                raise UsageError(f"{setting!r} is not key=value", "--set")
            origins.setdefault(key, []).append(Assignment(cls.parse_setting(key, text), f"--set {setting}"))
        where = " ".join([name, *(f"--set {setting}" for setting in settings)]) if settings else entries[-1].where
        config = cls.from_dict({key: assignments[-1].value for key, assignments in origins.items()}, where)
        if architecture.library and (values or settings):
            config = config.with_task(config.task)  # what was read off the model of the library may have changed
        for key, value in config.to_dict().items():
            origins.setdefault(key, [Assignment(value, DEFAULT)])
    return ModelSpec(
        name=short,
        plugin=plugin,
        architecture=architecture,
        config=config,
        description=_description(entries),
        tokenizer=next((entry.tokenizer for entry in reversed(entries) if entry.tokenizer), None),
        source=source,
        origins=origins,
        training=training,
    )


class Registry:
    """The presets of the built-in file, the plugins, the user and the project, in increasing precedence."""

    def __init__(self, loaded: Plugins) -> None:
        self.plugins = loaded
        core = Plugin("zoo", "zoo", DISTRIBUTION, __version__, built_in=True)
        files = [read_presets(path, label) for path, label in preset_layers()]
        core.presets = files[0]
        self._providers: dict[str, list[Plugin]] = {}
        self._layers: list[Mapping[str, Preset]] = []
        for plugin in (core, *loaded.loaded()):
            self._layers.append(plugin.presets)
            for name in plugin.presets:
                self._providers.setdefault(name, []).append(plugin)
        self._layers += files[1:]

    def names(self, pattern: str = "*") -> list[str]:
        """Return the sorted names of presets that match a glob, or contain a text without wildcards."""
        glob = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
        return sorted({name for layer in self._layers for name in layer if fnmatchcase(name, glob)})

    def qualified_names(self) -> list[str]:
        """Return the sorted names ``distribution:preset`` of all presets that distributions provide."""
        return sorted(
            {f"{plugin.distribution}:{name}" for name, owners in self._providers.items() for plugin in owners}
        )

    def resolve(self, name: str, settings: Sequence[str] = (), *, values: Mapping[str, Any] | None = None) -> ModelSpec:
        """Resolve a preset, or ``distribution:preset``, overridden by values and ``key=value`` settings.

        Raises :class:`UsageError` for an unknown name, key or value, and :class:`PluginError` if no plugin, or more
        than one, provides the architecture or preset.
        """
        return _make_spec(name, self._gather(name), settings, values)

    def _gather(self, name: str) -> _Gathered:
        """Collect the entries and the architecture of a preset, without importing plugins."""
        owner = name.rpartition(":")[0]
        entries = self._chain(name)
        arch, arch_where = next(((entry.arch, entry.where) for entry in reversed(entries) if entry.arch), ("", ""))
        if not arch:
            raise UsageError("no architecture", entries[-1].where, "give it an arch or a base")
        if owner and f"{owner}:{arch}" in self.plugins.qualified_names():
            arch = f"{owner}:{arch}"
        plugin, architecture = self.plugins.architecture(arch, arch_where)
        source = next((entry.source for entry in reversed(self._entries(name)) if entry.source), None)
        return _Gathered(entries, plugin, architecture, source)

    def _chain(self, name: str) -> list[Preset]:
        """Return the entries that define ``name``, in increasing precedence: the base's, then its own by layer."""
        chain: list[Preset] = []
        seen: list[str] = []
        base: str | None = name
        while base is not None:
            if base in seen:
                cycle = " -> ".join((*seen, base))
                raise UsageError(f"presets inherit in a cycle ({cycle})", self._entries(base)[-1].where)
            entries = self._entries(base)
            if not entries:
                if "/" in base and not chain:
                    raise ArtifactError("no such directory", base)
                where = f"base of {chain[0].where}" if chain else None
                remedy = known_provider(base) or nearest(base, self.names())
                raise UsageError(f"unknown model {base!r}", where, remedy)
            chain, seen = [*entries, *chain], [*seen, base]
            if len(seen) > _BASES + 1:
                raise UsageError(f"preset {name!r} has more than {_BASES} bases", self._entries(name)[-1].where)
            base = next((entry.base for entry in reversed(entries) if entry.base), None)
        return chain

    def _entries(self, name: str) -> list[Preset]:
        owner, _, short = name.rpartition(":")
        providers = self._providers.get(short, [])
        if owner:
            own = [plugin.presets[short] for plugin in providers if plugin.distribution == owner]
            return own or self._of_library(owner, short)
        if len(providers) > 1:
            raise clash("model", short, providers)
        return [layer[short] for layer in self._layers if short in layer]

    def _of_library(self, library: str, name: str) -> list[Preset]:
        """Return a preset for a model of a library that an architecture wraps; none if no architecture does."""
        for plugin in self.plugins.loaded():
            for architecture in plugin.architectures:
                if architecture.library == library:
                    cls: Any = config_class(plugin, architecture)
                    with blame(plugin, f"cannot read {library}:{name}", fault=UsageError):
                        fields = cls.named_fields(name)
                    return [Preset(name=name, file=library, arch=architecture.name, config=fields)]
        return []

    def search(
        self,
        pattern: str = "*",
        *,
        task: str | None = None,
        architecture: str | None = None,
    ) -> list[PresetSummary | tuple[str, ZooError]]:
        """Return the presets that match every filter. An unresolvable preset is returned as its name and the error.

        Results are cached until a preset's values or its plugin's files change, so configurations are rarely imported.
        """
        unfiltered = (task, architecture) == (None, None)
        matches: list[PresetSummary | tuple[str, ZooError]] = []
        for name, summary in self._summarize(self.names(pattern)).items():
            if isinstance(summary, ZooError):
                if unfiltered:
                    matches.append((name, summary))
                continue
            if task in (None, summary.task) and architecture in (None, summary.architecture):
                matches.append(summary)
        return matches

    def _summarize(self, names: Sequence[str]) -> dict[str, PresetSummary | ZooError]:
        """Return the task and size of presets, or the errors that prevent their resolution.

        Results are cached until a preset's values or its plugin's files change. Otherwise the configuration is
        imported; third-party code is imported in a subprocess, so that its side effects stay there.
        """
        memo = Memo("presets")
        summaries: dict[str, PresetSummary | ZooError] = {}
        unknown: dict[str, _Gathered] = {}
        for name in names:
            try:
                gathered = self._gather(name)
                size = None
                with suppress(ValueError):
                    size = _parse_size(memo.get(_facts(gathered)))
                if size is None and gathered.plugin.built_in:
                    size = _size(_make_spec(name, gathered))
                    memo.put(_facts(gathered), asdict(size))
                if size is None:
                    unknown[name] = gathered
                else:
                    summaries[name] = _summary(name, gathered, size)
            except ZooError as error:
                summaries[name] = error
        if not unknown:
            memo.keep()
            return {name: summaries[name] for name in names}
        from zoo.plugins import isolation  # with subprocess, which few commands need

        jobs = {name: _plain(gathered) for name, gathered in unknown.items()}
        function = "zoo.registry.resolution:measure"
        for outcome in isolation.run(function, jobs, parse=_parse_measured, seconds=loading.seconds()):
            name, gathered = outcome.job, unknown[outcome.job]
            if outcome.failure is not None:
                summaries[name] = PluginError(f"{gathered.plugin} cannot configure {name} ({outcome.failure})")
                continue
            measured: _Measured = outcome.value
            if measured.size is not None:
                memo.put(_facts(gathered), asdict(measured.size))
                summaries[name] = _summary(name, gathered, measured.size)
            else:
                summaries[name] = (UsageError if measured.usage else PluginError)(measured.error)
        memo.keep()
        return {name: summaries[name] for name in names}


def _facts(gathered: _Gathered) -> Any:
    """Return the cache key of a preset's task and size; None if the plugin's fingerprint does not cover its code."""
    plugin, architecture = gathered.plugin, gathered.architecture
    covered = architecture.config.partition(".")[0] == plugin.module.partition(".")[0]
    if plugin.fingerprint is None or not covered:
        return None
    return plugin.fingerprint, architecture.config, [dict(entry.config) for entry in gathered.entries]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """The task of a preset and its number of parameters, None if its configuration does not tell."""

    task: str
    parameters: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """The size of a preset, or else the error that prevents its resolution."""

    size: _Size | None = None
    error: str = ""
    usage: bool = False
    """Whether the error is a :class:`UsageError`."""


def _size(spec: ModelSpec) -> _Size:
    return _Size(task=spec.task, parameters=spec.cost.parameters if spec.cost else None)


def _parse_size(data: Any) -> _Size:
    return read_plain(_Size, data, "the size")


def _summary(name: str, gathered: _Gathered, size: _Size) -> PresetSummary:
    return PresetSummary(
        name,
        gathered.architecture.name,
        size.task,
        size.parameters,
        gathered.plugin,
        _description(gathered.entries),
        gathered.source,
    )


def _plain(gathered: _Gathered) -> dict[str, Any]:
    """Return JSON data for another process."""
    data = {
        "plugin": gathered.plugin.identity,
        "architecture": asdict(gathered.architecture),
        "entries": [asdict(entry) for entry in gathered.entries],
    }
    plain: dict[str, Any] = json.loads(json.dumps(data, default=str))
    return plain


def measure(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a :class:`_Measured` as plain data. Runs in a subprocess that may import the configuration."""
    entries = [Preset(**entry) for entry in data["entries"]]
    gathered = _Gathered(entries, Plugin(**data["plugin"]), Architecture(**data["architecture"]))
    try:
        return asdict(_Measured(size=_size(_make_spec(name, gathered))))
    except ZooError as error:
        return asdict(_Measured(error=str(error), usage=isinstance(error, UsageError)))


def _parse_measured(data: Any) -> _Measured:
    return read_plain(_Measured, data, "the preset")


def registry() -> Registry:
    """Return the current registry. Preset files are read on each call, plugins once per process."""
    return Registry(plugins.active())
