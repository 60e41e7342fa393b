"""Reading of plugins. Contributions are data, so they are read once, in a subprocess, and cached.

A command that does not use a third-party module never imports it. A module that hangs, exits, prints or patches torch
on import therefore affects no other command, and two hundred plugins cost little more than three.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pluggy

from zoo import hookspecs, memo
from zoo.contract import Architecture, Command, Dataset, Engine, Exporter, Importer, Objective, Task, Tracker
from zoo.errors import PluginError, UsageError, ZooError
from zoo.hookspecs import OLDEST_API, ZOO_API
from zoo.plugins.discovery import ENTRY_POINT_GROUP, Plugin, ZooWarning, blame, describe
from zoo.plugins.plain import read_plain
from zoo.plugins.presets import Preset, read_presets
from zoo.terminal import one_line

__all__ = ["CONTRIBUTIONS", "HEAVY", "read", "seconds"]

CONTRIBUTIONS: Mapping[str, type[Any]] = {
    "architectures": Architecture,
    "importers": Importer,
    "exporters": Exporter,
    "tasks": Task,
    "objectives": Objective,
    "datasets": Dataset,
    "trackers": Tracker,
    "engines": Engine,
    "commands": Command,
}
"""Contributions of plugins besides presets; each has the hook ``zoo_NAME``."""
HEAVY = ("torch", "onnx", "onnxruntime")
"""Packages that neither plugin modules nor configuration modules may import."""
VARIABLE = "ZOO_PLUGIN_SECONDS"
"""The environment variable with the time limit for loading a plugin, in seconds."""
_SECONDS = 20.0
_SCHEMA = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """A plugin's status and contributions as plain data, for the cache and from a subprocess."""

    fingerprint: str | None
    status: Literal["ok", "broken"]
    reason: str | None
    complaints: tuple[str, ...]
    import_seconds: float | None
    presets: Mapping[str, Preset]
    preset_files: tuple[str, ...]
    preset_stamps: tuple[Any, ...]
    architectures: tuple[Architecture, ...]
    importers: tuple[Importer, ...]
    exporters: tuple[Exporter, ...]
    tasks: tuple[Task, ...]
    objectives: tuple[Objective, ...]
    datasets: tuple[Dataset, ...]
    trackers: tuple[Tracker, ...]
    engines: tuple[Engine, ...]
    commands: tuple[Command, ...]

    @classmethod
    def of(cls, plugin: Plugin) -> _Contents:
        """Return those of a plugin that was read."""
        return cls(
            fingerprint=plugin.fingerprint,
            status="ok" if plugin.status == "ok" else "broken",
            reason=plugin.reason,
            complaints=tuple(plugin.complaints),
            import_seconds=plugin.import_seconds,
            presets=plugin.presets,
            preset_files=tuple(map(str, plugin.preset_files)),
            preset_stamps=tuple(map(_stamp, plugin.preset_files)),
            **{name: tuple(getattr(plugin, name)) for name in CONTRIBUTIONS},
        )

    @classmethod
    def parse(cls, data: Any) -> _Contents:
        """Return parsed JSON as contents. Raise ``ValueError`` for any other data."""
        contents = read_plain(cls, data, "the plugin")
        for name in CONTRIBUTIONS:
            for item in getattr(contents, name):
                item.check()
        return contents

    def put_into(self, plugin: Plugin) -> None:
        """Fill a plugin, except for its fingerprint."""
        plugin.status, plugin.reason = self.status, self.reason
        plugin.complaints, plugin.import_seconds = self.complaints, self.import_seconds
        plugin.presets, plugin.preset_files = self.presets, tuple(map(Path, self.preset_files))
        for name in CONTRIBUTIONS:
            setattr(plugin, name, getattr(self, name))

    def still_hold(self, plugin: Plugin) -> bool:
        """Return whether neither the plugin nor its preset files have changed."""
        if plugin.fingerprint is None or self.fingerprint != plugin.fingerprint:
            return False
        try:
            return [_stamp(Path(file)) for file in self.preset_files] == list(self.preset_stamps)
        except (OSError, ValueError):  # not a file, or not the name of one
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """The cache entry."""

    schema: int
    plugins: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What a subprocess tells about a plugin."""

    contents: Any
    heavy: tuple[str, ...]
    """Packages of ``HEAVY`` that it imports."""


def read(plugins: Sequence[Plugin], *, retry: bool = False) -> None:
    """Read the contributions of each plugin. A plugin that fails is marked broken without affecting the others.

    Built-in plugins are imported. The contributions of third-party plugins are cached until their files or the
    installed distributions change; then the plugins are imported in a subprocess. With ``retry``, broken plugins are
    imported again too, because the cause may have been temporary.
    """
    fingerprints, manager = _Fingerprints(), _manager()
    for plugin in plugins:
        plugin.find_fingerprint = functools.partial(fingerprints.find, plugin)
        if plugin.built_in:
            load(plugin, manager)
    others = [plugin for plugin in plugins if not plugin.built_in]
    if not others:
        return
    memory, unknown = _recall(), []
    for plugin in others:
        remembered = memory.get(plugin.key)
        if remembered is None or not remembered.still_hold(plugin) or (retry and remembered.status == "broken"):
            unknown.append(plugin)
        else:
            remembered.put_into(plugin)
    if unknown:
        _read_elsewhere(unknown)
        memory |= {plugin.key: _Contents.of(plugin) for plugin in unknown}
        plain = {key: asdict(contents) for key, contents in memory.items()}
        memo.write(_memory_name(), json.dumps({"schema": _SCHEMA, "plugins": plain}).encode())


def load(plugin: Plugin, manager: pluggy.PluginManager) -> None:
    """Import and register a plugin and call its hooks, in this process."""
    started = time.perf_counter()
    contents: dict[str, Any] = {}
    presets: dict[str, Preset] = {}
    files: Sequence[Path] = ()
    try:
        with blame(plugin, "cannot be loaded"):
            module = _module(plugin)
            plugin.import_seconds = time.perf_counter() - started
            _check_api(module)
            manager.register(module, plugin.key)
            manager.check_pending()
            for name, kind in CONTRIBUTIONS.items():
                contents[name] = _collect(manager, plugin.key, f"zoo_{name}", kind)
                for item in contents[name]:
                    item.check()
            files = _collect(manager, plugin.key, "zoo_presets", Path)
            for path in files:
                presets |= read_presets(path)
    except ZooError as error:
        plugin.status = "broken"
        raised = error.__cause__ if type(error) is PluginError and error.__cause__ else error
        plugin.reason = one_line(describe(raised))
        if manager.has_plugin(plugin.key):
            manager.unregister(name=plugin.key)
        return
    for name, items in contents.items():
        setattr(plugin, name, items)
    plugin.presets, plugin.preset_files = presets, files


def _module(plugin: Plugin) -> ModuleType:
    """Import the module of a plugin, or what else its entry point names."""
    if plugin.built_in:
        return importlib.import_module(plugin.module)
    from importlib.metadata import EntryPoint

    module: ModuleType = EntryPoint(plugin.name, plugin.module, ENTRY_POINT_GROUP).load()
    return module


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("zoo")
    manager.add_hookspecs(hookspecs)
    return manager


def _check_api(module: ModuleType) -> None:
    api = getattr(module, "ZOO_API", None)
    if type(api) is int and OLDEST_API <= api <= ZOO_API:
        return
    if type(api) is not int:
        remedy = "set ZOO_API in the plugin module"
    else:
        remedy = "update attention-zoo" if api > ZOO_API else "update the plugin"
    raise PluginError(f"written for ZOO_API {api!r}, but this version of zoo has {ZOO_API}", None, remedy)


def _collect(manager: pluggy.PluginManager, key: str, hook: str, kind: type[Any]) -> tuple[Any, ...]:
    """Call one plugin's implementation of ``hook`` and check that it returned a sequence of ``kind``."""
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin_name == key:
            result = implementation.function()
            if not isinstance(result, list | tuple) or not all(isinstance(item, kind) for item in result):
                raise PluginError(f"{hook} must return a list of {kind.__name__}, got {result!r}")
            return tuple(result)
    return ()


def _read_elsewhere(plugins: Iterable[Plugin]) -> None:
    """Read plugins in a subprocess, starting a new one after a plugin that imports a heavy package."""
    from zoo.plugins import isolation  # with subprocess, which few commands need

    limit = seconds()
    waiting = {plugin.key: plugin for plugin in plugins}
    while waiting:
        jobs = {key: plugin.identity for key, plugin in waiting.items()}
        for outcome in isolation.run(
            "zoo.plugins.loading:report", jobs, parse=_parse_report, seconds=limit, environment={"ZOO_PLUGINS": ""}
        ):
            plugin = waiting.pop(outcome.job)
            if outcome.failure is not None:
                plugin.status, plugin.reason = "broken", f"{outcome.failure} while loading"
                continue
            contents, heavy = outcome.value
            contents.put_into(plugin)
            if outcome.output.strip() and plugin.status == "ok":
                printed = " ".join(outcome.output.split())
                plugin.complaints = (*plugin.complaints, f"prints when it is loaded: {printed[:80]!r}")
            if heavy:
                break  # in this process, a later import of the same package would go unnoticed


def report(key: str, identity: Mapping[str, str]) -> dict[str, Any]:
    """Load one plugin in this process and return the result as plain data."""
    plugin = Plugin(**identity)  # type: ignore[arg-type]
    before = {name for name in HEAVY if name in sys.modules}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(plugin, _manager())
    heavy = [name for name in HEAVY if name in sys.modules and name not in before]
    said = [str(item.message) for item in caught if issubclass(item.category, ZooWarning)]
    if plugin.status == "ok":
        plugin.complaints = [
            *(text.removeprefix(f"{plugin}: ") for text in said),
            *(f"imports {name} when it is loaded" for name in heavy),
        ]
    contents = json.loads(json.dumps(asdict(_Contents.of(plugin)), default=str))
    return {"contents": contents, "heavy": heavy}


def _parse_report(data: Any) -> tuple[_Contents, Sequence[str]]:
    told = read_plain(_Report, data, "the report")
    return _Contents.parse(told.contents), told.heavy


def seconds() -> float:
    """Return the time limit, in seconds, for a plugin's code in a subprocess."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return _SECONDS
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(f"must be a number of seconds, got {text!r}", VARIABLE)


def _memory_name() -> str:
    """Return the name of the cache entry, one per Python environment."""
    return f"plugins-{hashlib.sha256(f'{sys.prefix} {sys.version}'.encode()).hexdigest()[:16]}"


def _recall() -> dict[str, _Contents]:
    """Return the cached contents of plugins, by key. Entries that are not of this version's form are left out."""
    recalled = {}
    with suppress(ValueError, RecursionError):
        memory = read_plain(_Memory, json.loads(memo.read(_memory_name()) or b"null"))
        for key, contents in memory.plugins.items() if memory.schema == _SCHEMA else ():
            recalled[key] = _Contents.parse(contents)
    return recalled


class _Fingerprints:
    """Fingerprints of the plugins that one process reads."""

    def __init__(self) -> None:
        self._started = time.time_ns()
        self._stamps = functools.cache(_package_stamps)  # most built-in plugins share a package

    @cached_property
    def _environment(self) -> tuple[str, int]:
        return _environment_stamp()

    def find(self, plugin: Plugin) -> str | None:
        """Return the fingerprint of a plugin.

        None if its files cannot be found or, for a built-in one, which is imported before, have changed since.
        """
        stamps = self._stamps(plugin.module.partition(":")[0].partition(".")[0])
        if stamps is None:
            return None
        (environment, zoo_changed), (files, changed) = self._environment, stamps
        if plugin.built_in and max(changed, zoo_changed) > self._started:
            return None
        return hashlib.sha256(f"{plugin} {plugin.module} {files} {environment}".encode()).hexdigest()


def _environment_stamp() -> tuple[str, int]:
    """Return text that changes with zoo's files, the interpreter or the installed distributions.

    With it comes the last change of zoo's files, in nanoseconds since 1970.
    """
    installed = []
    for folder in sys.path:
        with suppress(OSError):
            names = (path.name for path in Path(folder).iterdir())
            installed += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    files = _files(Path(__file__).parents[1])
    return f"{sys.version} {sorted(installed)} {files}", _last_change(files)


def _package_stamps(package: str) -> tuple[str, int] | None:
    """Return text that changes with the files of a top-level package or module, and their last change.

    None if they cannot be found.
    """
    try:
        spec = importlib.util.find_spec(package)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ()) or [str(spec.origin)]
        files = [_files(Path(place)) for place in places]
        return str(files), max(map(_last_change, files), default=0)
    except (ImportError, ValueError, OSError):
        return None


def _last_change(files: Iterable[Sequence[Any]]) -> int:
    return max((changed for *_, changed in files), default=0)


def _files(place: Path) -> list[list[object]]:
    """Return path, size and times of a file, or of every file below a folder, to detect changes."""
    if place.is_file():
        return [_stamp(place)]
    files = []
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118  (faster: every command checks all plugins)
            status = os.stat(path)  # noqa: PTH116
            files.append([path, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return sorted(files)


def _stamp(file: Path) -> list[object]:
    status = file.stat()
    return [str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
