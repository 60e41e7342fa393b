"""Reading plugins: what they contribute is data, so it is read once, in another process, and remembered.

A third party's module is not imported by a command that does not use it. One that hangs, exits, prints or patches
torch when it is imported therefore disturbs no command, and two hundred cost little more than three.
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

from zoo import cache, hookspecs, isolation
from zoo.contract import Architecture, Command, Exporter, Importer, Task
from zoo.discovery import ENTRY_POINT_GROUP, Plugin, ZooWarning, blame, describe
from zoo.errors import PluginError, UsageError, ZooError
from zoo.hookspecs import OLDEST_API, ZOO_API
from zoo.presets import Preset, read_presets

__all__ = ["CONTRIBUTIONS", "HEAVY", "load", "read", "seconds"]

CONTRIBUTIONS: Mapping[str, type[Any]] = {
    "architectures": Architecture,
    "importers": Importer,
    "exporters": Exporter,
    "tasks": Task,
    "commands": Command,
}
"""What plugins contribute besides presets; each has the hook ``zoo_NAME``."""
HEAVY = ("torch", "onnx", "onnxruntime")
"""What neither a plugin's module nor a configuration's may import."""
VARIABLE = "ZOO_PLUGIN_SECONDS"
"""The environment variable that says how long a plugin may take to load."""
_SECONDS = 20.0
_SCHEMA = 1


def read(plugins: Sequence[Plugin], *, retry: bool = False) -> None:
    """Find out what each plugin contributes. Whatever one does, it alone is to blame, and is marked broken.

    The built-in ones are imported. Of a third party it is remembered what it contributed, unless its files, or what is
    installed, changed; else it is imported in a process of its own. With ``retry`` so is one that was broken: what
    kept it may have passed.
    """
    surroundings, manager = _surroundings(), _manager()
    stamps = functools.cache(_package_stamps)  # most of the built-in ones share a package
    for plugin in plugins:
        files = stamps(plugin.module.partition(":")[0].partition(".")[0])
        if files is not None:
            facts = f"{plugin} {plugin.module} {files} {surroundings}"
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
        cache.write(_memory_name(), json.dumps({"schema": _SCHEMA, "plugins": memory}).encode())


def load(plugin: Plugin, manager: pluggy.PluginManager) -> None:
    """Import and register one plugin and call its hooks, in this process."""
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
    remedy = "state ZOO_API" if type(api) is not int else "update attention-zoo" if api > ZOO_API else "update it"
    raise PluginError(f"written for ZOO_API {api!r}, this zoo has {ZOO_API}", None, remedy)


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
    """Read plugins in another process, and in a new one after each that leaves something behind there."""
    limit = seconds()
    waiting = {plugin.key: plugin for plugin in plugins}
    while waiting:
        jobs = {key: plugin.identity for key, plugin in waiting.items()}
        for outcome in isolation.run("zoo.loading:report", jobs, seconds=limit, environment={"ZOO_PLUGINS": ""}):
            plugin = waiting.pop(outcome.job)
            if outcome.failure is not None:
                plugin.status, plugin.reason = "broken", f"{outcome.failure} while it was loaded"
                continue
            _fill(plugin, outcome.value)
            if outcome.output.strip() and plugin.status == "ok":
                printed = " ".join(outcome.output.split())
                plugin.complaints = (*plugin.complaints, f"prints when it is loaded: {printed[:80]!r}")
            if outcome.value["heavy"]:
                break  # the next would not be seen to import it


def report(key: str, identity: Mapping[str, str]) -> dict[str, Any]:
    """Load one plugin in this process, and tell what came of it as plain data."""
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
    """What came of a plugin, as plain data."""
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
    """The inverse of :func:`_contents`, but for the fingerprint."""
    plugin.status, plugin.reason = contents["status"], contents["reason"]
    plugin.complaints, plugin.import_seconds = contents["complaints"], contents["import_seconds"]
    plugin.presets = {name: Preset(**preset) for name, preset in contents["presets"].items()}
    plugin.preset_files = [Path(file) for file in contents["preset_files"]]
    for name, kind in CONTRIBUTIONS.items():
        setattr(plugin, name, tuple(kind(**_with_tuples(item)) for item in contents[name]))


def _holds(known: Mapping[str, Any], plugin: Plugin) -> bool:
    """Whether what is remembered of a plugin is what it would contribute now."""
    if plugin.fingerprint is None or known["fingerprint"] != plugin.fingerprint:
        return False
    return [_files(Path(file)) for file in known["preset_files"]] == known["preset_stamps"]


def _with_tuples(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}


def seconds() -> float:
    """How long a plugin's code may take in a process of its own."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return _SECONDS
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(f"must be a number of seconds, got {text!r}", VARIABLE)


def _memory_name() -> str:
    """One memory for each environment."""
    return f"plugins-{hashlib.sha256(f'{sys.prefix} {sys.version}'.encode()).hexdigest()[:16]}"


def _recall() -> dict[str, Any]:
    """What came of each plugin when it was read."""
    data = cache.read(_memory_name())
    memory = json.loads(data) if data is not None else {}
    return dict(memory["plugins"]) if memory.get("schema") == _SCHEMA else {}


def _surroundings() -> str:
    """Tells whether zoo, the interpreter and the names of what is installed are the same."""
    installed = []
    for folder in sys.path:
        with suppress(OSError):
            names = (path.name for path in Path(folder).iterdir())
            installed += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return f"{sys.version} {sorted(installed)} {_files(Path(__file__).parent)}"


def _package_stamps(package: str) -> str | None:
    """What changes whenever a file of a top-level package or module does; None where its files cannot be found."""
    try:
        spec = importlib.util.find_spec(package)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ()) or [str(spec.origin)]
        return str([_files(Path(place)) for place in places])
    except (ImportError, ValueError, OSError):
        return None


def _files(place: Path) -> list[list[object]]:
    """What tells whether a file, or one below a folder, was changed, without reading it."""
    if place.is_file():
        status = place.stat()
        return [[str(place), status.st_size, status.st_mtime_ns, status.st_ctime_ns]]
    found = []
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118  (two hundred packages are looked at in each command)
            status = os.stat(path)  # noqa: PTH116
            found.append([path, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return sorted(found)
