"""Shared fixtures: isolation from the user's files, the command in process, small models, third-party plugins."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from zoo import cli, plugins
from zoo.plugins import manager

ROOT = Path(__file__).parents[1]
"""The root of the repository."""
THIRD_PARTY = ROOT / "tests" / "third_party"
"""Third-party distributions."""
collect_ignore = [THIRD_PARTY.name]  # their own tests need them installed: see tests/packaging

# Compile each module once, not in every process that a test starts, where the environment says otherwise, too.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background with SIGINT ignored, and every process that a test starts would
    # inherit that: tests that send SIGINT would wait in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("zoo", deadline=None, max_examples=20)  # no deadline: first calls import and trace
settings.register_profile("thorough", deadline=None, max_examples=200)  # pytest --hypothesis-profile=thorough
settings.load_profile("zoo")

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # torch and ONNX Runtime start a thread per available core, and their spinning threads would slow each other down:
    # pin each worker to one core.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]})

# The functions that make all changes to the disk.
CALLS = {
    "fsync": (os, "fsync"),
    "rename": (Path, "rename"),
    "replace": (Path, "replace"),
    "os.open": (os, "open"),
    "Path.open": (Path, "open"),
    "mkdir": (Path, "mkdir"),
    "unlink": (os, "unlink"),
    "rmdir": (os, "rmdir"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run one of N parts of the selected tests, split by test name")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply ``slow_after``, and keep the chosen part. A test belongs to the same part whatever others there are."""
    cases: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("slow_after")) is not None:
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
    if (part := config.getoption("--part")) is None:
        return
    number, count = map(int, part.split("/"))
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number % count]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@dataclass(frozen=True)
class Result:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, parsed; it must be a single JSON document."""
        return json.loads(self.out)

    @property
    def warnings(self) -> list[str]:
        """Lines of standard error, all of which must be warnings."""
        lines = self.err.splitlines()
        assert all(line.startswith("warning: ") for line in lines), self.err
        return lines

    def failed(self, status: int, *fragments: str) -> str:
        """Assert a failure: this status, a single error line with all fragments, and no standard output."""
        assert (self.status, self.out) == (status, ""), f"{self.status}\n{self.out}\n{self.err}"
        assert self.err.startswith("error: "), self.err
        assert self.err.endswith("\n"), self.err
        assert self.err.count("\n") == 1, self.err
        assert "internal error" not in self.err
        for fragment in fragments:
            assert fragment in self.err
        return self.err


@contextlib.contextmanager
def nth_call(name: str, number: int, action: Callable[[], None]) -> Iterator[list[str]]:
    """Run ``action`` before the ``number``-th call of a function; it may raise instead. Yields the calls so far."""
    calls: list[str] = []
    owner, attribute = CALLS[name]
    original = getattr(owner, attribute)

    def counted(*arguments: object, **options: object) -> object:
        if _changes_the_disk(name, arguments, options):
            calls.append(name)
            if len(calls) == number:
                action()
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, counted)
        yield calls


def _changes_the_disk(name: str, arguments: tuple[object, ...], options: Mapping[str, object]) -> bool:
    """Return False for reads, and for shutil.rmtree (recognised by dir_fd), whose failures are tolerated."""
    if name == "Path.open":
        return not {"w", "x", "a", "+"}.isdisjoint(str(options.get("mode", (*arguments, "r")[1])))
    return not (name == "os.open" and "dir_fd" in options)


def full() -> None:
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of the session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def cache(shared: Path) -> Iterator[Path]:
    """Cache traced graphs for the session, apart from the user's cache."""
    folder = shared / "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def unhurried_disk() -> Iterator[None]:
    """Do not wait until files are on the disk: that tells apart only tests during which the machine loses its power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def default_plugins(cache: Path) -> Iterator[None]:
    """Discover the default plugins once, not in every test and command, as long as no test changes the path."""
    default = manager.Plugins(plugins.Selection())
    path, discovered, read = [*sys.path], manager.discover, manager.Plugins

    def plugins_of(selection: plugins.Selection, *, retry: bool = False) -> plugins.Plugins:
        unchanged = sys.path == path and manager.discover is discovered
        return default if unchanged and not retry and selection == default.selection else read(selection, retry=retry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "Plugins", plugins_of)
        yield


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path) -> Iterator[None]:
    """Run each test in an empty directory, without the user's presets and plugin selection."""
    with pytest.MonkeyPatch.context() as patch:  # its own, which no test undoes
        patch.setenv("XDG_CONFIG_HOME", f"{tmp_path}-user")
        patch.delenv("ZOO_PLUGINS", raising=False)
        patch.chdir(tmp_path)
        plugins.select(plugins.Selection())
        yield
    plugins.select(plugins.Selection())
    for name in ("zoo.server", "uvicorn.error", "asyncio"):  # zoo serve has them write to the stderr of its test
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


@pytest.fixture
def zoo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run ``zoo`` in this process, with the given arguments and standard input."""

    def run(*arguments: object, stdin: bytes = b"") -> Result:
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a preset with these options, once per session. Tests that modify the model must copy it."""
    made: dict[tuple[str, ...], Path] = {}

    def build(name: str, *options: str) -> Path:
        if (name, *options) not in made:
            folder = tmp_path_factory.mktemp("built")
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
                patch.setenv("XDG_CONFIG_HOME", str(folder / "user"))
                patch.delenv("ZOO_PLUGINS", raising=False)
                patch.chdir(folder)
                assert cli.main(["build", name, "-o", str(folder / name), *options]) == 0
            plugins.select(plugins.Selection())
            made[name, *options] = folder / name
        return made[name, *options]

    return build


@pytest.fixture
def copy_of(built: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a built model to the current directory, to be modified."""

    def copy(name: str, *options: str) -> Path:
        return Path(shutil.copytree(built(name, *options), tmp_path / name))

    return copy


@pytest.fixture
def seal() -> Callable[[Path], None]:
    """Rewrite a model's manifest to match its files, as an attacker would do to hide a change."""

    def write(model: Path) -> None:
        files = {
            path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size}
            for path in sorted(model.iterdir())
            if path.is_file() and path.name != "manifest.json"
        }
        (model / "manifest.json").write_text(json.dumps({"schema": 1, "files": files}))

    return write


@pytest.fixture
def snapshot(tmp_path: Path) -> Callable[[], dict[str, bytes | None]]:
    """Return every path below the current directory with its content, for comparison before and after."""

    def take() -> dict[str, bytes | None]:
        return {
            str(path.relative_to(tmp_path)): path.read_bytes() if path.is_file() else None
            for path in tmp_path.rglob("*")
        }

    return take


@pytest.fixture
def install(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Create a distribution with one plugin on the path, from its metadata, module and other files.

    The module's name is the distribution's with underscores, and replaces ``{module}`` in its files.
    """
    modules: set[str] = set()

    def make(
        distribution: str,
        code: str | None,
        *,
        version: str = "1.0",
        plugin: str | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Path:
        module = distribution.replace("-", "_")
        folder = tmp_path_factory.mktemp(module)
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[zoo.plugins]\n{plugin or distribution} = {module}\n")
        for name, text in {f"{module}.py": code, **(files or {})}.items():
            if text is not None:
                (folder / name.replace("{module}", module)).write_text(text.replace("{module}", module))
        modules.add(module)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        plugins.select(plugins.Selection())
        return folder

    yield make
    for name in [name for name in sys.modules if any(name.startswith(module) for module in modules)]:
        del sys.modules[name]


def text_generator(name: str) -> str:
    """Return the module of a plugin, for ``install``, with one architecture for text generation and its presets.

    The other files must be the configuration ``Settings`` in ``{module}_config.py``, ``Model`` in ``{module}_model.py``
    and ``presets.toml``.
    """
    return f"""
import zoo
from pathlib import Path
ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    names = {{"config": "{{module}}_config:Settings", "model": "{{module}}_model:Model"}}
    return [zoo.Architecture(name="{name}", tasks=("text-generation",), reference="None", **names)]

@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]
"""


@pytest.fixture
def third_party(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a distribution of tests/third_party on the path, as if it were installed."""

    def put(name: str) -> None:
        install(f"zoo-{name}", None, plugin=name)
        monkeypatch.syspath_prepend(THIRD_PARTY / f"zoo-{name}")

    return put
