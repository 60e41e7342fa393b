"""Signals end a command with 128 plus their number, at most one line, and the old state or the new one.

A signal is caught from the first import of zoo on; the start of the interpreter before it takes some milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.hostile.commands import COMMANDS, Command, Tree, leftovers, open_models, tree
from tests.hostile.conftest import Starts

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RUN = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background inherits that it is ignored
from zoo import signals
signals.catch()
os.write({pipe}, b".")
from zoo.__main__ import run
run()
"""
QUICK = ("list", "tokenizer over")
"""Commands that get a few signals by default."""
READING = {"list": ("list",), "help": ("--help",), "show": ("show", "gpt-tiny"), "why": ("why", "gpt-tiny")}
"""Commands that write nothing."""
CLOSED = (">&-", "2>&-", "<&-", ">&- 2>&- <&-")
ALL = {**COMMANDS, **{name: Command("nothing", arguments) for name, arguments in READING.items()}}


@dataclass(frozen=True)
class Process:
    """Runs commands in processes of their own, with folders for temporary and cached files."""

    place: Path

    @property
    def root(self) -> Path:
        return self.place / "root"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of commands. The rounding of sums depends on the number of threads."""
        folders = {"TMPDIR": "tmp", "ZOO_CACHE": "cache", "XDG_RUNTIME_DIR": "runtime"}
        for folder in folders.values():
            (self.place / folder).mkdir(mode=0o700, exist_ok=True)  # as the last must be
        paths = {variable: str(self.place / folder) for variable, folder in folders.items()}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **paths}

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command. Returns once it can catch signals."""
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", RUN.format(pipe=writer), *arguments],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[writer],
        )
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert pipe.read(1) == b"."
        return process

    def left(self) -> list[str]:
        """Return what a command should not leave behind."""
        cached = (name for name in tree(self.place / "cache") if name.endswith(".part") or "/." in name)
        locks = (name for name, content in tree(self.place / "runtime").items() if content is not None)
        return sorted({*leftovers(tree(self.root)), *tree(self.place / "tmp"), *cached, *locks})


class Attack:
    """A command, what it does undisturbed, and a check of what it does on a signal."""

    def __init__(self, process: Process, starts: Starts, command: Command) -> None:
        self.process, self.starts, self.command = process, starts, command
        starts.put(command.start, process.root)
        self.before = tree(process.root)
        started = time.monotonic()
        running = process.start(command.arguments)
        _, err = running.communicate()
        self.seconds = time.monotonic() - started
        assert (running.returncode, process.left()) == (0, []), err
        self.complete = tree(process.root)

    def run(self, number: int, fraction: float) -> list[str]:
        """Send a signal after a fraction of the time that the command takes. Returns what is wrong then."""
        self.starts.put(self.command.start, self.process.root)
        running = self.process.start(self.command.arguments)
        time.sleep(fraction * self.seconds)
        running.send_signal(number)
        _, err = running.communicate(timeout=300)
        found, wrong = tree(self.process.root), list(_lines(running.returncode, number, err))
        whole = self._same(found, self.complete)
        if not whole and (running.returncode == 0 or not self._same(found, self.before)) and not self._continues():
            wrong.append("neither the old state nor the new one")
        wrong += [f"left: {name}" for name in self.process.left()]
        where = f"{signal.Signals(number).name} at {fraction:.4f}: status {running.returncode}"
        return [f"{where}: {what}: {err!r}" for what in wrong]

    def is_complete(self) -> bool:
        """Whether the folder is as the command leaves it that is not disturbed."""
        return self._same(tree(self.process.root), self.complete)

    def _same(self, one: Tree, other: Tree) -> bool:
        return {**one, **dict.fromkeys(self.command.varying)} == {**other, **dict.fromkeys(self.command.varying)}

    def _continues(self) -> bool:
        """Whether the command that continues this one completes it."""
        if not self.command.continued:
            return False
        running = self.process.start(self.command.continued)
        running.communicate()
        open_models(self.process.root)
        return running.returncode == 0 and self.is_complete()


def _lines(status: int, number: int, err: str) -> Iterator[str]:
    """Yield what is wrong with the status and the lines on stderr."""
    lines = [line for line in err.splitlines() if not line.startswith(("warning: ", "note: ", "step "))]
    if status == 0:
        return  # it had finished
    if status != 128 + number:
        yield "another status"
    if lines not in ([], ["interrupted"], ["terminated"]):
        yield "other lines"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Process:
    return Process(tmp_path_factory.mktemp("signals"))


@pytest.fixture(scope="module")
def attack(process: Process, starts: Starts) -> Callable[[str], Attack]:
    """Prepare an attack on a command, once."""
    return cache(lambda name: Attack(process, starts, ALL[name]))


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 2) for name in QUICK), *(pytest.param(name, 100, marks=pytest.mark.hostile) for name in ALL)],
)
def test_signal_at_a_random_time(
    name: str, count: int, attack: Callable[[str], Attack], chance: random.Random, tried: Callable[[str, int], None]
) -> None:
    prepared = attack(name)
    wrong = [line for _ in range(count) for line in prepared.run(chance.choice(SIGNALS), chance.random())]
    if count > 2:
        tried(f"{name}, signals", count)
    assert not wrong, "\n".join(wrong)


def python(code: str, folder: Path) -> tuple[int, str]:
    """Run code in a new process. Return its status and stderr."""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return ran.returncode, ran.stderr


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_interrupted_import_is_no_missing_package(number: signal.Signals, said: str, tmp_path: Path) -> None:
    """Modules in C turn the KeyboardInterrupt into any error."""
    code = f"""
import signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                signal.raise_signal({number})
            except KeyboardInterrupt:
                raise ModuleNotFoundError("no torch", name="torch") from None
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["build", "gpt-tiny"]
from zoo.__main__ import run
run()
"""
    assert python(code, tmp_path) == (128 + number, f"{said}\n")
    assert not any(tmp_path.iterdir())


def test_signal_while_code_is_executed_ends_with_its_status(tmp_path: Path) -> None:
    """A ``KeyboardInterrupt`` in a dataclass would have Python end itself by SIGINT."""
    code = """
import signal, sys
from zoo import signals
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.catch()
signals.interrupt()
try:
    exec("signal.raise_signal(signal.SIGINT)")
except KeyboardInterrupt:
    sys.exit(signals.status())
"""
    assert python(code, tmp_path) == (130, "")


def test_signal_in_a_destructor_is_not_lost(tmp_path: Path) -> None:
    """Python would only print the exception there."""
    code = """
import signal, sys, time
from zoo import signals
class Object:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.catch()
signals.interrupt()
try:
    Object()
    for _ in range(1000):
        time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(signals.status())
"""
    assert python(code, tmp_path) == (143, "")


def test_signal_while_modules_are_freed_does_not_change_the_status(tmp_path: Path) -> None:
    """Python has restored the default action of signals by then."""
    code = """
import signal, sys
from zoo import signals
signals.catch()
class Object:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
freed_last = Object()
sys.exit(3)
"""
    assert python(code, tmp_path) == (3, "")


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """As with nohup, or in the background of a script."""
    code = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from zoo import signals
signals.catch()
signal.raise_signal(signal.SIGHUP)
"""
    assert python(code, tmp_path) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "closed"),
    [
        *[("list", ">&-"), ("list", "2>&-"), ("list", ">&- 2>&- <&-"), ("build", ">&-")],
        *(pytest.param(name, closed, marks=pytest.mark.hostile) for name in ALL for closed in CLOSED),
    ],
)
def test_closed_streams(
    name: str, closed: str, process: Process, starts: Starts, attack: Callable[[str], Attack]
) -> None:
    """A command that cannot print succeeds all the same."""
    prepared = attack(name)
    starts.put(prepared.command.start, process.root)
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "zoo", *prepared.command.arguments],
        cwd=process.root, capture_output=True, text=True, env=process.environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "error" not in ran.stderr
    assert prepared.is_complete()
