"""Processes that try hostile inputs or kill commands, restarted when one dies or hangs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["INPUTS", "KILLS", "Attempt", "Process", "make_samples"]

INPUTS, KILLS = "tests.hostile.attacks.worker", "tests.hostile.attacks.kills"
"""The modules that processes run."""
HANG = {INPUTS: 120, KILLS: 900}
"""Seconds without an answer after which a process is killed. The first kill follows complete runs."""
_STARTING = 600
_ROOT = Path(__file__).parents[3]
_PYTHON = (sys.executable, "-m")
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "RAYON")}
"""The models are tiny, and idle threads of several processes would wait for each other."""


def make_samples(folder: Path) -> None:
    """Write the files to mutate to a new folder, in a process of its own."""
    command = [*_PYTHON, "tests.hostile.attacks.samples", str(folder)]
    subprocess.run(command, env=_environment(folder.parent), cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)


def _environment(runtime: Path) -> dict[str, str]:
    return {**os.environ, **_ONE_THREAD, "XDG_RUNTIME_DIR": str(runtime), "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Attempt:
    """An input that was tried, or a command that was killed."""

    target: str
    number: int
    status: int | None
    """Exit status of an input, or whether a killed command was running; None if the process died or hung."""
    problem: str | None
    """The law that was broken, if any."""


class Process:
    """A process, started when it is needed.

    Args:
        module: what it runs.
        samples: the files to mutate.
        work: a folder for the worker's copy of them.
        seed: of all inputs.
    """

    def __init__(self, module: str, samples: Path, work: Path, seed: int) -> None:
        self._module, self._hang = module, HANG[module]
        self._samples, self._work, self._seed = samples, work, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def run(self, target: str, first: int, count: int) -> Iterator[Attempt]:
        """Try these numbers of a target or scenario."""
        number, end = first, first + count
        while number < end:
            self._send({"target": target, "first": number, "count": end - number})
            while number < end:
                answer = self._read(self._hang)
                if answer is None:
                    yield Attempt(target, number, None, self._ending())
                    number += 1
                    break
                yield Attempt(target, *answer)
                number += 1

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                stream.close()
            self._process = None

    def _send(self, job: dict[str, Any]) -> None:
        if self._process is None:
            self._work.mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                [*_PYTHON, self._module, str(self._samples), str(self._work), str(self._seed)],
                env=_environment(self._work),
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._buffer = b""
            assert self._read(_STARTING) == "ready", (self._work / "stderr").read_text()[-2000:]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self, seconds: int) -> Any:
        """Return the next answer, or None if the process died or is late."""
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            # One second at a time: a stop of both processes, as by a debugger, counts as one.
            if not any(select.select([stream], [], [], 1.0)[0] for _ in range(seconds)):
                return None
            data = self._process.stdout.read1()  # type: ignore[attr-defined]
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _ending(self) -> str:
        """Return how the process ended, after ending it if it hangs."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=2)
            text = (
                f"the process ended with signal {-status}" if status < 0 else f"the process ended with status {status}"
            )
        except subprocess.TimeoutExpired:
            text = f"no answer within {self._hang} s"
        self.close()
        return text
