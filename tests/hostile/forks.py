"""Run commands in forks of a process that has imported zoo, so that a test can run thousands of them.

The process reads jobs from stdin, one JSON object per line, and answers each with one.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import pkgutil
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from zoo.errors import ZooError

CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "read")
"""Kinds of calls that failing.c counts."""
PACKAGES = ("zoo", "zoo_runtime", "zoo_export", "zoo_plugins")


def import_all() -> None:
    """Import all modules of zoo whose dependencies are installed."""
    for package in map(importlib.import_module, PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
            if not module.name.endswith("__main__") and "template" not in module.name:
                with suppress(ImportError, ZooError):
                    importlib.import_module(module.name)


def main() -> None:
    """Answer jobs until stdin ends."""
    import_all()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            _run(job, writing)
        os.close(writing)
        status = _wait(process, job["seconds"])
        with os.fdopen(reading) as pipe:
            calls = json.loads(pipe.read() or "{}")
        print(json.dumps({"status": status, "calls": calls}), flush=True)


def _wait(process: int, seconds: float) -> int:
    """Return the exit status of a process, negative if a signal ended it. Kill it after its time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _run(job: dict[str, Any], writing: int) -> None:
    """Run a command with a failing call, report the number of calls, and end this process."""
    status = 70
    try:
        os.chdir(job["folder"])
        if job["cache"]:
            os.environ["ZOO_CACHE"] = job["cache"]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(os.open(f"{job['output']}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        from zoo import cli

        shim = ctypes.CDLL(None)
        shim.count.restype = ctypes.c_long
        shim.arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int)
        shim.arm(job["call"].encode(), job["number"], job["error"], job["lasting"])
        status = cli.main(job["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        shim.disarm()
        os.write(writing, json.dumps({call: shim.count(call.encode()) for call in CALLS}).encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
