"""Processes of which system calls fail, or whose memory is limited."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.hostile.commands import CACHE, STARTS
from zoo import cli

Confined = Callable[..., list[Result]]

HERE = Path(__file__).parent
SEED = "ZOO_HOSTILE_SEED"
"""The environment variable that repeats a run."""

_CHILD = """
import contextlib, io, json, os, resource, sys
from zoo import cli

memory, commands, folders = json.loads(sys.argv[1])
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
for command, folder in zip(commands, folders):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli.main(command)
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """A command with a failing call."""

    status: int
    err: str
    calls: Mapping[str, int]
    """Numbers of calls by kind; empty if the process was killed."""


class Starts:
    """The folders of STARTS, each made once."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def put(self, name: str, root: Path) -> None:
        """Replace the content of a folder."""
        made = self._place / name
        if not made.exists():
            made.mkdir()
            with contextlib.chdir(made), contextlib.redirect_stdout(io.StringIO()):
                for step in STARTS[name]:
                    if callable(step):
                        step(made)
                    else:
                        assert cli.main(step) == 0
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made, root)


class Forks:
    """Runs commands in forks of one process, in a folder in which calls may fail."""

    def __init__(self, library: Path, place: Path) -> None:
        self.root, self._output = place / "root", place / "output"
        environment = {"LD_PRELOAD": str(library), "FAILING_ROOT": str(self.root), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.forks"],
            env={**os.environ, **environment},
            cwd=HERE.parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> object:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(
        self,
        arguments: Sequence[str],
        call: str = "",
        number: int = 0,
        error: int = 0,
        *,
        lasting: bool = False,
        cached: bool = False,
    ) -> Outcome:
        """Run a command in the root. Its calls of a kind fail, the ``number``-th or, if ``lasting``, all from it on.

        If ``cached``, the cache of zoo is in the root, too.
        """
        job = {"arguments": list(arguments), "call": call, "number": number, "error": error, "lasting": lasting}
        job |= {"folder": str(self.root), "output": str(self._output), "seconds": 300}
        job["cache"] = str(self.root / CACHE) if cached else None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert isinstance(answer, dict)
        return Outcome(**answer, err=Path(f"{self._output}.2").read_text(errors="replace"))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory.mktemp("starts"))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Start the process; skip without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    place = tmp_path_factory.mktemp("failing").resolve()
    library = place / "failing.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "failing.c", "-ldl"], check=True)
    process = Forks(library, place)
    yield process
    process.close()


@pytest.fixture
def chance() -> random.Random:
    """Random numbers from a printed seed."""
    seed = int(os.environ.get(SEED) or secrets.randbelow(2**32))
    print(f"{SEED}={seed}")
    return random.Random(seed)


@pytest.fixture
def tried(capsys: pytest.CaptureFixture[str]) -> Callable[[str, int], None]:
    """Print how many attacks were tried."""

    def say(what: str, count: int) -> None:
        with capsys.disabled():
            print(f"\n{what}: {count} tried")

    return say


@pytest.fixture
def confined() -> Confined:
    """Run commands in a process that may take ``memory`` bytes of address space, and two minutes.

    They run one after another, each in its folder, by default in the current one.
    """
    if sys.platform != "linux":
        pytest.skip("limits address space")

    def run(*commands: Sequence[object], memory: int = 2 * 2**30, folders: Sequence[Path] = ()) -> list[Result]:
        places = [str(folder.absolute()) for folder in folders or [Path()] * len(commands)]
        given = json.dumps([memory, [list(map(str, command)) for command in commands], places])
        child = [sys.executable, "-c", _CHILD, given]
        done = subprocess.run(child, capture_output=True, text=True, check=False, timeout=120)
        results = [Result(*json.loads(line)) for line in done.stdout.splitlines()]
        assert len(results) == len(commands), (commands[len(results)], done.returncode, done.stderr[-2000:])
        return results

    return run
