"""The plugins of this process: chosen, read, and asked for what they provide.

One broken plugin must never break an unrelated command, end it, or print into its output. Built-in plugins go
through the same door as third parties.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zoo import loading
from zoo.contract import Architecture, Command, Exporter, Importer, Task
from zoo.discovery import BUILT_IN, Plugin, ZooWarning, blame, deprecated, discover
from zoo.errors import PluginError, UsageError, nearest
from zoo.presets import known_provider

__all__ = [
    "BUILT_IN",
    "Plugin",
    "Plugins",
    "Selection",
    "ZooWarning",
    "active",
    "allowed",
    "blame",
    "clash",
    "deprecated",
    "discover",
    "select",
]

LOCK = "zoo.lock"
"""The lock where no other is named."""
Named = TypeVar("Named", bound=Exporter | Task)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which plugins may be imported at all."""

    third_party: bool = True
    only: frozenset[str] | None = None
    """Third parties to load, by plugin name; None loads all. Built-ins are not affected."""
    disabled: frozenset[str] = frozenset()
    lock: Path | None = None
    """The lock that third parties are held to; None holds them to none."""

    @classmethod
    def from_environment(
        cls, *, third_party: bool = True, disabled: Iterable[str] = (), lock: Path | None = None
    ) -> Selection:
        """The selection of the command line's options, of ``ZOO_PLUGINS=a,b`` and of ``ZOO_LOCKED=FILE``."""
        listed = os.environ.get("ZOO_PLUGINS")
        only = None if listed is None else frozenset(name.strip() for name in listed.split(",") if name.strip())
        if lock is None and "ZOO_LOCKED" in os.environ:
            if not os.environ["ZOO_LOCKED"]:
                raise UsageError("names no file", "ZOO_LOCKED", "name a lock, or unset it")
            lock = Path(os.environ["ZOO_LOCKED"])
        return cls(third_party, only, frozenset(disabled), lock)

    def allows(self, name: str, *, built_in: bool) -> bool:
        """Whether the plugin ``name`` may be imported."""
        if name in self.disabled:
            return False
        return built_in or (self.third_party and (self.only is None or name in self.only))

    def check_names(self, known: Collection[str]) -> None:
        """Raise :class:`UsageError` for a name of no plugin: misspelt, it would not keep out what it was to."""
        for name in sorted((self.only or frozenset()) | self.disabled):
            if name not in known:
                raise UsageError(f"no plugin {name!r}", "ZOO_PLUGINS or -P", nearest(name, known))


class Plugins:
    """The plugins of a selection. Construction reads them; ``retry`` reads those again that were broken."""

    def __init__(self, selection: Selection, *, retry: bool = False) -> None:
        self.selection = selection
        self.all = discover()
        known = {plugin.name for plugin in self.all}
        if selection.lock is not None:
            from zoo import lock  # hashing is for those who ask for it

            known |= lock.check(selection.lock, selection, self.all)
        selection.check_names(known)
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
        """The plugins whose contributions count."""
        return (plugin for plugin in self.all if plugin.status in ("ok", "conflict"))

    def architecture_names(self) -> list[str]:
        """Every name that some plugin provides."""
        return sorted({architecture.name for plugin in self.loaded() for architecture in plugin.architectures})

    def qualified_names(self) -> set[str]:
        """``distribution:name`` of every architecture."""
        return {f"{plugin.distribution}:{item.name}" for plugin in self.loaded() for item in plugin.architectures}

    def architecture(self, name: str, where: object = None) -> tuple[Plugin, Architecture]:
        """The provider of ``name`` or of ``distribution:name``. None, or two of them, is a :class:`PluginError`."""
        owner, _, short = name.rpartition(":")
        found = [
            (plugin, architecture)
            for plugin in self.loaded()
            for architecture in plugin.architectures
            if architecture.name == short and owner in ("", plugin.distribution)
        ]
        if len(found) > 1:
            owners = " and ".join(str(plugin) for plugin, _ in found)
            raise PluginError(
                f"architecture {short!r} is provided by {owners}",
                where,
                f"write {found[0][0].distribution}:{short}",
            )
        if not found:
            broken = [str(plugin) for plugin in self.all if plugin.status == "broken"]
            disabled = [plugin.name for plugin in self.all if plugin.status == "disabled"]
            hint = known_provider(short) or nearest(short, self.architecture_names())
            if broken or disabled:
                hint = f"broken: {', '.join(broken) or 'none'}; disabled: {', '.join(disabled) or 'none'}"
            raise PluginError(f"no plugin provides the architecture {name!r}", where, hint)
        return found[0]

    def importer(self, kind: str | None, where: object = None) -> tuple[Plugin, Importer]:
        """The importer of checkpoints of this kind. None is a :class:`UsageError`, two are a :class:`PluginError`."""
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.importers]
        known = sorted({item.name for _, item in provided})
        if kind is None:
            raise UsageError("it does not say its model_type", where, f"--kind NAME, one of {', '.join(known)}")
        found = [(plugin, item) for plugin, item in provided if item.name == kind]
        if len(found) > 1:
            raise clash("importer", kind, [plugin for plugin, _ in found], where)
        if not found:
            hint = f"known: {', '.join(known)}; a plugin adds one with the hook zoo_importers"
            hint = known_provider(kind) or hint
            raise UsageError(f"no importer for model_type {kind!r}", where, hint)
        return found[0]

    def exporter(self, name: str) -> tuple[Plugin, Exporter]:
        """The exporter to the format ``name``.

        None is a :class:`UsageError`, two a :class:`PluginError`, and so is none where a plugin is not loaded.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.exporters]
        return self._named(provided, name, "exporter", f"no plugin exports to {name!r}", "--format")

    def task(self, name: str, declared: str) -> tuple[Plugin, Task]:
        """The task ``name`` for a model that declares the task ``declared``.

        None is a :class:`UsageError`, two a :class:`PluginError`, and so is none where a plugin is not loaded.
        """
        provided = [(plugin, item) for plugin in self.loaded() for item in plugin.tasks]
        found = self._named(provided, name, "task", f"no plugin provides the task {name!r}", "--task")
        if not found[1].can_serve(declared):
            fitting = [item.name for _, item in provided if item.can_serve(declared)]
            raise UsageError(f"task {name!r} is not for a {declared} model", "--task", nearest(name, fitting))
        return found

    def commands(self) -> list[tuple[Plugin, Command]]:
        """Every command beside zoo's own."""
        return [(plugin, item) for plugin in self.loaded() for item in plugin.commands]

    def command(self, name: str, own: Iterable[str]) -> tuple[Plugin, Command]:
        """The command ``name``, which is none of zoo's ``own``. None is a :class:`UsageError`, two a plugin's."""
        found = [(plugin, item) for plugin, item in self.commands() if item.name == name]
        if len(found) > 1:
            raise clash("command", name, [plugin for plugin, _ in found])
        if not found:
            known = {*own, *(item.name for _, item in self.commands())}
            raise UsageError(f"No such command {name!r}", None, known_provider(name) or nearest(name, known))
        return found[0]

    def _named(
        self, provided: Sequence[tuple[Plugin, Named]], name: str, kind: str, absent: str, where: str
    ) -> tuple[Plugin, Named]:
        """The one of that name among what plugins provide."""
        found = [(plugin, item) for plugin, item in provided if item.name == name]
        if len(found) > 1:
            raise clash(kind, name, [plugin for plugin, _ in found])
        if not found:
            lost = [f"{plugin} is {plugin.status}" for plugin in self.all if plugin.status in ("broken", "disabled")]
            known = known_provider(name) or nearest(name, {item.name for _, item in provided})
            hint = "; ".join([known, *lost])
            raise (PluginError if lost else UsageError)(absent, where, hint)
        return found[0]

    def _mark_conflicts(self) -> None:
        providers: dict[tuple[str, str], list[Plugin]] = {}
        for plugin in self.loaded():
            names = [(kind[:-1], item.name) for kind in loading.CONTRIBUTIONS for item in getattr(plugin, kind)]
            names += [("preset", name) for name in plugin.presets]
            names += [("evidence", item.evidence) for item in plugin.exporters if item.evidence is not None]
            for named in names:
                providers.setdefault(named, []).append(plugin)
        for (kind, name), plugins in providers.items():
            for plugin in plugins if len(plugins) > 1 else ():
                others = " and ".join(str(other) for other in plugins if other is not plugin) or "itself, twice"
                plugin.status = "conflict"
                plugin.reason = f"{kind} {name!r} is also provided by {others}"
        for plugin, command in self.commands():
            from zoo.cli import COMMANDS

            if command.name in COMMANDS:
                plugin.status, plugin.reason = "conflict", f"command {command.name!r} is zoo's own"


def clash(kind: str, name: str, owners: Sequence[Plugin], where: object = None) -> PluginError:
    """The error of two providers of one name, and how to say which is meant."""
    both = " and ".join(map(str, owners))
    qualified = f"write {owners[0].distribution}:{name}"
    remedy = qualified if kind in ("architecture", "model") else f"-P no:{owners[-1].name}"
    return PluginError(f"{kind} {name!r} is provided by {both}", where, remedy)


_selection: Selection | None = None
_active: Plugins | None = None


def select(selection: Selection) -> None:
    """Choose what may be imported, before anything is. Forgets plugins loaded under another selection."""
    global _selection, _active
    _selection, _active = selection, None


def active(*, retry: bool = False) -> Plugins:
    """The plugins of this process, read on first use; with ``retry`` those that are broken are read again."""
    global _active
    if _active is None or retry:
        _active = Plugins(_selection or Selection.from_environment(), retry=retry)
    return _active


def allowed() -> list[Plugin]:
    """The third-party plugins that the selection in force lets in, found without importing any."""
    selection = _selection or Selection.from_environment()
    found = discover()
    selection.check_names({plugin.name for plugin in found})
    return [plugin for plugin in found if not plugin.built_in and selection.allows(plugin.name, built_in=False)]
