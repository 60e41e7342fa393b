"""One point of a curve: time and peak memory for a text of N tokens, measured in a separate process.

A separate process isolates peak memory from other runs, and turns running out of memory into a result.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from zoo import plugins
from zoo.plugins import isolation
from zoo_export.bench.cases import BenchCase, Call, OnnxBackend, feeds_of
from zoo_export.bench.measure import thread_times, waited_since
from zoo_runtime import Session, load_session

__all__ = ["MEASURED", "OUT_OF_MEMORY", "measure_point"]

MEASURED = ("seconds", "best_seconds", "runs", "memory", "waited")
"""Keys that are None in failed measurements."""
OUT_OF_MEMORY = "out of memory"
_EXHAUSTED = ("bad_alloc", "bad allocation", "allocate memory", "out of memory")
"""Fragments of the runtime's out-of-memory messages."""
_LEAST_LIMIT, _LIMIT = 120.0, 60.0
"""Timeout of a point: at least so many seconds, and in multiples of the time requested for it."""


def measure_point(
    directory: Path, length: int, *, seconds: float, threads: int | None, memory: float
) -> dict[str, Any]:
    """Time one pass over a text, through every graph of an exported model, in another process.

    Args:
        directory: a model directory with a verified export.
        length: N.
        seconds: time for which to repeat the pass after a warm-up, at least once.
        threads: number of threads of the session.
        memory: limit on the memory of the pass, in bytes; infinity for no limit.

    Returns:
        ``length``; ``seconds``, the median over ``runs``, and ``best_seconds``; ``memory``, the peak resident bytes
        above those of the process with the session open, None if the system does not report it; ``waited``, the
        fraction of time that threads waited for a core; and ``failure``, the reason if there is no measurement.
    """
    request = {
        "selection": _plain(plugins.active().selection),
        "directory": str(directory),
        "length": length,
        "seconds": seconds,
        "threads": threads,
        "memory": None if memory == float("inf") else int(memory),
    }
    limit = max(_LEAST_LIMIT, _LIMIT * seconds)
    (outcome,) = isolation.run(f"{__name__}:run_point", {str(length): request}, seconds=limit)
    facts = {"failure": outcome.failure} if outcome.failure is not None else outcome.value
    return {"length": length, "failure": None, **dict.fromkeys(MEASURED), **facts}


def run_point(_: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one point; runs in the separate process."""
    plugins.select(_selection(request["selection"]))
    try:
        with load_session(request["directory"], threads=request["threads"]) as session:
            _text(session, 1)()  # exclude the one-off costs of a first pass
            _limit_memory(request["memory"])
            return _measure(_text(session, request["length"]), request["seconds"])
    except Exception as error:  # the runtime's exceptions have no common base class
        if isinstance(error, MemoryError) or any(words in str(error) for words in _EXHAUSTED):
            return {"failure": OUT_OF_MEMORY}
        return {"failure": str(error).strip().partition("\n")[0] or type(error).__name__}


def _measure(call: Call, seconds: float) -> dict[str, Any]:
    before = _resident("VmRSS")
    with suppress(OSError):  # if the peak cannot be reset, the earlier one is included
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    outputs = call()
    peak = _resident("VmHWM")
    if not all(np.isfinite(np.asarray(output, np.float32)).all() for output in outputs):
        return {"failure": "outputs are not finite"}
    del outputs
    runs: list[float] = []
    earlier = thread_times()
    while not runs or sum(runs) < seconds:
        started = time.perf_counter()
        call()
        runs.append(time.perf_counter() - started)
    waited = waited_since(earlier)
    return {
        "seconds": statistics.median(runs),
        "best_seconds": min(runs),
        "runs": len(runs),
        "memory": None if before is None or peak is None else max(0, peak - before),
        "waited": waited,
    }


def _text(session: Session, length: int) -> Call:
    """Return a pass over one text through each graph in turn."""
    backend = OnnxBackend(session)
    cases = [BenchCase(graph, "prefill" if graph.pasts else "encode", 1, length) for graph in session.graphs]
    calls = [backend(case, feeds_of(session, case)) for case in cases]

    def call() -> list[Any]:
        return [output for each in calls for output in each()]

    return call


def _resident(what: str) -> int | None:
    """Return the process's resident bytes: current (``VmRSS``) or peak (``VmHWM``)."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
    return None


def _limit_memory(count: int | None) -> None:
    """Limit further memory of the process to ``count`` bytes. No-op except on Linux, which enforces the limit."""
    if sys.platform == "linux" and count is not None:
        import resource

        with suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = pages * os.sysconf("SC_PAGE_SIZE") + count
            resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _plain(selection: plugins.Selection) -> dict[str, Any]:
    """Serialise a selection for the other process."""
    return {
        "third_party": selection.third_party,
        "only": None if selection.only is None else sorted(selection.only),
        "disabled": sorted(selection.disabled),
    }


def _selection(data: Mapping[str, Any]) -> plugins.Selection:
    only = data["only"]
    return plugins.Selection(
        data["third_party"], None if only is None else frozenset(only), frozenset(data["disabled"])
    )
