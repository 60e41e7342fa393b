"""The engine ``ray``: workers wherever a cluster of Ray has room. It uses Ray to place workers and to send plans.

Each worker is an actor that answers two calls, one to run a shard and one to show that it is alive. Results are
committed by the workers themselves, and recorded by the run: nothing depends on Ray's objects or checkpoints.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from zoo.errors import MissingPackageError, UsageError, ZooError
from zoo_runtime.batch.local import ATTEMPTS, died, environment, outcome
from zoo_runtime.batch.plan import Done, Plan, Shard

__all__ = ["run"]

_PATIENCE = 30.0
"""Seconds in which a worker has to start, in which a living one has to answer, and in which workers may die at their
start while none answers."""
_PAUSE = 5.0
"""Seconds after which a worker that runs a shard is asked whether it is alive."""
_TICK = 1.0
"""Seconds between looks at the workers. A longer pause, of this process too, counts as one tick."""
_SERVERS = ("gcs_server", "raylet")
"""Names of the processes of Ray on the machine that starts a cluster."""


def run(plan: Plan, shards: Sequence[Shard], workers: int | None) -> Iterator[Done]:
    """Run shards in actors, the largest first. An actor that dies is replaced, and its shard is run again.

    The cluster is that of ``RAY_ADDRESS``, or one that runs on this machine, or else one that is started for the run.

    Args:
        plan: how to run a shard.
        shards: the shards.
        workers: number of actors; by default as many as the cluster's processors allow.

    Raises:
        UsageError: there is no cluster at the address, it has no room for a worker, or a worker did not start or answer
            in 30 seconds.
        ZooError: workers only died at their start for 30 seconds.
        MissingPackageError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"{error.name} is not installed", None, 'pip install "attention-zoo[ray]"') from error
    started = not ray.is_initialized()
    if started:
        _connect(ray)
    try:
        yield from _Cluster(ray, plan, shards, workers).outcomes()
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any) -> None:
    """Join the cluster, or start one. Ray's handler of SIGTERM, which raises :class:`SystemExit`, is replaced again.

    Raises :class:`UsageError` if there is no cluster at the address.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    handler = signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if port.isdecimal():  # Ray itself waits for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False)
    except SystemExit:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    except Exception as error:  # Ray documents no classes
        problem = " ".join(f"cannot join a cluster or start one ({error})".split())
        raise UsageError(problem, f"RAY_ADDRESS={address}" if address else "--engine ray", "see ray status") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class _Actor:
    """The process of a worker."""

    def __init__(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)

    def is_alive(self) -> bool:
        """Answer, even while a shard is running."""
        return True

    def run(self, plan: str, request: dict[str, Any]) -> dict[str, Any]:
        """Run a shard."""
        from zoo_runtime.batch.shards import answer_request

        return answer_request(plan, request)


class _RayWorker:
    """An actor, its shard, and the calls that it has not answered."""

    def __init__(self, ray: Any, plan: Plan) -> None:
        self._ray = ray
        self.actor = (
            ray.remote(_Actor)
            .options(num_cpus=plan.threads, num_gpus=_gpus(plan), max_restarts=0, max_concurrency=2)
            .remote(environment(plan))
        )
        self.shard: Shard | None = None
        self.result: Any = None
        self.alive: Any = self.actor.is_alive.remote()
        self.has_started = False
        self.silent = 0.0
        """Seconds since a call was answered."""

    @property
    def calls(self) -> list[Any]:
        """The calls that have not been answered."""
        return [call for call in (self.result, self.alive) if call is not None]

    def give(self, plan: str, shard: Shard) -> None:
        """Have a shard run."""
        self.shard = shard
        self.result = self.actor.run.remote(plan, asdict(shard))

    def answer(self, answered: Sequence[Any]) -> dict[str, Any] | None:
        """Return the answer about the shard, if it is among the answered calls. Raises the error of a call."""
        answer = None
        if self.result in answered:
            answer = self._ray.get(self.result)
            self.result = None
        if self.alive in answered:
            self._ray.get(self.alive)
            self.alive = None
        if answer is not None or self.alive is None:
            self.has_started = True
        return answer

    def end(self) -> None:
        """Kill the actor."""
        self._ray.kill(self.actor)


def _gpus(plan: Plan) -> int:
    return int(plan.session.get("provider") == "cuda")


class _Cluster:
    """The workers of a run, and the shards that wait for one."""

    def __init__(self, ray: Any, plan: Plan, shards: Sequence[Shard], workers: int | None) -> None:
        self._ray = ray
        self._plan = plan
        self._text = plan.to_json()
        self._waiting = deque(sorted(shards, key=lambda shard: -shard.size))
        self._deaths: Counter[str] = Counter()
        self._unanswered = 0.0
        """Seconds since any worker answered a call."""
        self._workers: list[_RayWorker] = []
        self._servers = [child for child in psutil.Process().children() if child.name() in _SERVERS]
        """Processes of a cluster that was started here. Soon after one has ended, Ray ends this process."""
        room = self._room()
        self._count = min(room if workers is None else workers, len(shards))
        if not room or self._count > room:
            problem = f"the cluster has room for {room} workers of {self._size()}, not for {max(1, self._count)}"
            raise UsageError(problem, "--engine ray", "lower --workers or --threads, or enlarge the cluster")

    def _size(self) -> str:
        threads = self._plan.threads
        return "1 processor" if threads == 1 else f"{threads} processors"

    def _room(self) -> int:
        """Return the number of workers for which the cluster's machines have processors, and devices for CUDA."""
        needs = {"CPU": self._plan.threads} | ({"GPU": 1} if _gpus(self._plan) else {})
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(min(int(node.get(name, 0) // need) for name, need in needs.items()) for node in nodes)

    def outcomes(self) -> Iterator[Done]:
        """Yield the outcome of each shard."""
        try:
            while self._waiting or any(worker.shard is not None for worker in self._workers):
                self._distribute()
                yield from self._look()
        finally:
            for worker in self._workers:
                worker.end()

    def _distribute(self) -> None:
        idle = [worker for worker in self._workers if worker.shard is None]
        for _ in range(min(len(self._waiting) - len(idle), self._count - len(self._workers))):
            self._workers.append(_RayWorker(self._ray, self._plan))
        for worker in self._workers:
            if worker.shard is None and worker.has_started and self._waiting:
                worker.give(self._text, self._waiting.popleft())

    def _look(self) -> Iterator[Done]:
        """Wait for an answer, at most for a tick, and act on it."""
        for server in self._servers:
            if not server.is_running() or server.status() == psutil.STATUS_ZOMBIE:
                raise ZooError("a process of Ray ended", "--engine ray", "continue with --resume")
        before = time.monotonic()
        calls = [call for worker in self._workers for call in worker.calls]
        answered, _ = self._ray.wait(calls, num_returns=1, timeout=_TICK)
        passed = min(time.monotonic() - before, _TICK)
        self._unanswered += passed
        for worker in list(self._workers):
            try:
                waited = len(worker.calls)
                answer = worker.answer(answered)
            except self._ray.exceptions.RayActorError as error:
                yield from self._bury(worker, error)
                continue
            except self._ray.exceptions.RayError as error:
                raise ZooError(f"Ray cannot run a worker ({error})", "--engine ray") from error
            if len(worker.calls) < waited:
                worker.silent = self._unanswered = 0.0
            else:
                worker.silent += passed
            if worker.silent > _PATIENCE:
                state = "answer" if worker.has_started else "start"
                problem = f"a worker of {self._size()} did not {state} in {_PATIENCE:g} s"
                raise UsageError(problem, "--engine ray", "see ray status; continue with --resume once there is room")
            if worker.silent > _PAUSE and worker.alive is None:
                worker.alive = worker.actor.is_alive.remote()
            if answer is not None:
                worker.shard = None
                yield outcome(answer)

    def _bury(self, worker: _RayWorker, error: BaseException) -> Iterator[Done]:
        """Have the shard of an actor that died run again, unless too many have died on it."""
        self._workers.remove(worker)
        worker.end()
        if not worker.has_started and self._unanswered > _PATIENCE:
            raise ZooError(f"Ray cannot start a worker ({error})", "--engine ray") from error
        shard = worker.shard
        if shard is None:
            return
        self._deaths[shard.target] += 1
        if self._deaths[shard.target] < ATTEMPTS:
            self._waiting.append(shard)
        else:
            yield died(shard, type(error).__name__)
