"""Discovery and guarded loading of plugins.

One broken plugin must never break an unrelated command, end it, or print into its output. Built-in plugins go
through the same door as third parties.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import pluggy

from zoo import hookspecs
from zoo.contract import Architecture, Exporter, Importer, Task
from zoo.errors import PluginError, UsageError, ZooError, nearest
from zoo.hookspecs import ENTRY_POINT_GROUP, ZOO_API
from zoo.presets import Preset, read_presets

__all__ = ["Plugin", "Plugins", "Selection", "ZooWarning", "active", "allowed", "blame", "clash", "select"]

BUILT_IN = {
    "bert": "zoo_plugins.bert",
    "gpt": "zoo_plugins.gpt",
    "llama": "zoo_plugins.llama",
    "onnx": "zoo_export.plugin",
    "t5": "zoo_plugins.t5",
    "transformer": "zoo_plugins.transformer",
    "vit": "zoo_plugins.vit",
}
DISTRIBUTION = "attention-zoo"
LOCK = "zoo.lock"
"""The lock where no other is named."""

Named = TypeVar("Named", bound=Exporter | Task)
Status = Literal["ok", "disabled", "broken", "conflict"]


class ZooWarning(UserWarning):
    """Something is wrong that the current task may survive. The command line prints it as one line on stderr."""


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


@dataclass
class Plugin:
    """One entry point, what became of it and what it provides."""

    name: str
    module: str
    built_in: bool
    source: Distribution | None = None
    status: Status = "ok"
    reason: str | None = None
    import_seconds: float | None = None
    architectures: Sequence[Architecture] = ()
    importers: Sequence[Importer] = ()
    exporters: Sequence[Exporter] = ()
    tasks: Sequence[Task] = ()
    presets: Mapping[str, Preset] = field(default_factory=dict)

    @cached_property
    def distribution(self) -> str:
        """Name of the distribution that ships the plugin."""
        return _metadata(self.source, "name") if self.source else DISTRIBUTION

    @cached_property
    def version(self) -> str:
        """Version of that distribution."""
        from zoo import __version__

        return _metadata(self.source, "version") if self.source else __version__

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"


class Plugins:
    """The plugins of this process. Construction imports them, each on its own."""

    def __init__(self, selection: Selection) -> None:
        self.all = sorted(_discover(), key=lambda plugin: (not plugin.built_in, plugin.distribution, plugin.name))
        known = {plugin.name for plugin in self.all}
        if selection.lock is not None:
            from zoo import lock  # hashing is for those who ask for it

            known |= lock.check(selection.lock, selection, self.all)
        selection.check_names(known)
        manager = pluggy.PluginManager("zoo")
        manager.add_hookspecs(hookspecs)
        for plugin in self.all:
            if selection.allows(plugin.name, built_in=plugin.built_in):
                _load(plugin, manager)
            else:
                plugin.status = "disabled"
        self._mark_conflicts()
        for plugin in self.all:
            if plugin.status in ("broken", "conflict"):
                warnings.warn(f"{plugin}: {plugin.status}: {plugin.reason}", ZooWarning, stacklevel=2)

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
            hint = nearest(short, self.architecture_names())
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

    def _named(
        self, provided: Sequence[tuple[Plugin, Named]], name: str, kind: str, absent: str, where: str
    ) -> tuple[Plugin, Named]:
        """The one of that name among what plugins provide."""
        found = [(plugin, item) for plugin, item in provided if item.name == name]
        if len(found) > 1:
            raise clash(kind, name, [plugin for plugin, _ in found])
        if not found:
            lost = [f"{plugin} is {plugin.status}" for plugin in self.all if plugin.status in ("broken", "disabled")]
            hint = "; ".join([nearest(name, {item.name for _, item in provided}), *lost])
            raise (PluginError if lost else UsageError)(absent, where, hint)
        return found[0]

    def _mark_conflicts(self) -> None:
        providers: dict[tuple[str, str], list[Plugin]] = {}
        for plugin in self.loaded():
            for architecture in plugin.architectures:
                providers.setdefault(("architecture", architecture.name), []).append(plugin)
            for preset in plugin.presets:
                providers.setdefault(("preset", preset), []).append(plugin)
            for importer in plugin.importers:
                providers.setdefault(("importer", importer.name), []).append(plugin)
            for exporter in plugin.exporters:
                providers.setdefault(("exporter", exporter.name), []).append(plugin)
                if exporter.evidence is not None:
                    providers.setdefault(("evidence", exporter.evidence), []).append(plugin)
            for task in plugin.tasks:
                providers.setdefault(("task", task.name), []).append(plugin)
        for (kind, name), plugins in providers.items():
            for plugin in plugins if len(plugins) > 1 else ():
                others = " and ".join(str(other) for other in plugins if other is not plugin) or "itself, twice"
                plugin.status = "conflict"
                plugin.reason = f"{kind} {name!r} is also provided by {others}"


def clash(kind: str, name: str, owners: Sequence[Plugin], where: object = None) -> PluginError:
    """The error of two providers of one name, and how to say which is meant."""
    both = " and ".join(map(str, owners))
    qualified = f"write {owners[0].distribution}:{name}"
    remedy = f"-P no:{owners[-1].name}" if kind in ("importer", "exporter", "task") else qualified
    return PluginError(f"{kind} {name!r} is provided by {both}", where, remedy)


def describe(error: BaseException) -> str:
    """What an exception says, whatever it does when asked."""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be read"
    return text if isinstance(error, ZooError) else f"{type(error).__name__}: {text}"


@contextmanager
def blame(plugin: Plugin, what: str, *, redirect: bool = True) -> Iterator[None]:
    """Run a plugin's code: what it raises is a :class:`PluginError` of its own, and what it prints goes to stderr.

    Without ``redirect`` stdout is left alone. It is one for all threads, so none but the main one ever moves it: two
    that did would put it back in the wrong order.
    """
    redirect = redirect and threading.current_thread() is threading.main_thread()
    try:
        with contextlib.redirect_stdout(sys.stderr) if redirect else contextlib.nullcontext():
            yield
    except (KeyboardInterrupt, ZooError):
        raise
    except BaseException as error:
        raise PluginError(f"{plugin} {what} ({describe(error)})") from error


def _metadata(source: Distribution, name: str) -> str:
    """A field of an installation that may be damaged."""
    try:
        return str(getattr(source, name) or "unknown")
    except Exception:
        return "unknown"


def _discover() -> Iterator[Plugin]:
    for name, module in BUILT_IN.items():
        yield Plugin(name, module, built_in=True)
    seen = set()
    for source in distributions():
        try:
            if ENTRY_POINT_GROUP not in (source.read_text("entry_points.txt") or ""):
                continue
            entries = [entry for entry in source.entry_points if entry.group == ENTRY_POINT_GROUP]
        except Exception as error:
            what = f"distribution {_metadata(source, 'name')}: its entry points cannot be read ({describe(error)})"
            warnings.warn(what, ZooWarning, stacklevel=2)
            continue
        name = _metadata(source, "name")
        if name not in seen:  # the first on the path is the one that is imported
            yield from (Plugin(entry.name, entry.value, built_in=False, source=source) for entry in entries)
        seen.add(name)


def _load(plugin: Plugin, manager: pluggy.PluginManager) -> None:
    """Import and register one plugin and call its hooks. Whatever it does, the plugin alone is to blame."""
    key = f"{plugin.distribution}:{plugin.name}:{plugin.module}"
    started = time.perf_counter()
    try:
        with blame(plugin, "cannot be loaded"):
            module = EntryPoint(plugin.name, plugin.module, ENTRY_POINT_GROUP).load()
            plugin.import_seconds = time.perf_counter() - started
            _check_api(module)
            manager.register(module, key)
            manager.check_pending()
            plugin.architectures = _collect(manager, key, "zoo_architectures", Architecture)
            plugin.importers = _collect(manager, key, "zoo_importers", Importer)
            plugin.exporters = _collect(manager, key, "zoo_exporters", Exporter)
            plugin.tasks = _collect(manager, key, "zoo_tasks", Task)
            for item in (*plugin.architectures, *plugin.importers, *plugin.exporters, *plugin.tasks):
                item.check()
            for path in _collect(manager, key, "zoo_presets", Path):
                plugin.presets = {**plugin.presets, **read_presets(path)}
    except ZooError as error:
        plugin.architectures, plugin.importers, plugin.exporters, plugin.tasks = (), (), (), ()
        plugin.presets = {}
        plugin.status = "broken"
        raised = error.__cause__ if type(error) is PluginError and error.__cause__ else error
        plugin.reason = " ".join(describe(raised).split())
        if manager.has_plugin(key):
            manager.unregister(name=key)


def _check_api(module: ModuleType) -> None:
    api = getattr(module, "ZOO_API", None)
    if api != ZOO_API or isinstance(api, bool):
        raise PluginError(f"written for ZOO_API {api!r}, this zoo has {ZOO_API}")


def _collect(manager: pluggy.PluginManager, key: str, hook: str, kind: type[Any]) -> tuple[Any, ...]:
    """Call one plugin's implementation of ``hook`` and check that it returned a sequence of ``kind``."""
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin_name == key:
            result = implementation.function()
            if not isinstance(result, list | tuple) or not all(isinstance(item, kind) for item in result):
                raise PluginError(f"{hook} must return a list of {kind.__name__}, got {result!r}")
            return tuple(result)
    return ()


_selection: Selection | None = None
_active: Plugins | None = None


def select(selection: Selection) -> None:
    """Choose what may be imported, before anything is. Forgets plugins loaded under another selection."""
    global _selection, _active
    _selection, _active = selection, None


def active() -> Plugins:
    """The plugins of this process, loaded on first use."""
    global _active
    if _active is None:
        _active = Plugins(_selection or Selection.from_environment())
    return _active


def allowed() -> list[Plugin]:
    """The third-party plugins that the selection in force lets in, found without importing any."""
    selection = _selection or Selection.from_environment()
    found = list(_discover())
    selection.check_names({plugin.name for plugin in found})
    return [plugin for plugin in found if not plugin.built_in and selection.allows(plugin.name, built_in=False)]
