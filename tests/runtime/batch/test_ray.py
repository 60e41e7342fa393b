"""Batches with the engine ``ray``, on a cluster that is started on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runtime.batch.conftest import files, kill_some, manifest, start
from zoo_runtime.batch import Plan, Shard, ray_engine

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

ray = pytest.importorskip("ray")


@pytest.fixture
def bert(exported_model: Exported) -> Path:
    return exported_model("bert-tiny")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a cluster of two processors that the runs of a test use."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_ray_writes_what_the_local_engine_writes(bert: Path, zoo: Zoo, corpus: Any, cluster: None) -> None:
    source = corpus(4)
    with (source / "s1.jsonl").open("a") as file:
        file.write('{"id": 1}\n')
    runs = [zoo("run", bert, "--input", source, "--output", name, "--engine", name) for name in ("local", "ray")]
    assert [ran.status for ran in runs] == [3, 3]
    assert runs[0].err == runs[1].err.replace("ray: ", "local: ")
    assert files(Path("local")) == files(Path("ray"))
    assert {line["sha256"] for line in manifest(Path("local"))} == {line["sha256"] for line in manifest(Path("ray"))}
    ran = zoo("run", bert, "--input", source, "--output", "local", "--engine", "ray", "--resume")
    assert "4 of them from an earlier run" in ran.err
    too_many = zoo("run", bert, "--input", source, "--output", "other", "--engine", "ray", "--workers", 3)
    too_many.failed(2, "room for 2 workers of 1 processor, not for 3", "lower --workers")
    zoo("run", bert, "--input", source, "--output", "o", "--engine", "ray", "--option", "x=1").failed(2, "'x'")


@pytest.mark.slow
def test_worker_that_finds_no_room_is_an_error(bert: Path, zoo: Zoo, corpus: Any, cluster: None, monkeypatch) -> None:
    """Other programs hold the processors."""
    monkeypatch.setattr(ray_engine, "_PATIENCE", 3.0)

    @ray.remote(num_cpus=2)
    class Other:
        def ready(self) -> bool:
            return True

    other = Other.remote()
    assert ray.get(other.ready.remote())
    started = time.monotonic()
    ran = zoo("run", bert, "--input", corpus(1), "--output", "out", "--engine", "ray")
    ran.failed(2, "a worker of 1 processor did not start in 3 s", "--resume")
    assert time.monotonic() - started < 300
    ray.kill(other)
    assert zoo("run", bert, "--input", corpus(1, folder="again"), "--output", "out2", "--engine", "ray").status == 0


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    plan = Plan(directory="m", model="", output="out", session={}, versions={})
    shard = Shard(source="in/s.jsonl", target="s.jsonl", size=1, changed="")
    with pytest.raises(Exception, match=r'pip install "attention-zoo\[ray\]"'):
        list(ray_engine.run(plan, [shard], None))


def workers(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes of actors of a run."""
    found = []
    for child in psutil.Process(run.pid).children(recursive=True):
        try:
            if "_Actor" in " ".join(child.cmdline()) or "_Actor" in child.name():
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills by signal")
def test_killed_actors_and_a_killed_run_lose_nothing(bert: Path, zoo: Zoo, corpus: Any) -> None:
    source = corpus(60, 1000)
    run = start(bert, source, "--engine", "ray", "--workers", "2")
    assert kill_some(run, workers, 20, seed=1, done=1) == 20
    kept = len(manifest(Path("out")))
    assert kept < 60
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "ray", "--resume")
    assert ran.status == 0, ran.err
    assert f"{kept} of them from an earlier run" in ran.err or not kept
    assert zoo("run", bert, "--input", source, "--output", "local").status == 0
    assert files(Path("out")) == files(Path("local"))
    digests = [{line["results"]: line["sha256"] for line in manifest(Path(name))} for name in ("out", "local")]
    assert digests[0] == digests[1]
