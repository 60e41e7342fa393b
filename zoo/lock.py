"""The lock of third-party plugins: which distributions may be loaded, and that each is what was frozen.

Nothing here imports a plugin. A RECORD lists the files of a distribution and their digests. The lock has the digest of
that list, the files are compared with it, and nothing may lie there that the interpreter would take instead of them. A
lock holds on other machines too: it leaves out the files that installers write, which differ from place to place.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import marshal
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder, all_suffixes
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from zoo.errors import ArtifactError, PluginError

if TYPE_CHECKING:
    from zoo.plugins import Plugin, Selection

__all__ = ["Locked", "check", "freeze", "read", "write"]

SCHEMA = 1

ALGORITHMS = frozenset({"sha256", "sha384", "sha512", "sha3_256", "sha3_384", "sha3_512", "blake2b", "blake2s"})
"""What a RECORD may use: the standard forbids weaker ones than SHA-256."""
UNHASHED = ("RECORD", "RECORD.jws", "RECORD.p7s")
"""The files of metadata that cannot have a digest in the RECORD."""
INSTALLER = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json")
"""The files of metadata that no wheel brings: they say who installed it, why and from where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Locked:
    """One distribution of a lock."""

    name: str
    version: str
    sha256: str
    """Of what its RECORD says about the files that its wheel brought."""
    plugins: Mapping[str, str]
    """Where its plugins are, by name, as its entry points say."""


def freeze(plugins: Iterable[Plugin]) -> list[Locked]:
    """What a lock says of the distributions of these third-party plugins, by name.

    Raises :class:`PluginError` for one that is not what its RECORD says, or that has none that covers its code.
    """
    locked = []
    for _, installed in sorted(_installed(plugins).items()):
        installed.verify()
        declared = {plugin.name: plugin.module for plugin in installed.plugins}
        locked.append(Locked(name=installed.name, version=installed.version, sha256=installed.digest, plugins=declared))
    return locked


def check(path: Path, selection: Selection, plugins: Iterable[Plugin]) -> set[str]:
    """Hold the third-party plugins that may be imported to a lock. Returns the plugins' names in the lock.

    Raises :class:`PluginError` for the first distribution that is not in the lock, not what it says, altered or
    missing, and :class:`ArtifactError` for a lock that cannot be read.
    """
    lock = {_normal(locked.name): locked for locked in read(path)}
    third = (item for item in plugins if not item.built_in and selection.allows(item.name, built_in=False))
    installed = _installed(third)
    again = f"zoo plugins freeze -o {path} --force"
    for key, found in sorted(installed.items()):
        locked = lock.get(key)
        if locked is None:
            raise PluginError(f"{found} is not in the lock", path, f"{again}, or {found.without}")
        if found.version != locked.version:
            what = f"{found} is installed, version {locked.version} is locked"
            raise PluginError(what, path, f"pip install {locked.name}=={locked.version}, {again}, or {found.without}")
        if found.digest != locked.sha256:
            what = f"{found} has other files than were locked (its RECORD differs)"
            raise PluginError(what, path, f"{found.reinstall}, {again}, or {found.without}")
        found.verify()
    for key, locked in sorted(lock.items()):
        allowed = [name for name in locked.plugins if selection.allows(name, built_in=False)]
        if key not in installed and allowed:
            what = f"{locked.name} {locked.version} is in the lock and its plugins are not installed"
            without = " ".join(f"-P no:{name}" for name in allowed)
            raise PluginError(what, path, f"pip install {locked.name}=={locked.version}, {again}, or {without}")
    return {name for locked in lock.values() for name in locked.plugins}


def write(path: Path, lock: Sequence[Locked], *, force: bool) -> None:
    """Write a lock, at once or not at all.

    Raises ``UsageError`` when ``path`` exists and ``force`` is false, and ``StorageError`` when it cannot be written.
    """
    from zoo.storage import new_file  # only who writes needs it

    with new_file(path, force=force) as stage:
        data = {"schema": SCHEMA, "distributions": [asdict(locked) for locked in lock]}
        stage.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> list[Locked]:
    """The distributions of a lock. One that is missing or damaged is an :class:`ArtifactError`."""
    remedy = f"zoo plugins freeze -o {path}"
    try:
        data: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError("no such lock", path, f"{remedy} writes one") from error
    except OSError as error:
        raise ArtifactError(f"cannot read the lock ({error.strerror})", path) from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError("not a lock (it is not JSON)", path, f"{remedy} --force") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise ArtifactError(f"not a lock of schema {SCHEMA}", path, f"{remedy} --force")
    try:
        lock = [_locked(**entry) for entry in data["distributions"]]
    except (KeyError, TypeError) as error:
        raise ArtifactError("not a lock (an entry is not understood)", path, f"{remedy} --force") from error
    if len({_normal(locked.name) for locked in lock}) < len(lock):
        raise ArtifactError("not a lock (it names a distribution twice)", path, f"{remedy} --force")
    return lock


def _locked(**entry: Any) -> Locked:
    """An entry of a lock; anything but its four fields is a ``TypeError``."""
    locked = Locked(**entry)
    if not isinstance(locked.plugins, dict):
        raise TypeError(locked.plugins)
    for text in (locked.name, locked.version, locked.sha256, *locked.plugins.values()):
        if not isinstance(text, str):
            raise TypeError(text)
    return locked


def _normal(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub("[-_.]+", "-", name).lower()


def _installed(plugins: Iterable[Plugin]) -> dict[str, _Installed]:
    """Distributions by name. Of two with one name the first counts: it is the one that is imported."""
    grouped: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        grouped.setdefault(_normal(plugin.distribution), []).append(plugin)
    return {name: _Installed(group) for name, group in grouped.items()}


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a RECORD."""

    path: str
    """As it is written: relative to where the metadata lies, with slashes, or absolute."""
    digest: str
    size: str
    file: str
    """Its absolute path."""


class _Installed:
    """The distribution of some plugins, as it lies on the disk."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self.plugins = plugins
        self.name = plugins[0].distribution
        self.version = plugins[0].version
        self.without = " ".join(f"-P no:{plugin.name}" for plugin in plugins)
        self.reinstall = f"pip install --force-reinstall --no-deps {self.name}=={self.version}"
        # The public interface has no name for the folder of the metadata, which tells one RECORD from another.
        folder = getattr(plugins[0].source, "_path", None)
        if not isinstance(folder, Path) or folder.suffix != ".dist-info":
            self._refuse("has no RECORD", folder, f"install it from a wheel, or {self.without}")
        self.info = Path(os.path.abspath(folder))  # noqa: PTH100  (resolve() would follow links)
        self.base = self.info.parent

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def _refuse(self, what: str, where: object, remedy: str | None = None) -> NoReturn:
        raise PluginError(f"{self} {what}", where, remedy or f"{self.reinstall}, or {self.without}")

    @cached_property
    def rows(self) -> Sequence[_Row]:
        """The lines of the RECORD, which must cover the code."""
        record = self.info / "RECORD"
        wheel = f"install it from a wheel, or {self.without}"
        if self._is_editable():
            self._refuse("is an editable install, whose RECORD does not cover its code", self.info, wheel)
        try:
            text = record.read_text(encoding="utf-8")
            lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
            rows = [_Row(path, digest, size, self._absolute(path)) for path, digest, size in lines]
        except FileNotFoundError:
            self._refuse("has no RECORD", record, wheel)
        except OSError as error:
            self._refuse(f"has a RECORD that cannot be read ({error.strerror})", record)
        except (ValueError, csv.Error):
            self._refuse("has a RECORD that is not understood", record)
        listed = {row.file for row in rows}
        for name in ("METADATA", "RECORD", "entry_points.txt"):
            if str(self.info / name) not in listed:
                self._refuse(f"has a RECORD without its {name}", record)
        return rows

    def _is_editable(self) -> bool:
        try:
            origin = json.loads((self.info / "direct_url.json").read_bytes())
            return bool(origin["dir_info"]["editable"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return False  # if it is one all the same, its code is not in its RECORD

    def _absolute(self, path: str) -> str:
        if "\0" in path or not path:
            raise ValueError(path)
        return os.path.normpath(self.base / path)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the lines about files that the wheel brought, in the order of their names."""
        brought = sorted((row.path, row.digest, row.size) for row in self.rows if not self._by_installer(row))
        return hashlib.sha256(json.dumps(brought).encode()).hexdigest()

    def _by_installer(self, row: _Row) -> bool:
        """Whether an installer made the file, or, as the first line of a script, had to change it."""
        folder, name = os.path.split(row.file)
        if folder == str(self.info):
            return name in INSTALLER
        if not self._is_inside(row):
            return os.path.basename(folder) in ("bin", "Scripts")  # noqa: PTH119
        return not row.digest and self._is_cache(row)

    def _is_inside(self, row: _Row) -> bool:
        return Path(row.file).is_relative_to(self.base)

    def _is_cache(self, row: _Row) -> bool:
        """Whether it is what the interpreter made of a recorded source."""
        try:
            return importlib.util.source_from_cache(row.file) in self.hashed
        except ValueError:
            return False

    @cached_property
    def hashed(self) -> frozenset[str]:
        """The files with a digest."""
        return frozenset(row.file for row in self.rows if row.digest)

    def verify(self) -> None:
        """Raise :class:`PluginError` unless every file is what the RECORD says and is what would be imported."""
        for row in self.rows:
            self._verify_file(row)
        modules = list(self._modules())
        names = {name for name, _ in modules}
        for plugin in self.plugins:
            name = plugin.module.partition(":")[0].strip()
            if name not in names:
                what = f"names a module that is not one of its files, {name!r}"
                self._refuse(what, self.info / "entry_points.txt", self.without)
        packages = {Path(file).parent for _, file in modules if _stem(file) == "__init__"}
        for name, file in modules:
            enclosing = [folder for folder in Path(file).parents if folder in packages]
            if not enclosing:
                self._verify_found(name, file)
            elif len(enclosing) == 1 and _stem(file) == "__init__":
                self._verify_found(name, file)
                self._verify_nothing_else(enclosing[0])
        for row in self.rows:
            if row.digest and self._is_inside(row) and row.file.endswith(tuple(SOURCE_SUFFIXES)):
                self._verify_cached(row.file)

    def _verify_file(self, row: _Row) -> None:
        if not row.digest:
            if not ((Path(row.file).parent == self.info and _name(row.file) in UNHASHED) or self._is_cache(row)):
                self._refuse("has a file without a digest in its RECORD", row.file)
            return
        algorithm, _, expected = row.digest.partition("=")
        if algorithm not in ALGORITHMS:
            self._refuse(f"has a digest in its RECORD that does not count, {algorithm!r}", row.file)
        try:
            status = os.stat(row.file)  # noqa: PTH116  (before it is opened: reading a pipe or a device may not end)
            if not stat.S_ISREG(status.st_mode):
                self._refuse("is altered: this is not a file", row.file)
            if row.size and row.size != str(status.st_size):
                self._refuse(f"is altered: {status.st_size} bytes, its RECORD says {row.size}", row.file)
            with open(row.file, "rb") as stream:  # noqa: PTH123
                found = hashlib.file_digest(stream, algorithm).digest()
        except FileNotFoundError:
            self._refuse("is altered: a file is missing", row.file)
        except OSError as error:
            self._refuse(f"has a file that cannot be read ({error.strerror})", row.file)
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != expected:
            self._refuse(f"is altered: its {algorithm} differs from its RECORD's", row.file)

    def _modules(self) -> Iterator[tuple[str, str]]:
        """What can be imported of the recorded files: names and files."""
        for row in self.rows:
            if self._is_inside(row) and row.digest and row.file.endswith(tuple(all_suffixes())):
                parts = [*Path(row.file).relative_to(self.base).parent.parts, _stem(row.file)]
                if parts[-1] == "__init__":
                    parts.pop()
                if parts and all(map(str.isidentifier, parts)) and "__pycache__" not in parts:
                    yield ".".join(parts), row.file

    def _verify_found(self, name: str, file: str) -> None:
        """An earlier folder of the path, or another kind of module beside it, would hide a module."""
        found = _origin(name)
        if found is None or os.path.abspath(found) not in self.hashed:  # noqa: PTH100
            self._refuse(f"is hidden: {name} would be imported from {found}", file, f"remove it, or {self.without}")

    def _verify_nothing_else(self, package: Path) -> None:
        """Modules that were added could be imported, and some, like extensions, before those that are recorded."""
        for folder, folders, names in os.walk(package):
            folders[:] = [name for name in folders if name != "__pycache__"]
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]  # noqa: PTH114, PTH118
            added = [name for name in names if name.endswith(tuple(all_suffixes()))]
            for name in (*links, *added):
                if os.path.join(folder, name) not in self.hashed:  # noqa: PTH118
                    remedy = f"remove it, or {self.without}"
                    self._refuse("is altered: not in its RECORD", Path(folder) / name, remedy)

    def _verify_cached(self, source: str) -> None:
        """The interpreter takes a fitting .pyc and never looks at the source, so the two must be the same code."""
        for level, optimization in enumerate(("", "1", "2")):
            cached = Path(importlib.util.cache_from_source(source, optimization=optimization))
            if str(cached) in self.hashed:
                continue
            try:
                data = cached.read_bytes()
            except OSError:
                continue  # there is none, or the interpreter cannot read it either
            if _is_used(data, os.stat(source)) and not _is_code_of(data[16:], source, level):  # noqa: PTH116
                self._refuse("is altered: not what its source compiles to", cached, f"remove it, or {self.without}")


def _name(file: str) -> str:
    return os.path.basename(file)  # noqa: PTH119


def _stem(file: str) -> str:
    """The name of the module in a file: what the longest of the suffixes that fit leaves of it."""
    name = _name(file)
    return name[: -max((len(suffix) for suffix in all_suffixes() if name.endswith(suffix)), default=0) or None]


def _origin(module: str) -> str | None:
    """The file that would be imported as ``module``, found without importing its parents."""
    spec: ModuleSpec | None = None
    for name in module.split("."):
        if spec is None:
            found = (finder.find_spec(name, None) for finder in sys.meta_path)
            spec = next((each for each in found if each is not None), None)
        else:
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
        if spec is None:
            return None
    return spec.origin if spec else None


def _is_used(data: bytes, source: os.stat_result) -> bool:
    """Whether the interpreter would take a .pyc: its header, 4 numbers of 4 bytes, fits interpreter and source."""
    flags = int.from_bytes(data[4:8], "little")
    if data[:4] != importlib.util.MAGIC_NUMBER or len(data) < 16 or flags > 3:
        return False
    fields = [int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF]
    return bool(flags & 1) or [int.from_bytes(data[at : at + 4], "little") for at in (8, 12)] == fields


def _is_code_of(data: bytes, source: str, level: int) -> bool:
    """Whether marshalled code is what a source compiles to at this level of optimisation."""
    try:
        code = marshal.loads(data)
        own = compile(Path(source).read_bytes(), source, "exec", dont_inherit=True, optimize=level)
    except Exception:  # of many kinds: neither says what it makes of nonsense
        return False
    return isinstance(code, CodeType) and code == own
