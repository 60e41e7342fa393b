"""Run untrusted functions, which may hang, exit, crash or print, in a subprocess with a timeout."""

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

from zoo import system

__all__ = ["Outcome", "run"]

_START = (
    "import json, sys; r = json.load(sys.stdin); sys.path[:] = r['path']; import zoo.plugins.isolation as i; i.serve(r)"
)
_STARTING = 60.0
"""Time limit in seconds for starting an interpreter, even on a busy machine."""
_OUTPUT = 2000
"""Maximum number of bytes kept of a job's output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
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
    function: str, jobs: Mapping[str, Any], *, seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[Outcome]:
    """Call ``module:function`` with each job's name and argument, in sequence, in a subprocess.

    A job that hangs is killed with all its child processes. After a job that ends the subprocess, the remaining jobs
    run in a new one. Outcomes are yielded in the order of the jobs, each as soon as it is known.

    Args:
        function: called as ``function(name, argument)``; its result must be plain data.
        jobs: arguments by name, plain data too.
        seconds: time limit per job.
        environment: environment variables to add in the subprocess.
    """
    waiting = dict(jobs)
    while waiting:
        for outcome in _run_process(function, dict(waiting), seconds, {**os.environ, **(environment or {})}):
            del waiting[outcome.job]
            yield outcome


def _run_process(
    function: str, jobs: Mapping[str, Any], seconds: float, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Yield the outcomes of jobs run in one process, up to and including a job that ends it."""
    request = json.dumps({"path": sys.path, "function": function, "jobs": dict(jobs)})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
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
                yield Outcome(job=next(iter(jobs)), failure=f"could not start a process ({said or reason})")
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
    """Return the process's answer about a job, or how the process ended, which lacks ``printed``."""
    if line is None:
        return {"failure": _ending(process)}
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError:
        return {"failure": "wrote to the result channel"}
    return answer


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
            print(json.dumps({**answer, "printed": os.fstat(2).st_size}), file=channel, flush=True)
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
        return "closed the result channel"
    if status < 0:
        with suppress(ValueError):
            return f"ended the process with {signal.Signals(-status).name}"
    return f"ended the process with status {status}"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its child processes."""
    system.end_tree(process.pid)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
