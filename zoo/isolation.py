"""A process of its own for code that may hang, exit, crash or print: whatever it does, that is all it does."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

__all__ = ["Outcome", "run"]

_START = "import json, sys; r = json.load(sys.stdin); sys.path[:] = r['path']; import zoo.isolation as i; i.serve(r)"
_STARTING = 60.0
"""Seconds that an interpreter may take to start, on a machine that is busy."""
_OUTPUT = 2000
"""Characters kept of what a job prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one job."""

    job: str
    value: Any = None
    """What the function returned, as JSON gives it back."""
    failure: str | None = None
    """Why there is no value: it did not finish, ended the process or raised."""
    output: str = ""
    """What it printed, on either stream."""
    seconds: float = 0.0


def run(
    function: str, jobs: Mapping[str, Any], *, seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[Outcome]:
    """Call ``module:function`` with each job's name and argument, one after the other, in another process.

    A job that hangs is ended with all that it started. One that ends the process costs the others nothing: they go on
    in a new one. Outcomes come in the order of the jobs, each as soon as it is known.

    Args:
        function: called as ``function(name, argument)``; what it returns must be plain data.
        jobs: arguments by name, plain data too.
        seconds: what each job may take.
        environment: variables of that process besides this one's.
    """
    waiting = dict(jobs)
    while waiting:
        for outcome in _run_process(function, dict(waiting), seconds, {**os.environ, **(environment or {})}):
            del waiting[outcome.job]
            yield outcome


def _run_process(
    function: str, jobs: Mapping[str, Any], seconds: float, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """The outcomes of the jobs of one process, up to and with the one that ends it."""
    request = json.dumps({"path": sys.path, "function": function, "jobs": dict(jobs)})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=stream, text=True, start_new_session=True,
            )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.close()
            if _is_ready(lines):
                yield from _outcomes(process, lines, jobs, seconds, output)
            else:
                reason = _ending(process)
                said = output.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
                yield Outcome(job=next(iter(jobs)), failure=f"no process could be started for it ({said or reason})")
        finally:
            _end(process)


def _is_ready(lines: queue.Queue[str | None]) -> bool:
    try:
        return lines.get(timeout=_STARTING) is not None
    except queue.Empty:
        return False


def _outcomes(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    jobs: Iterable[str],
    seconds: float,
    output: Path,
) -> Iterator[Outcome]:
    printed = 0
    for job in jobs:
        started = time.perf_counter()
        try:
            answer = _answer(lines.get(timeout=seconds), process)
        except queue.Empty:
            answer = {"failure": f"did not finish within {seconds:g} s"}
        end = answer.pop("printed", None)
        with output.open("rb") as stream:
            stream.seek(printed)
            text = stream.read(_OUTPUT if end is None else min(_OUTPUT, end - printed)).decode("utf-8", "replace")
        yield Outcome(job=job, output=text, **{"seconds": time.perf_counter() - started, **answer})
        if end is None:
            return
        printed = end


def _answer(line: str | None, process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the process said of a job, or of how it ended, which comes without ``printed``."""
    if line is None:
        return {"failure": _ending(process)}
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError:
        return {"failure": "wrote where its answers are read"}
    return answer


def serve(request: Mapping[str, Any]) -> None:
    """What the other process does: a line once it is ready, and a line for each job."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)  # what a job prints, even past sys.stdout, is no answer
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        module, _, name = request["function"].partition(":")
        function = getattr(import_module(module), name)
        print("ready", file=channel, flush=True)
        for job, argument in request["jobs"].items():
            answer = _call(function, job, argument)
            sys.stdout.flush()
            sys.stderr.flush()
            print(json.dumps({**answer, "printed": os.fstat(2).st_size}), file=channel, flush=True)
    os._exit(0)  # threads and exit handlers that jobs left behind have nothing more to say


def _end_with(parent: int) -> None:
    """End this process and what it started once nobody is there to answer to: who was is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _call(function: Callable[[str, Any], Any], job: str, argument: Any) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        answer = {"value": function(job, argument)}
        json.dumps(answer)
    except BaseException as error:
        traceback.print_exc()
        answer = {"failure": f"{type(error).__name__}: {error}".removesuffix(": ")}
    return {**answer, "seconds": time.perf_counter() - started}


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _ending(process: subprocess.Popen[str]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    status = process.poll()
    if status is None:
        return "closed what it was to answer on"
    if status < 0:
        with suppress(ValueError):
            return f"ended the process with {signal.Signals(-status).name}"
    return f"ended the process with status {status}"


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and whatever it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
