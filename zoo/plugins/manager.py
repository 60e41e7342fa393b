"""The plugins of this process: selection, loading and look-up of contributions.

A broken plugin must never break an unrelated command, end it, or print into its output. Built-in and third-party
plugins are loaded by the same code.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zoo.contract import (
    RESERVED_COMMANDS,
    Architecture,
    Command,
    Dataset,
    Engine,
    Exporter,
    Importer,
    Objective,
    Task,
    Tracker,
)
from zoo.errors import PluginError, UsageError, Wording, argument, nearest
from zoo.plugins import loading
from zoo.plugins.discovery import DISTRIBUTION, Plugin, ZooWarning, discover
from zoo.plugins.presets import built_in_presets, known_provider, read_presets

__all__ = ["Plugins", "Selection", "active", "clash", "select"]

_NEARLY = 0.9
"""Similarity of a misspelt task to the right one; names of different tasks are less similar."""
Named = TypeVar("Named", bound=Command | Dataset | Engine | Exporter | Objective | Task | Tracker)


@dataclass(frozen=True, slots=True)
class Selection:
    """The plugins that may be imported."""

    third_party: bool = True
    only: frozenset[str] | None = None
    """Names of the third-party plugins to load; None loads all. Built-in plugins are not affected."""
    disabled: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls, *, third_party: bool = True, disabled: Iterable[str] = ()) -> Selection:
        """Combine the command line's options with ``ZOO_PLUGINS=a,b``."""
        listed = os.environ.get("ZOO_PLUGINS")
        only = None if listed is None else frozenset(name.strip() for name in listed.split(",") if name.strip())
        return cls(third_party, only, frozenset(disabled))

    def allows(self, name: str, *, built_in: bool) -> bool:
        """Return whether the plugin ``name`` may be imported."""
        if name in self.disabled:
            return False
        return built_in or (self.third_party and (self.only is None or name in self.only))

    def check_names(self, known: Collection[str]) -> None:
        """Raise :class:`UsageError` for an unknown name, because a misspelt name would disable nothing."""
        for name in sorted((self.only or frozenset()) | self.disabled):
            if name not in known:
                raise UsageError(f"no plugin {name!r}", "ZOO_PLUGINS or --disable-plugin", nearest(name, known))


class Plugins:
    """The plugins of a selection, read on construction. ``retry`` reads broken plugins again."""

    def __init__(self, selection: Selection, *, retry: bool = False) -> None:
        self.selection = selection
        self.all = discover()
        selection.check_names({plugin.name for plugin in self.all})
        for plugin in self.all:
            if not selection.allows(plugin.name, built_in=plugin.built_in):
                plugin.status = "disabled"
        loading.read([plugin for plugin in self.all if plugin.status != "disabled"], retry=retry)
        self._mark_conflicts()
        for plugin in self.all:
            if plugin.status in ("broken", "conflict"):
                warnings.warn(f"{plugin}: {plugin.status}: {plugin.reason}", ZooWarning, stacklevel=2)
            for complaint in plugin.complaints:
                warnings.warn(f"{plugin}: {complaint}", ZooWarning, stacklevel=2)

    def loaded(self) -> Iterator[Plugin]:
        """Iterate over the plugins whose contributions are available."""
        return (plugin for plugin in self.all if plugin.status in ("ok", "conflict"))

    def architecture_names(self) -> list[str]:
        """Return the sorted names of all architectures."""
        return sorted({architecture.name for plugin in self.loaded() for architecture in plugin.architectures})

    def qualified_names(self) -> set[str]:
        """Return ``distribution:name`` of every architecture."""
        return {f"{plugin.distribution}:{item.name}" for plugin in self.loaded() for item in plugin.architectures}

    def architecture(self, name: str, where: object = None) -> tuple[Plugin, Architecture]:
        """Return the only provider of ``name`` or ``distribution:name``; otherwise raise :class:`PluginError`."""
        owner, _, short = name.rpartition(":")
        providers = [
            (plugin, architecture)
            for plugin in self.loaded()
            for architecture in plugin.architectures
            if architecture.name == short and owner in ("", plugin.distribution)
        ]
        if len(providers) > 1:
            owners = " and ".join(str(plugin) for plugin, _ in providers)
            raise PluginError(
                f"architecture {short!r} is provided by {owners}",
                where,
                f"write {providers[0][0].distribution}:{short}",
            )
        if not providers:
            broken = [str(plugin) for plugin in self.all if plugin.status == "broken"]
            disabled = [plugin.name for plugin in self.all if plugin.status == "disabled"]
            hint = known_provider(short) or nearest(short, self.architecture_names())
            if broken or disabled:
                hint = f"broken: {', '.join(broken) or 'none'}; disabled: {', '.join(disabled) or 'none'}"
            raise PluginError(f"no plugin provides the architecture {name!r}", where, hint)
        return providers[0]

    def importer(self, model_type: str | None, where: object = None) -> tuple[Plugin, Importer]:
        """Return the importer of a model type.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.importers]
        names = ", ".join(sorted({item.name for _, item in provided}))
        if model_type is None:
            remedy = Wording(f"pass model_type, one of {names}", f"pass --model-type NAME, one of {names}")
            raise UsageError("the model_type is unknown", where, remedy)
        matches = [(plugin, item) for plugin, item in provided if item.name == model_type]
        if len(matches) > 1:
            raise clash("importer", model_type, [plugin for plugin, _ in matches], where)
        if not matches:
            hint = f"known: {names}; a plugin adds one with the hook zoo_importers"
            hint = known_provider(model_type) or hint
            raise UsageError(f"no importer for model_type {model_type!r}", where, hint)
        return matches[0]

    def exporter(self, name: str) -> tuple[Plugin, Exporter]:
        """Return the exporter to the format ``name``.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several, or if there is none
        but a plugin is broken or disabled.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.exporters]
        return self._named(provided, name, "exporter", f"no plugin exports to {name!r}", argument("format"))

    def task(self, name: str, declared: str) -> tuple[Plugin, Task]:
        """Return the task ``name`` for a model that declares the task ``declared``.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several, or if there is none
        but a plugin is broken or disabled.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.tasks]
        fitting = [(plugin, item) for plugin, item in provided if item.can_serve(declared)]
        names = [item.name for _, item in fitting]
        if name not in names and name in (item.name for _, item in provided):
            raise UsageError(
                f"task {name!r} is not for models of the task {declared}", argument("task"), nearest(name, names)
            )
        absent = f"no plugin provides the task {name!r}"
        everything = fitting if name in names else provided
        return self._named(everything, name, "task", absent, argument("task"))

    def check_task(self, declared: str, owner: Plugin) -> None:
        """Raise :class:`PluginError` if no task serves models of a declared one, and its name is nearly that of one.

        A model may have a task that no plugin runs.
        """
        served = {name for plugin in self.loaded() for item in plugin.tasks for name in (item.serves or (item.name,))}
        close = difflib.get_close_matches(declared.casefold(), served, n=1, cutoff=_NEARLY)
        if declared not in served and close and close[0][0] == declared[0].casefold():
            problem = f"{owner}: no plugin runs models of the task {declared!r}"
            raise PluginError(problem, None, f"did you mean {close[0]!r}?")

    def attention_task(self, declared: str) -> tuple[Plugin, str] | None:
        """Return the function that reads attention weights for models of a task, and its plugin, or None.

        Raises :class:`PluginError` if several plugins provide one.
        """
        readers = [
            (plugin, item.attention)
            for plugin in self.loaded()
            for item in plugin.tasks
            if item.attention is not None and item.can_serve(declared)
        ]
        if len(readers) > 1:
            raise clash("attention of", declared, [plugin for plugin, _ in readers])
        return readers[0] if readers else None

    def objectives(self) -> list[tuple[Plugin, Objective]]:
        """Return the training objectives of all plugins."""
        return [(plugin, item) for plugin in self.loaded() for item in plugin.objectives]

    def objective(self, name: str | None, task: str) -> tuple[Plugin, Objective]:
        """Return the objective ``name``, or the first one, for models of a task.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several, or if there is none
        but a plugin is broken or disabled.
        """
        provided = self.objectives()
        fitting = [item for item in provided if task in item[1].tasks]
        if name is None:
            if not fitting:
                remedy = "a plugin adds one with the hook zoo_objectives"
                raise UsageError(f"no objective trains models of the task {task}", argument("objective"), remedy)
            return fitting[0]
        match = self._named(
            provided, name, "objective", f"no plugin provides the objective {name!r}", argument("objective")
        )
        if match not in fitting:
            remedy = nearest(name, [item.name for _, item in fitting])
            raise UsageError(f"objective {name!r} is not for models of the task {task}", argument("objective"), remedy)
        return match

    def datasets(self) -> list[tuple[Plugin, Dataset]]:
        """Return the data sets of all plugins."""
        return [(plugin, item) for plugin in self.loaded() for item in plugin.datasets]

    def dataset(self, name: str) -> tuple[Plugin, Dataset]:
        """Return a data set.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several, or if there is none
        but a plugin is broken or disabled.
        """
        return self._named(self.datasets(), name, "dataset", f"no file or data set {name!r}", argument("data"))

    def tracker(self, name: str) -> tuple[Plugin, Tracker]:
        """Return a tracker of experiments.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several, or if there is none
        but a plugin is broken or disabled.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.trackers]
        return self._named(provided, name, "tracker", f"no plugin provides the tracker {name!r}", argument("tracker"))

    def engine(self, name: str) -> tuple[Plugin, Engine]:
        """Return an engine of batches.

        Raises :class:`UsageError` if there is none, and :class:`PluginError` if there are several, or if there is none
        but a plugin is broken or disabled.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.engines]
        return self._named(provided, name, "engine", f"no plugin provides the engine {name!r}", argument("engine"))

    def commands(self) -> list[tuple[Plugin, Command]]:
        """Return the commands of all plugins."""
        return [(plugin, item) for plugin in self.loaded() for item in plugin.commands]

    def command(self, name: str, own: Iterable[str]) -> tuple[Plugin, Command]:
        """Return a plugin's command; ``own`` are the names of the built-in commands.

        Raises :class:`UsageError` if no plugin provides it, and :class:`PluginError` if two do, or none does while
        plugins are broken or disabled.
        """
        return self._named(self.commands(), name, "command", f"No such command {name!r}", None, also=own)

    def _named(
        self,
        provided: Sequence[tuple[Plugin, Named]],
        name: str,
        kind: str,
        absent: str,
        where: Wording | None,
        *,
        also: Iterable[str] = (),
    ) -> tuple[Plugin, Named]:
        """Return the contribution of that name. ``also`` are further names to suggest if it does not exist."""
        matches = [(plugin, item) for plugin, item in provided if item.name == name]
        if len(matches) > 1:
            raise clash(kind, name, [plugin for plugin, _ in matches])
        if not matches:
            lost = [f"{plugin} is {plugin.status}" for plugin in self.all if plugin.status in ("broken", "disabled")]
            suggestion = known_provider(name) or nearest(name, {*also, *(item.name for _, item in provided)})
            hint = "; ".join([suggestion, *lost])
            raise (PluginError if lost else UsageError)(absent, where, hint)
        return matches[0]

    def _mark_conflicts(self) -> None:
        providers: dict[tuple[str, str, str], list[Plugin]] = {}
        for plugin in self.loaded():
            kinds = [kind for kind in loading.CONTRIBUTIONS if kind != "tasks"]
            names = [(kind[:-1], item.name, "") for kind in kinds for item in getattr(plugin, kind)]
            # Tasks may share a name if they serve different models.
            names += [("task", item.name, served) for item in plugin.tasks for served in item.serves or (item.name,)]
            names += [("preset", name, "") for name in plugin.presets]
            names += [("evidence", item.evidence, "") for item in plugin.exporters if item.evidence is not None]
            for named in names:
                providers.setdefault(named, []).append(plugin)
        own_presets: Collection[str] = ()
        if any(plugin.presets for plugin in self.loaded()):
            own_presets = read_presets(built_in_presets(), "built-in registry.toml")
        for (kind, name, _), plugins in providers.items():
            if kind == "preset" and name in own_presets:  # otherwise the registry would report it on use only
                for plugin in plugins:
                    ways = f"write {DISTRIBUTION}:{name} or {plugin.distribution}:{name}"
                    plugin.status, plugin.reason = "conflict", f"preset {name!r} is built in: {ways}"
                continue
            if kind == "command":  # a third-party command cannot replace or disable a built-in one
                is_reserved = name in RESERVED_COMMANDS
                at_fault = [plugin for plugin in plugins if not plugin.built_in]
                if is_reserved or len(at_fault) < len(plugins):
                    for plugin in at_fault:
                        plugin.status, plugin.reason = "conflict", f"command {name!r} is built in"
                    continue
            for plugin in plugins if len(plugins) > 1 else ():
                others = " and ".join(str(other) for other in plugins if other is not plugin) or "itself, twice"
                plugin.status = "conflict"
                plugin.reason = f"{kind} {name!r} is also provided by {others}"


def clash(kind: str, name: str, owners: Sequence[Plugin], where: object = None) -> PluginError:
    """Return the error for several providers of one name, with a way to choose one."""
    both = " and ".join(map(str, owners))
    qualified = f"write {owners[0].distribution}:{name}"
    remedy = qualified if kind in ("architecture", "model") else f"--disable-plugin {owners[-1].name}"
    return PluginError(f"{kind} {name!r} is provided by {both}", where, remedy)


_selection: Selection | None = None
_active: Plugins | None = None


def select(selection: Selection) -> None:
    """Set the plugins that may be imported, before any is. Plugins of an earlier selection are discarded."""
    global _selection, _active
    _selection, _active = selection, None


def active(*, retry: bool = False) -> Plugins:
    """Return the plugins of this process, read on first use. ``retry`` reads broken plugins again."""
    global _active
    if _active is None or retry:
        _active = Plugins(_selection or Selection.from_environment(), retry=retry)
    return _active
