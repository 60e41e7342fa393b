"""The engine ``local``: worker processes on this machine."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from zoo import system
from zoo.errors import PluginError
from zoo_runtime.batch.plan import Done, Failure, Plan, Shard
from zoo_runtime.onnx_runtime.providers import allowed_cores

__all__ = ["ATTEMPTS", "died", "environment", "outcome", "run"]

ATTEMPTS = 5
"""Number of workers that may die on a shard."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import zoo_runtime.batch.worker as w; w.serve()"


def run(plan: Plan, shards: Sequence[Shard], workers: int | None) -> Iterator[Done]:
    """Run shards in processes, the largest first. A worker that dies is replaced, and its shard is run again.

    Args:
        plan: how to run a shard.
        shards: the shards.
        workers: number of processes; by default the cores divided by the threads of a worker.
    """
    cores = allowed_cores() or system.usable_cores()
    waiting = deque(sorted(shards, key=lambda shard: -shard.size))
    deaths: Counter[str] = Counter()
    events: queue.Queue[tuple[_LocalWorker, str | None]] = queue.Queue()
    count = min(workers or max(1, cores // plan.threads), len(shards))
    living: set[_LocalWorker] = set()
    try:
        while waiting or any(worker.shard is not None for worker in living):
            while len(waiting) > sum(worker.shard is None for worker in living) and len(living) < count:
                living.add(_LocalWorker(plan, events))
            for worker in living:
                if worker.shard is None and waiting:
                    worker.give(waiting.popleft())
            worker, line = events.get()
            shard = worker.shard
            worker.shard = None
            if line is not None:
                yield outcome(json.loads(line))
                continue
            living.remove(worker)
            status = worker.end()
            if shard is not None:
                deaths[shard.target] += 1
                if deaths[shard.target] < ATTEMPTS:
                    waiting.append(shard)
                else:
                    yield died(shard, f"status {status}" if status >= 0 else f"signal {-status}")
    finally:
        for worker in living:
            worker.end()


def died(shard: Shard, how: str) -> Done:
    """Return the outcome of a shard on which too many workers died."""
    text = f"{ATTEMPTS} workers died ({how}): {shard.source}: there may be too little memory for so many workers"
    return Done(target=shard.target, failure=Failure(kind="ArtifactError", text=text))


def environment(plan: Plan) -> dict[str, str]:
    """Return variables that give libraries beside ONNX Runtime the threads of a worker, too."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {name: os.environ.get(name, str(plan.threads)) for name in names}


def outcome(answer: dict[str, Any]) -> Done:
    """Return the outcome in a worker's answer, or raise the error with which no shard can be run."""
    if "failure" in answer:
        raise Failure(**answer["failure"]).error()
    return Done.from_dict(answer["done"])


class _LocalWorker:
    """A process, and the shard that it is running.

    It has a session of its own, so that an interrupt from the keyboard reaches this process alone, which ends it.
    """

    def __init__(self, plan: Plan, events: queue.Queue[tuple[_LocalWorker, str | None]]) -> None:
        self.shard: Shard | None = None
        self._process = subprocess.Popen(
            [*system.interpreter(), "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment(plan)},
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()
        self._send(plan.to_json())

    def _listen(self, events: queue.Queue[tuple[_LocalWorker, str | None]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                events.put((self, line))
        events.put((self, None))

    def _send(self, value: Any) -> None:
        if self._process.stdin is None:
            raise PluginError("a worker has no input")
        with suppress(BrokenPipeError):  # it has died: its output ends, too
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def give(self, shard: Shard) -> None:
        """Have a shard run."""
        self.shard = shard
        self._send(asdict(shard))

    def end(self) -> int:
        """Kill the process, and return its status."""
        self._process.kill()
        status = self._process.wait()
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        return status
