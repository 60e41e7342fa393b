"""Batches with the engine ``ray``, on a cluster that is started on this machine."""

from __future__ import annotations

import sys
import threading
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
    """Start a cluster of two processors that the runs of a test use. A busy machine starts workers slowly."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray_engine, "_PATIENCE", 300.0)
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

    @ray.remote(num_cpus=2)
    class Other:
        def ready(self) -> bool:
            return True

    other = Other.remote()
    assert ray.get(other.ready.remote())
    with monkeypatch.context() as patch:
        patch.setattr(ray_engine, "_PATIENCE", 3.0)
        ran = zoo("run", bert, "--input", corpus(1), "--output", "out", "--engine", "ray")
    ran.failed(2, "a worker of 1 processor did not start in 3 s", "--resume")
    ray.kill(other)
    assert zoo("run", bert, "--input", corpus(1, folder="again"), "--output", "out2", "--engine", "ray").status == 0


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    plan = Plan(directory="m", model="", output="out", session={}, versions={})
    shard = Shard(source="in/s.jsonl", target="s.jsonl", size=1, changed="")
    with pytest.raises(Exception, match=r'pip install "attention-zoo\[ray\]"'):
        list(ray_engine.run(plan, [shard], None))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stops by signal")
def test_worker_that_does_not_answer_is_an_error(bert: Path, zoo: Zoo, corpus: Any, cluster: None, monkeypatch) -> None:
    """As on a machine that has lost its network. The results that were written before are kept."""

    def stop() -> None:
        while not (running := workers(psutil.Process())) or not list(Path("out").glob("s*")):
            if ended.wait(0.02):
                return
        monkeypatch.setattr(ray_engine, "_PATIENCE", 3.0)
        for worker in running:
            worker.suspend()

    ended = threading.Event()
    source = corpus(60, 1000)
    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "ray", "--workers", 1)
    ended.set()
    thread.join()
    ran.failed(2, "a worker of 1 processor did not answer in 3 s", "--resume")
    assert set() != {line["results"] for line in manifest(Path("out"))} <= set(files(Path("out")))


@pytest.mark.slow
def test_workers_that_die_at_their_start_are_an_error(
    bert: Path, zoo: Zoo, corpus: Any, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stillborn(ray_engine._Actor):
        def __init__(self, variables: dict[str, str]) -> None:
            raise ModuleNotFoundError("no module named zoo")

    monkeypatch.setattr(ray_engine, "_Actor", Stillborn)
    monkeypatch.setattr(ray_engine, "_PATIENCE", 60.0)
    ran = zoo("run", bert, "--input", corpus(1), "--output", "out", "--engine", "ray")
    ran.failed(1, "Ray cannot start a worker (The actor died")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense://x"])
def test_cluster_that_is_not_there_is_an_error(
    bert: Path, zoo: Zoo, corpus: Any, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    ran = zoo("run", bert, "--input", corpus(1), "--output", "out", "--engine", "ray")
    ran.failed(2, "cannot join a cluster", f"RAY_ADDRESS={address}: see ray status")


def test_workers_reach_a_server(bert: Path, zoo: Zoo, corpus: Any, shelf: Path, cluster: None) -> None:
    """Inputs and results behind fsspec have the bytes of those of this machine."""
    source = corpus(3)
    (shelf / "in").symlink_to(source)
    base = (
        "run",
        bert,
        "--input",
        f"shelf://{shelf}/in/*.jsonl",
        "--output",
        f"shelf://{shelf}/out",
        "--engine",
        "ray",
    )
    ran = zoo(*base)
    assert ran.status == 0, ran.err
    assert zoo("run", bert, "--input", source, "--output", "local").status == 0
    found = files(shelf / "out")
    del found["_zoo.manifest.000000"]
    assert found == files(Path("local"))
    assert "3 of them from an earlier run" in zoo(*base, "--resume").err


def workers(run: psutil.Process) -> list[psutil.Process]:
    """Return the processes of actors of a run that are at work on a shard."""
    found = []
    for child in run.children(recursive=True):
        try:
            if "_Actor.run" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills by signal")
@pytest.mark.parametrize("kills", [2, 20])
def test_killed_actors_and_a_killed_run_lose_nothing(bert: Path, zoo: Zoo, corpus: Any, kills: int) -> None:
    source = corpus(60, 1000)
    run = start(bert, source, "--engine", "ray", "--workers", "2")
    assert kill_some(run, lambda run: workers(psutil.Process(run.pid)), kills, seed=kills, done=1) == kills
    kept = len(manifest(Path("out")))
    assert kept < 60
    ran = zoo("run", bert, "--input", source, "--output", "out", "--engine", "ray", "--resume")
    assert ran.status == 0, ran.err
    assert f"{kept} of them from an earlier run" in ran.err or not kept
    assert zoo("run", bert, "--input", source, "--output", "local").status == 0
    assert files(Path("out")) == files(Path("local"))
    digests = [{line["results"]: line["sha256"] for line in manifest(Path(name))} for name in ("out", "local")]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ends by signal")
def test_signal_ends_the_run(bert: Path, corpus: Any) -> None:
    """Ray sets a handler of its own."""
    run = start(bert, corpus(60, 1000), "--engine", "ray", "--workers", "1")
    while run.poll() is None and not list(Path("out").glob("s*")):
        time.sleep(0.1)
    run.terminate()
    _, said = run.communicate()
    assert (run.returncode, said) == (143, "terminated\n")
    assert {line["results"] for line in manifest(Path("out"))} <= set(files(Path("out")))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills by signal")
def test_raylet_that_ends_is_an_error(bert: Path, corpus: Any) -> None:
    """Ray itself prints its log, and ends the process."""
    run = start(bert, corpus(60, 1000), "--engine", "ray", "--workers", "1")
    while run.poll() is None and not list(Path("out").glob("s*")):
        time.sleep(0.1)
    (raylet,) = (child for child in psutil.Process(run.pid).children() if child.name() == "raylet")
    raylet.kill()
    _, said = run.communicate()
    assert run.returncode == 1
    assert said.splitlines()[-1] == "error: a process of Ray ended: --engine ray: continue with --resume"
