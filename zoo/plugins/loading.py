"""Reading of plugins. Contributions are data, so they are read once, in a subprocess, and cached.

A command that does not use a third-party module never imports it. A module that hangs, exits, prints or patches torch
on import therefore affects no other command, and two hundred plugins cost little more than three.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from zoo import hookspecs, memo
from zoo.contract import Architecture, Command, Dataset, Engine, Exporter, Importer, Objective, Task, Tracker
from zoo.errors import PluginError, UsageError, ZooError
from zoo.hookspecs import OLDEST_API, ZOO_API
from zoo.plugins import isolation
from zoo.plugins.discovery import ENTRY_POINT_GROUP, Plugin, ZooWarning, blame, describe
from zoo.plugins.presets import Preset, read_presets

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
_SCHEMA = 4


def read(plugins: Sequence[Plugin], *, retry: bool = False) -> None:
    """Read the contributions of each plugin. A plugin that fails is marked broken without affecting the others.

    Built-in plugins are imported. The contributions of third-party plugins are cached until their files or the
    installed distributions change; then the plugins are imported in a subprocess. With ``retry``, broken plugins are
    imported again too, because the cause may have been temporary.
    """
    environment, manager = _environment_stamp(), _manager()
    stamps = functools.cache(_package_stamps)  # most built-in plugins share a package
    for plugin in plugins:
        files = stamps(plugin.module.partition(":")[0].partition(".")[0])
        if files is not None:
            facts = f"{plugin} {plugin.module} {files} {environment}"
            plugin.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        if plugin.built_in:
            load(plugin, manager)
    others = [plugin for plugin in plugins if not plugin.built_in]
    if not others:
        return
    memory, unknown = _recall(), []
    for plugin in others:
        known = memory.get(plugin.key)
        if known is None or not _holds(known, plugin) or (retry and known["status"] == "broken"):
            unknown.append(plugin)
        else:
            _fill(plugin, known)
    if unknown:
        _read_elsewhere(unknown)
        memory |= {plugin.key: _contents(plugin) for plugin in unknown}
        memo.write(_memory_name(), json.dumps({"schema": _SCHEMA, "plugins": memory}).encode())


def load(plugin: Plugin, manager: pluggy.PluginManager) -> None:
    """Import and register a plugin and call its hooks, in this process."""
    started = time.perf_counter()
    found: dict[str, Any] = {}
    presets: dict[str, Preset] = {}
    files: Sequence[Path] = ()
    try:
        with blame(plugin, "cannot be loaded"):
            module = EntryPoint(plugin.name, plugin.module, ENTRY_POINT_GROUP).load()
            plugin.import_seconds = time.perf_counter() - started
            _check_api(module)
            manager.register(module, plugin.key)
            manager.check_pending()
            for name, kind in CONTRIBUTIONS.items():
                found[name] = _collect(manager, plugin.key, f"zoo_{name}", kind)
                for item in found[name]:
                    item.check()
            files = _collect(manager, plugin.key, "zoo_presets", Path)
            for path in files:
                presets |= read_presets(path)
    except ZooError as error:
        plugin.status = "broken"
        raised = error.__cause__ if type(error) is PluginError and error.__cause__ else error
        plugin.reason = " ".join(describe(raised).split())
        if manager.has_plugin(plugin.key):
            manager.unregister(name=plugin.key)
        return
    for name, items in found.items():
        setattr(plugin, name, items)
    plugin.presets, plugin.preset_files = presets, files


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
    limit = seconds()
    waiting = {plugin.key: plugin for plugin in plugins}
    while waiting:
        jobs = {key: plugin.identity for key, plugin in waiting.items()}
        for outcome in isolation.run(
            "zoo.plugins.loading:report", jobs, seconds=limit, environment={"ZOO_PLUGINS": ""}
        ):
            plugin = waiting.pop(outcome.job)
            if outcome.failure is not None:
                plugin.status, plugin.reason = "broken", f"{outcome.failure} while loading"
                continue
            _fill(plugin, outcome.value)
            if outcome.output.strip() and plugin.status == "ok":
                printed = " ".join(outcome.output.split())
                plugin.complaints = (*plugin.complaints, f"prints when it is loaded: {printed[:80]!r}")
            if outcome.value["heavy"]:
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
    return {**json.loads(json.dumps(_contents(plugin), default=str)), "heavy": heavy}


def _contents(plugin: Plugin) -> dict[str, Any]:
    """Return a plugin's status and contributions as plain data."""
    return {
        "fingerprint": plugin.fingerprint,
        "status": plugin.status,
        "reason": plugin.reason,
        "complaints": list(plugin.complaints),
        "import_seconds": plugin.import_seconds,
        "presets": {name: asdict(preset) for name, preset in plugin.presets.items()},
        "preset_files": [str(path) for path in plugin.preset_files],
        "preset_stamps": [_files(path) for path in plugin.preset_files],
        **{name: [asdict(item) for item in getattr(plugin, name)] for name in CONTRIBUTIONS},
    }


def _fill(plugin: Plugin, contents: Mapping[str, Any]) -> None:
    """Invert :func:`_contents`, except for the fingerprint."""
    plugin.status, plugin.reason = contents["status"], contents["reason"]
    plugin.complaints, plugin.import_seconds = contents["complaints"], contents["import_seconds"]
    plugin.presets = {name: Preset(**preset) for name, preset in contents["presets"].items()}
    plugin.preset_files = [Path(file) for file in contents["preset_files"]]
    for name, kind in CONTRIBUTIONS.items():
        setattr(plugin, name, tuple(kind(**_with_tuples(item)) for item in contents[name]))


def _holds(known: Mapping[str, Any], plugin: Plugin) -> bool:
    """Return whether a plugin's cached contents are still valid."""
    if plugin.fingerprint is None or known["fingerprint"] != plugin.fingerprint:
        return False
    return [_files(Path(file)) for file in known["preset_files"]] == known["preset_stamps"]


def _with_tuples(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}


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


def _recall() -> dict[str, Any]:
    """Return the cached contents of plugins, by key."""
    data = memo.read(_memory_name())
    memory = json.loads(data) if data is not None else {}
    return dict(memory["plugins"]) if memory.get("schema") == _SCHEMA else {}


def _environment_stamp() -> str:
    """Return text that changes with zoo's files, the interpreter or the installed distributions."""
    installed = []
    for folder in sys.path:
        with suppress(OSError):
            names = (path.name for path in Path(folder).iterdir())
            installed += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return f"{sys.version} {sorted(installed)} {_files(Path(__file__).parents[1])}"


def _package_stamps(package: str) -> str | None:
    """Return text that changes with the files of a top-level package or module; None if they cannot be found."""
    try:
        spec = importlib.util.find_spec(package)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ()) or [str(spec.origin)]
        return str([_files(Path(place)) for place in places])
    except (ImportError, ValueError, OSError):
        return None


def _files(place: Path) -> list[list[object]]:
    """Return path, size and times of a file, or of every file below a folder, to detect changes."""
    if place.is_file():
        status = place.stat()
        return [[str(place), status.st_size, status.st_mtime_ns, status.st_ctime_ns]]
    found = []
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118  (faster: every command checks all plugins)
            status = os.stat(path)  # noqa: PTH116
            found.append([path, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return sorted(found)
