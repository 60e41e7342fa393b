"""Trackers of experiments: what they are told, what they write, and their failures."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.training.test_run import FAST

Zoo = Callable[..., Result]
RUN = ("train", "gpt-tiny", "--data", "corpus.txt", "--validation", "corpus.txt", *FAST, "--set", "evaluate_every=4",
       "--set", "max_length=32", "--set", "checkpoint_every=4")  # fmt: skip
TRACKER = """\
import zoo
from pathlib import Path

ZOO_API = 1

@zoo.hookimpl
def zoo_trackers():
    return [zoo.Tracker(name="faulty", start=f"{__name__}:start")]

def start(run):
    if run.name == "unstarted":
        raise RuntimeError("no account")
    return Faulty()

class Faulty:
    def log(self, step, values):
        with Path("told").open("a") as file:
            print(step, file=file)
        if step == 2:
            raise ConnectionError("no network")

    def finish(self, status):
        Path("told").open("a").write(status)
"""


def metrics(directory: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Interrupt training in a step, counted from 0."""
    from zoo.training.loop import Trainer

    step = Trainer._step

    def failing(self: Trainer, at: int, parts: object) -> object:
        if at == number:
            raise KeyboardInterrupt
        return step(self, at, parts)

    monkeypatch.setattr(Trainer, "_step", failing)


@pytest.mark.slow
def test_tensorboard_has_the_metrics_of_a_continued_run(
    zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run of the same name, and steps after the checkpoint, are hidden."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert zoo(*RUN, "--max-steps", "12", "-o", "lm", "--tracker", "tensorboard", "--seed", "1").status == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 6)
        said = zoo(*RUN, "--max-steps", "8", "-o", "lm", "--tracker", "tensorboard", "--force")
        assert said.status == 130, said.err
    assert zoo("train", "lm", "--resume").status == 0
    events = accumulator.EventAccumulator("runs/lm")
    events.Reload()
    found = {name: {item.step: item.value for item in events.Scalars(name)} for name in events.Tags()["scalars"]}
    rows = metrics("lm")
    assert len(rows) == 8
    assert found["train/loss"] == pytest.approx({row["step"]: row["loss"] for row in rows})
    assert found["train/learning_rate"] == pytest.approx({row["step"]: row["learning_rate"] for row in rows})
    wanted = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
    assert found["evaluation/loss"] == pytest.approx(wanted)
    assert "runs" not in str(list(Path("lm").iterdir()))


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB with a header of 7 bytes, as wandb writes it."""
    size, place, part = 32768, 7, b""
    while place + 7 <= len(data):
        if size - place % size < 7:
            place += size - place % size
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part = (part if kind in (3, 4) else b"") + data[place + 7 : place + 7 + length]
        if kind in (1, 4):
            yield part
        place += 7 + length


@pytest.mark.slow
def test_wandb_writes_the_metrics_offline(corpus: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    command = [sys.executable, "-m", "zoo", *RUN, "--max-steps", "4", "-o", "lm", "--tracker", "wandb", "--json"]
    environment = {**os.environ, "WANDB_MODE": "offline"}  # wandb flushes its file when the process ends
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["steps"] == 4
    (log,) = Path("wandb").glob("offline-run-*/*.wandb")
    rows = []
    for data in log_records(log.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in rows] == [row["loss"] for row in metrics("lm")]


@pytest.mark.slow
def test_trackio_writes_the_metrics(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(Path("trackio").absolute()))
    pytest.importorskip("trackio", reason="trackio needs gradio, which is not among the packages of the tests")
    said = zoo(*RUN, "--max-steps", "4", "-o", "lm", "--tracker", "trackio")
    assert said.status == 0, said.err
    assert list(Path("trackio").glob("zoo*"))


def test_failing_tracker_does_not_end_a_run(zoo: Zoo, corpus: Path, install: Callable[..., None]) -> None:
    install("zoo-faulty", TRACKER)
    said = zoo(*RUN, "--max-steps", "4", "-o", "lm", "--tracker", "faulty", "--quiet")
    assert said.status == 0, said.err
    (warning,) = said.warnings
    assert "the tracker faulty failed and is left out from now on (ConnectionError: no network)" in warning
    assert Path("told").read_text() == "1\n2\n"
    assert len(metrics("lm")) == 4


def test_tracker_that_cannot_start_ends_the_command_first(
    zoo: Zoo, corpus: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("zoo-faulty", TRACKER)
    zoo(*RUN, "-o", "unstarted", "--tracker", "faulty").failed(5, "cannot start the tracker faulty", "no account")
    assert not Path("unstarted").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "zoo.training.trackers.wandb", raising=False)
    zoo(*RUN, "-o", "lm", "--tracker", "wandb").failed(1, 'pip install "attention-zoo[wandb]"')
    zoo(*RUN, "-o", "lm", "--tracker", "tensorbord").failed(2, "'tensorboard'")
    assert not Path("lm").exists()


def test_tracker_of_an_interrupted_run_is_told(
    zoo: Zoo, corpus: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("zoo-faulty", TRACKER.replace("step == 2", "False"))
    interrupt(monkeypatch, 2)
    assert zoo(*RUN, "-o", "lm", "--tracker", "faulty").status == 130
    assert Path("told").read_text() == "1\n2\nfailed"
    refused = zoo("train", "lm", "--resume", "--tracker", "faulty").failed(2, "--tracker")
    assert "cannot be changed when training continues" in refused
