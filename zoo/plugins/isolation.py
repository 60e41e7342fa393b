"""Run untrusted functions, which may hang, exit, crash or print, in a subprocess with a timeout."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from zoo import system
from zoo.errors import storage_errors
from zoo.plugins.plain import read_plain
from zoo.storage import scratch_folder
from zoo.terminal import one_line

__all__ = ["JobOutcome", "run"]

_START = (
    "import json, sys; r = json.load(sys.stdin); sys.path[:] = r['path']; import zoo.plugins.isolation as i; i.serve(r)"
)
_STARTING = 60.0
"""Time limit in seconds for starting an interpreter, even on a busy machine."""
_OUTPUT = 2000
"""Maximum number of bytes kept of a job's output."""
_MOST_OUTPUT = 64 << 20
"""Bytes of output after which a process is killed."""
_LONGEST = 8 << 20
"""Maximum number of bytes of an answer."""
_POLL = 0.1
"""Seconds after which to look for the end of a process and at the size of its output."""
_GRACE = 2.0
"""Seconds in which to read what an ended process has written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """The result of one job."""

    job: str
    value: Any = None
    """The function's return value, after conversion to and from JSON."""
    failure: str | None = None
    """Why there is no value: the job did not finish, ended the process or raised; None on success."""
    output: str = ""
    """The job's output on stdout and stderr."""
    seconds: float = 0.0


def run(
    function: str,
    jobs: Mapping[str, Any],
    *,
    seconds: float,
    parse: Callable[[Any], Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[JobOutcome]:
    """Call ``module:function`` with each job's name and argument, in sequence, in a subprocess.

    A job that hangs is killed with all its child processes, except those that it moved to another session. After a job
    that ends the subprocess or disturbs the exchange with it, the remaining jobs run in a new one. So does that job
    itself unless it was the first, because an earlier one may be at fault. Outcomes are yielded in the order of the
    jobs, each as soon as it is known.

    Args:
        function: called as ``function(name, argument)``; its result must be plain data.
        jobs: arguments by name, plain data too.
        seconds: time limit per job.
        parse: checks and converts a value, which a job may have forged. It raises ``ValueError``.
        environment: environment variables to add in the subprocess.
    """
    waiting = dict(jobs)
    while waiting:
        extended = {**os.environ, **(environment or {})}
        for outcome in _run_process(function, dict(waiting), seconds, parse or _unchanged, extended):
            del waiting[outcome.job]
            yield outcome


def _unchanged(value: Any) -> Any:
    return value


def _run_process(
    function: str,
    jobs: Mapping[str, Any],
    seconds: float,
    parse: Callable[[Any], Any],
    environment: Mapping[str, str],
) -> Iterator[JobOutcome]:
    """Yield the outcomes of jobs run in one process, up to the first whose outcome it does not tell."""
    with scratch_folder() as folder:
        request, output = folder / "request", folder / "output"
        with storage_errors(folder):
            request.write_text(
                json.dumps({"path": sys.path, "function": function, "jobs": dict(jobs)}), encoding="utf-8"
            )
        with request.open("rb") as source, output.open("wb") as stream:
            process = subprocess.Popen(
                [*system.interpreter(), "-c", _START], env=environment, stdin=source, stdout=subprocess.PIPE,
                stderr=stream, start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        channel = _Channel(process, process.stdout, output)
        try:
            channel.receive(_STARTING)
        except _LostError as lost:
            said = output.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            yield JobOutcome(job=next(iter(jobs)), failure=f"could not start a process ({said or lost})")
        else:
            yield from _outcomes(channel, jobs, seconds, parse)
        finally:
            channel.close()


def _outcomes(
    channel: _Channel, jobs: Iterable[str], seconds: float, parse: Callable[[Any], Any]
) -> Iterator[JobOutcome]:
    printed = 0
    for number, job in enumerate(jobs):
        started = time.perf_counter()
        try:
            answer = _parse(channel.receive(seconds), job, parse)
        except _LostError as lost:
            if lost.may_be_due_to_others and number:
                return
            after = time.perf_counter() - started
            yield JobOutcome(job=job, failure=str(lost), output=channel.output(printed, _OUTPUT), seconds=after)
            return
        end = min(max(printed, answer.printed), channel.output_size())
        text = channel.output(printed, min(_OUTPUT, end - printed))
        yield JobOutcome(job=job, value=answer.value, failure=answer.failure, output=text, seconds=answer.seconds)
        printed = end


class _LostError(Exception):
    """The subprocess did not tell the outcome of a job."""

    def __init__(self, reason: str, *, may_be_due_to_others: bool = True) -> None:
        super().__init__(reason)
        self.may_be_due_to_others = may_be_due_to_others


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What the subprocess tells about a job."""

    job: str
    seconds: float
    printed: int
    """Bytes of output of all jobs so far."""
    value: Any = None
    failure: str | None = None


def _parse(line: bytes, job: str, parse: Callable[[Any], Any]) -> _Answer:
    """Parse an answer. Plugins can write to the channel, too, so that the line may be anything."""
    try:
        answer = read_plain(_Answer, json.loads(line))
        if answer.job != job:
            raise ValueError("an answer about another job")
    except (ValueError, RecursionError) as error:
        raise _LostError("wrote to the result channel") from error
    if answer.failure is not None:
        return answer
    try:
        return replace(answer, value=parse(answer.value))
    except ValueError as error:
        raise _LostError(f"gave an invalid answer ({error})") from error


class _Channel:
    """The lines and the output of a subprocess."""

    def __init__(self, process: subprocess.Popen[bytes], stream: IO[bytes], output: Path) -> None:
        self._process = process
        self._output = output
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._closed = threading.Event()
        self._pump = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._pump.start()

    def _read(self, stream: IO[bytes]) -> None:
        """Read in a thread until no process has the other end open. A job may have left one that never ends."""
        with stream:
            while not self._closed.is_set() and (line := stream.readline(_LONGEST)):
                self._lines.put(line)
        self._lines.put(b"")

    def receive(self, seconds: float) -> bytes:
        """Return the next line. Raise :class:`_LostError` if there is none in time, or there will be none."""
        limit = time.monotonic() + seconds
        while True:
            with suppress(queue.Empty):
                if line := self._lines.get(timeout=max(0, min(_POLL, limit - time.monotonic()))):
                    return line
                raise _LostError(self._ending())
            if self._process.poll() is not None:
                self._pump.join(_GRACE)
                if self._lines.empty():
                    raise _LostError(self._ending())
            elif time.monotonic() >= limit:
                raise _LostError(f"did not finish within {seconds:g} s", may_be_due_to_others=False)
            elif self.output_size() > _MOST_OUTPUT:
                raise _LostError(f"printed more than {_MOST_OUTPUT >> 20} MiB", may_be_due_to_others=False)

    def output_size(self) -> int:
        """Return the bytes of output so far."""
        return self._output.stat().st_size

    def output(self, start: int, length: int) -> str:
        """Return a part of the output."""
        with self._output.open("rb") as stream:
            stream.seek(start)
            return stream.read(length).decode("utf-8", "replace")

    def close(self) -> None:
        """Kill the process and its child processes."""
        self._closed.set()
        system.end_tree(self._process.pid)
        self._process.wait()

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        status = self._process.poll()
        if status is None:
            return "closed the result channel"
        if status < 0:
            with suppress(ValueError):
                return f"ended the process with {signal.Signals(-status).name}"
        return f"ended the process with status {status}"


def serve(request: Mapping[str, Any]) -> None:
    """Run in the subprocess: write a line when ready, then a line per job."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)  # keeps output of jobs, even past sys.stdout, out of the result channel
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        module, _, name = request["function"].partition(":")
        function = getattr(import_module(module), name)
        print("ready", file=channel, flush=True)
        for job, argument in request["jobs"].items():
            answer = _call(function, job, argument)
            sys.stdout.flush()
            sys.stderr.flush()
            print(json.dumps({**answer, "job": job, "printed": os.fstat(2).st_size}), file=channel, flush=True)
    os._exit(0)  # skips the threads and exit handlers that jobs have left behind


def _end_with(parent: int) -> None:
    """Kill this process group once the parent dies."""
    while system.has_parent(parent):
        time.sleep(0.5)
    system.end_tree(os.getpid())
    os._exit(1)


def _call(function: Callable[[str, Any], Any], job: str, argument: Any) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        answer = {"value": function(job, argument)}
        json.dumps(answer)
    except BaseException as error:
        traceback.print_exc()
        # An answer longer than _LONGEST would look as if the job had written to the channel.
        answer = {"failure": one_line(f"{type(error).__name__}: {error}".removesuffix(": "))}
    return {**answer, "seconds": time.perf_counter() - started}
