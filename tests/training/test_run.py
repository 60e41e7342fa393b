"""Runs of ``zoo train``: the result, interruption at any time, and what is refused."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zoo as library
from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.cli.entry import main
from zoo.errors import ArtifactError
from zoo.training import plot_loss
from zoo.training.cache import Facts
from zoo.training.launch import start
from zoo.training.plan import make_plan

Zoo = Callable[..., Result]
SMALL = ("--set", "hidden_size=16", "--set", "num_layers=1", "--set", "num_heads=2", "--set", "max_seq_len=32")
FAST = (*SMALL, "--set", "batch_size=8", "--set", "learning_rate=0.01", "--set", "log_every=1")
ROWS = [{"text": text, "label": label} for text, label in [("good and fine", "yes"), ("bad and awful", "no")] * 20]


@pytest.fixture
def reviews() -> Path:
    path = Path("reviews.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def weights(directory: Path | str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in library.load(directory).state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_trained_model_is_a_model_directory(zoo: Zoo, corpus: Path) -> None:
    found = zoo("train", "gpt-tiny", "--data", str(corpus), "-o", "lm", *FAST, "--max-steps", "30", "--json").json
    stored = ModelDirectory.open("lm", rehash=True)
    assert set(stored.files) == {"README.md", "config.json", "loss.svg", "metrics.jsonl", "model.safetensors",
                                 "tokenizer.json", "training.json"}  # fmt: skip
    assert ElementTree.parse("lm/loss.svg").getroot().tag.endswith("svg")
    drawn = Path("lm/loss.svg").read_text()
    for text in ("gpt-tiny: loss of causal-lm on corpus.txt", "step (of 8 examples)", "loss (nats per token)",
                 "training, single steps, not smoothed", "learning rate"):  # fmt: skip
        assert text in drawn
    assert "mean of" not in drawn
    zoo("show", "lm", "--figure", "again.svg", "--of", "loss")
    assert Path("again.svg").read_text() == drawn
    assert "![Loss by step](loss.svg)" in (stored.path / "README.md").read_text()
    rows = [json.loads(line) for line in (stored.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] == found["loss"] < rows[0]["loss"]
    record = json.loads((stored.path / "training.json").read_text())
    assert record["steps"] == 30
    assert str(Path.cwd()) not in json.dumps(record)
    assert "trained for 30 steps on corpus.txt (causal-lm)" in (stored.path / "README.md").read_text()
    assert stored.origin.parent is not None
    assert stored.origin.parent.kind == "initialised"
    assert zoo("run", "lm", "line", "--max-new-tokens", "1").status != 0  # not exported yet


@pytest.mark.slow
def test_many_losses_are_smoothed(zoo: Zoo, corpus: Path) -> None:
    """By the mean of the last records; evaluations and the step that is kept are marked."""
    data = ("--data", str(corpus), "--validation", str(corpus), "--set", "evaluate_every=25")
    zoo("train", "gpt-tiny", *data, "-o", "lm", *FAST, "--max-steps", "75")
    rows = [json.loads(line) for line in Path("lm/metrics.jsonl").read_text().splitlines()]
    plot = plot_loss("lm")
    axes, below = plot.figure.axes
    (rates,) = below.get_lines()
    assert rates.get_ydata().tolist() == [row["learning_rate"] for row in rows]
    assert len({*rates.get_ydata()}) > 1
    lines = {line.get_gid() or line.get_label(): line for line in axes.get_lines()}
    losses = [row["loss"] for row in rows]
    assert lines["training"].get_ydata().tolist() == losses
    means = [float(np.mean(losses[end - 3 : end])) for end in range(3, 76)]
    assert lines["mean"].get_ydata().tolist() == pytest.approx(means)
    assert lines["mean"].get_xdata().tolist() == list(range(3, 76))
    assert lines["mean"].get_label() == "training, mean of 3 recorded steps"
    assert lines["evaluation"].get_xdata().tolist() == [25, 50, 75]
    best = min((row for row in rows if "evaluation" in row), key=lambda row: row["evaluation"]["loss"])
    assert f"kept: step {best['step']}" in lines
    zoo("build", "gpt-tiny", "-o", "fresh")
    zoo("show", "fresh", "--figure", "x.svg", "--of", "loss").failed(2, "has no record of a training run")
    Path("lm/training.json").write_text("[]")
    with pytest.raises(ArtifactError, match="not the record of a finished run"):
        plot_loss("lm")


def test_missing_matplotlib_is_said_once(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, with the package to install."""
    monkeypatch.setattr("zoo.cli.train.find_spec", lambda name: None)
    monkeypatch.setattr("zoo.training.curve.find_spec", lambda name: None)
    said = zoo("train", "gpt-tiny", "--data", str(corpus), "-o", "lm", *FAST, "--max-steps", "1")
    first, *rest = said.err.splitlines()
    assert first.startswith("note: loss.svg will be left out") and "attention-zoo[plot]" in first
    assert not [line for line in rest if "loss.svg" in line]
    assert not Path("lm/loss.svg").exists()
    assert "loss.svg" not in Path("lm/README.md").read_text()


def test_classes_come_from_the_data(zoo: Zoo, reviews: Path) -> None:
    said = zoo("train", "bert-tiny", "--data", str(reviews), "--task", "text-classification", "-o", "judge", *FAST,
               "--tokenizer", "bytes", "--max-steps", "40")  # fmt: skip
    assert said.status == 0, said.err
    model = library.load("judge")
    assert model.config.labels == ("no", "yes")
    assert model.config.problem_type == "single_label_classification"


def run_command(arguments: tuple[str, ...]) -> None:
    sys.exit(main(arguments))


def state() -> int | None:
    """Return what changes when a checkpoint is written."""
    try:
        return Path("killed/training.safetensors").stat().st_ino
    except FileNotFoundError:
        return None


@pytest.mark.slow
def test_killed_run_continues_to_the_same_bits(zoo: Zoo, corpus: Path) -> None:
    """SIGKILL at 50 random times: from the start of a process, or from its first checkpoint on."""
    context = multiprocessing.get_context("forkserver")  # imports torch once
    context.set_forkserver_preload(["torch", "zoo.cli.entry", "zoo.training.launch", "zoo.training.loop"])
    options = (*FAST, "--max-steps", "300", "--set", "checkpoint_every=1", "--set", "ema=0.9")
    arguments = ("train", "gpt-tiny", "--data", str(corpus), "--validation", str(corpus), "--set", "evaluate_every=7")
    assert zoo(*arguments, "-o", "whole", *options).status == 0
    rng, kills, reached = random.Random(0), 0, set()
    command = (*arguments, "-o", "killed", *options)
    while True:
        process = context.Process(target=run_command, args=(command,))
        process.start()
        if kills < 50 and rng.random() < 0.5:
            before = state()
            while state() == before and process.is_alive():
                time.sleep(0.001)
        process.join(rng.uniform(0, 0.3) if kills < 50 else None)
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if state():
            command = ("train", "killed", "--resume")
            reached.add(ModelDirectory.open("killed").origin.training.steps)
    assert kills == 50
    assert len(reached) >= 10
    assert equal(weights("whole"), weights("killed"))
    stored = [(Path(name) / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in stored]
    assert losses[0] == losses[1]


def test_interrupted_run_continues(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.training.loop import Trainer

    arguments = ("gpt-tiny", "--data", str(corpus), *FAST, "--max-steps", "12", "--set", "checkpoint_every=5")
    assert zoo("train", *arguments, "-o", "whole").status == 0
    step = Trainer._step

    def failing(self: Trainer, number: int, parts: object) -> object:
        if number == 8:
            raise KeyboardInterrupt
        return step(self, number, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", failing)
        assert zoo("train", *arguments, "-o", "part").status == 130
    assert ModelDirectory.open("part").origin.training.steps == 5
    assert zoo("train", "part", "--resume").status == 0
    assert equal(weights("whole"), weights("part"))
    assert "holds no unfinished training" in zoo("train", "part", "--resume").failed(3)


@pytest.mark.parametrize("failing", [5, 8, 9])
def test_interrupted_run_continues_after_evaluations(
    zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The best evaluation and the number of worse ones are kept: patience ends both runs at the same step."""
    from zoo.training.loop import Trainer

    Path("other.txt").write_text("QWXZ" * 60)  # its loss grows soon
    arguments = ("gpt-tiny", "--data", str(corpus), "--validation", "other.txt", *FAST, "--max-steps", "40",
                 "--set", "schedule=constant", "--set", "evaluate_every=1", "--set", "checkpoint_every=2",
                 "--set", "patience=4", "--set", "ema=0.5", "--set", "dropout=0.2")  # fmt: skip
    whole = zoo("train", *arguments, "-o", "whole", "--json").json
    assert 10 <= whole["steps"] < 40, "patience did not end the run"
    step = Trainer._step

    def stopping(self: Trainer, number: int, parts: Any) -> object:
        if number == failing:
            raise KeyboardInterrupt
        return step(self, number, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        assert zoo("train", *arguments, "-o", "part").status == 130
    assert json.loads(Path("part/training.json").read_text())["progress"]["best"] is not None
    assert zoo("train", "part", "--resume", "--json").json == {**whole, "directory": "part"}
    assert equal(weights("whole"), weights("part"))
    records = [json.loads(Path(name, "training.json").read_text()) for name in ("whole", "part")]
    assert records[0]["best"] == records[1]["best"]


def interrupt_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, times: int = 1) -> None:
    """Have a signal, or several, arrive in the ``call``-th call of a function."""
    original, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)


AVERAGED = ("--set", "ema=0.5", "--set", "dropout=0.2")
DIVIDED = ("--set", "micro_batch_size=4")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("more", "place", "call", "saved"),
    [
        (DIVIDED, "Trainer._backward", 13, 7),
        (AVERAGED, "evaluation_batches", 3, 9),
        (AVERAGED, "Trainer._step", 7, 7),
        (DIVIDED, "Trainer._step", 1, 1),
        (AVERAGED, "Trainer._step", 12, 12),
        (DIVIDED, "evaluation_batches", 4, 12),
    ],
)
def test_signal_saves(
    zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], place: str, call: int, saved: int
) -> None:
    """A signal in a step, also between its parts, or in an evaluation loses nothing."""
    from zoo.training import loop

    owner, _, name = place.rpartition(".")
    arguments = ("gpt-tiny", "--data", str(corpus), "--validation", str(corpus), *FAST, *more, "--max-steps", "12",
                 "--set", "evaluate_every=3", "--set", "checkpoint_every=100", "--set", "log_every=5")  # fmt: skip
    assert zoo("train", *arguments, "-o", "whole").status == 0
    with monkeypatch.context() as patch:
        interrupt_in(patch, getattr(loop, owner) if owner else loop, name, call)
        result = zoo("train", *arguments, "-o", "part")
    assert result.status == 130
    assert f"saved at step {saved}: zoo train part --resume" in result.err
    resumed = zoo("train", "part", "--resume")
    assert resumed.status == 0
    assert f"continuing at step {saved}" in resumed.err
    assert equal(weights("whole"), weights("part"))
    rows = [[json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
            for name in ("whole", "part")]  # fmt: skip
    for row in itertools.chain(*rows):
        del row["seconds"], row["utilization"]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_signal_saves_adapters(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.training.loop import Trainer

    assert zoo("build", "gpt-tiny", *SMALL, "-o", "base").status == 0
    options = FAST[len(SMALL) :]
    arguments = ("base", "--lora", "rank=2,dropout=0.1", "--data", str(corpus), "--validation", str(corpus), *options,
                 "--set", "evaluate_every=2", "--max-steps", "6")  # fmt: skip
    assert zoo("train", *arguments, "-o", "whole").status == 0
    with monkeypatch.context() as patch:
        interrupt_in(patch, Trainer, "_step", 5)
        assert "saved at step 5" in zoo("train", *arguments, "-o", "part").err
    assert zoo("train", "part", "--resume").status == 0
    whole, part = (load_file(f"{directory}/adapter_model.safetensors") for directory in ("whole", "part"))
    assert equal(whole, part)


def test_second_signal_ends_at_once(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo import signals
    from zoo.training.loop import Trainer

    arguments = ("gpt-tiny", "--data", str(corpus), *FAST, "--max-steps", "5", "--set", "checkpoint_every=1")
    with monkeypatch.context() as patch:
        interrupt_in(patch, Trainer, "_step", 4, times=2)  # so soon after the first, it is the same one
        result = zoo("train", *arguments, "-o", "once")
    assert (result.status, "saved at step 4" in result.err) == (130, True)
    monkeypatch.setattr(signals, "_REPEATED", 0.0)
    with monkeypatch.context() as patch:
        interrupt_in(patch, Trainer, "_step", 4, times=2)
        result = zoo("train", *arguments, "-o", "twice")
    assert (result.status, "saved at step 3" in result.err) == (130, True)
    with monkeypatch.context() as patch:
        interrupt_in(patch, Trainer, "_step", 1, times=2)
        result = zoo("train", *arguments, "-o", "none")
    assert (result.status, "no step was finished" in result.err) == (130, True)


def test_checkpoints_by_time(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.training.loop import Trainer

    arguments = ("gpt-tiny", "--data", str(corpus), *FAST, "--max-steps", "5", "--set", "checkpoint_every=100")
    for minutes, saved in (("0.0000001", 3), ("10", 0), ("none", 0)):
        with monkeypatch.context() as patch:
            step = Trainer._step

            def failing(self: Trainer, number: int, parts: Any, step: Any = step) -> Any:
                if number == 3:
                    raise KeyboardInterrupt
                return step(self, number, parts)

            patch.setattr(Trainer, "_step", failing)
            zoo("train", *arguments, "--set", f"checkpoint_minutes={minutes}", "-o", "lm", "--force")
        assert json.loads(Path("lm/training.json").read_text())["progress"]["step"] == saved


@pytest.fixture
def stopped(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Stop a run in the directory ``part`` at step 3 of 6, and return the arguments for an uninterrupted one."""
    from zoo.training.loop import Trainer

    Path("held.txt").write_text(corpus.read_text()[:300])
    options = (*FAST, "--set", "dropout=0", "--set", "buckets=false", "--max-steps", "6")
    arguments = ("gpt-tiny", "--data", str(corpus), "--validation", "held.txt", *options)
    with monkeypatch.context() as patch:
        interrupt_in(patch, Trainer, "_step", 3)
        assert "saved at step 3" in zoo("train", *arguments, "-o", "part").err
    return arguments


def test_data_may_move(zoo: Zoo, corpus: Path, stopped: tuple[str, ...]) -> None:
    """The same bytes under another name continue the run to the same bits; other bytes or another format do not."""
    Path("moved").mkdir()
    text = corpus.read_text()
    corpus.rename("moved/renamed.txt")
    Path("held.txt").rename("moved/held.txt")
    zoo("train", "part", "--resume").failed(3, "no such file: corpus.txt")
    Path("moved/other.txt").write_text(text + "more")
    Path("moved/renamed.jsonl").write_text(text)
    places = ("--validation", "moved/held.txt")
    for name in ("other.txt", "renamed.jsonl"):
        zoo("train", "part", "--resume", "--data", f"moved/{name}", *places).failed(3, "changed since training began")
    swapped = ("--data", "moved/held.txt", "--validation", "moved/renamed.txt")
    zoo("train", "part", "--resume", *swapped).failed(3, "changed since training began")
    assert zoo("train", "part", "--resume", "--data", "moved/renamed.txt", *places).status == 0
    corpus.write_text(text)
    Path("moved/held.txt").rename("held.txt")
    assert zoo("train", *stopped, "-o", "whole").status == 0
    assert equal(weights("whole"), weights("part"))


def test_settings_that_gradients_do_not_depend_on_may_change(zoo: Zoo, stopped: tuple[str, ...]) -> None:
    assert zoo("train", *stopped, "-o", "whole").status == 0
    copies = [shutil.copytree("part", name) for name in ("exact", "divided")]
    texts = (
        "workers=1",
        "log_every=2",
        "checkpoint_every=4",
        "checkpoint_minutes=none",
        "activation_checkpointing=true",
    )
    given = [part for text in texts for part in ("--set", text)]
    assert zoo("train", copies[0], "--resume", *given).status == 0
    assert equal(weights("whole"), weights(copies[0]))
    found = zoo("train", copies[1], "--resume", "--set", "micro_batch_size=4")
    assert (found.status, "micro_batch_size 4 instead of None from step 4 (sums are" in found.err) == (0, True)
    expected, divided = weights("whole"), weights(copies[1])
    for name in expected:
        torch.testing.assert_close(divided[name], expected[name], rtol=1e-4, atol=1e-5)
    assert "micro_batch_size 4 instead of None from step 4" in Path(copies[1], "README.md").read_text()
    for text in ("learning_rate=1", "max_steps=9", "buckets=true", "evaluate_every=1", "hidden_size=8", "nothing=1"):
        key = text.partition("=")[0]
        zoo("train", "part", "--resume", "--set", text).failed(2, "cannot be changed when training continues", key)
    assert zoo("train", "part", "--resume", "--set", "batch_size=8").status == 0  # as it is


def test_changed_data_is_refused(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.training.loop import Trainer

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert zoo("train", "gpt-tiny", "--data", str(corpus), *FAST, "-o", "lm").status == 130
    corpus.write_text(corpus.read_text() + "more\n")
    assert "changed since training began: data 0 corpus.txt" in zoo("train", "lm", "--resume").failed(3)


def test_files_of_the_user_stay(zoo: Zoo, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that appears in the directory while training goes on is neither lost nor in the way."""
    from zoo.training.run import Run

    checkpoint = Run.checkpoint

    def noting(self: Run) -> None:
        checkpoint(self)
        (self.directory / "notes.txt").write_text("mine")

    monkeypatch.setattr(Run, "checkpoint", noting)
    assert zoo("train", "gpt-tiny", "--data", str(corpus), *FAST, "-o", "lm", "--max-steps", "4").status == 0
    assert Path("lm/notes.txt").read_text() == "mine"


def test_best_evaluation_by_accuracy(zoo: Zoo, reviews: Path) -> None:
    """An objective without accuracy is refused before the old directory is replaced."""
    wrong = [{**row, "label": "yes"} for row in ROWS]
    Path("wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    common = ("train", "bert-tiny", "--task", "text-classification", "--data", str(reviews), "--tokenizer", "bytes")
    options = (*common, "--validation", "wrong.jsonl", *FAST, "--set", "evaluate_every=2", "--max-steps", "12")
    found = zoo(*options, "-o", "judge", "--set", "monitor=accuracy", "--json").json
    rows = [json.loads(line) for line in Path("judge/metrics.jsonl").read_text().splitlines()]
    evaluations = {row["step"]: row["evaluation"] for row in rows if "evaluation" in row}
    best = max(evaluations, key=lambda step: (evaluations[step]["accuracy"], -evaluations[step]["loss"]))
    assert found["kept_step"] == best
    before = Path("judge/manifest.json").read_bytes()
    numbers = [{"text": row["text"], "label": 0.5} for row in ROWS]
    Path("numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers))
    regression = ("--set", "problem_type=regression", "--set", "num_classes=1", "--set", "monitor=accuracy")
    said = zoo(*common[:5], "numbers.jsonl", *common[6:], *regression, "-o", "judge", "--force").failed(2)
    assert "the objective has no accuracy" in said
    assert Path("judge/manifest.json").read_bytes() == before


@pytest.mark.slow
def test_best_weights_are_kept(zoo: Zoo, corpus: Path) -> None:
    """The loss on letters that do not occur in training grows soon."""
    options = (*FAST, "--set", "schedule=constant", "--set", "evaluate_every=2", "--max-steps", "16")
    Path("other.txt").write_text("QWXZ" * 60)
    arguments = ("train", "gpt-tiny", "--data", str(corpus), "--validation", "other.txt")
    found = zoo(*arguments, *options, "-o", "best", "--json").json
    rows = [json.loads(line) for line in Path("best/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
    assert found["kept_step"] == min(losses, key=losses.__getitem__) < 16
    zoo(*arguments, *options, "-o", "last", "--set", "keep=last")
    assert not equal(weights("best"), weights("last"))
    stopped = zoo(*arguments, *options, "-o", "stopped", "--set", "patience=1", "--json").json
    assert stopped["steps"] < 16
    assert equal(weights("best"), weights("stopped"))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("gpt-tiny", "-o", "x"), 2, "no data"),
        (("gpt-tiny", "--data", "corpus.txt"), 2, "no directory to write"),
        (("gpt-tiny", "--data", "nothing.txt", "-o", "x"), 3, "no such file: nothing.txt"),
        (("gpt-tiny", "--data", "copy-tsk", "-o", "x"), 2, "did you mean 'copy-task'?"),
        (("gpt-tiny", "--data", "corpus.txt", "-o", "x", "--set", "batchsize=4"), 2, "did you mean 'batch_size'"),
        (("gpt-tiny", "--data", "corpus.txt", "-o", "x", "--set", "batch_size=0"), 2, "must be positive"),
        (("gpt-tiny", "--data", "corpus.txt", "-o", "x", "--text-column", "\udcff"), 2, "column is not UTF-8"),
        (("gpt-tiny", "--data", "corpus.txt", "-o", "x", "--objective", "causal"), 2, "did you mean 'causal-lm'"),
        (("bert-tiny", "--data", "corpus.txt", "-o", "x", "--objective", "causal-lm"), 2, "is not for models"),
        (("gpt-tiny", "--data", "corpus.txt", "-o", "corpus.txt"), 2, "corpus.txt"),
        (("gpt-tiny", "--data", "corpus.txt", "--set", "max_length=4000", "-o", "x"), 2, "longest input"),
        (("nothing", "--resume"), 3, "no such directory"),
        (("nothing", "--resume", "--epochs", "2"), 2, "cannot be changed when training continues"),
        (("gpt-tiny", "--data", "empty.jsonl", "-o", "x"), 3, "the data has no rows: empty.jsonl"),
        (("models/gpt", "--data", "corpus.txt", "-o", "x"), 3, "no such directory: models/gpt"),
        (("bert-tiny", "--task", "text-classification", "--data", "bad.jsonl", "-o", "x", "--tokenizer", "bytes"), 3,
         "2 of 4 rows cannot be used: bad.jsonl, row 2: not JSON"),
    ],
)  # fmt: skip
def test_errors(zoo: Zoo, corpus: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    Path("empty.jsonl").touch()
    Path("bad.jsonl").write_text('{"text": "a", "label": "b"}\n{"text"\n{"text": "c"}\n{"text": "d", "label": "e"}\n')
    assert message in zoo("train", *arguments).failed(status)
    assert not Path("x").exists()


def test_no_token_of_a_corpus_is_lost(zoo: Zoo, corpus: Path) -> None:
    """Texts of language models are neither truncated nor padded: each block continues the one before it."""
    plan = make_plan("gpt-tiny", settings={"max_length": 16}, data=[str(corpus)], columns={})
    data = start(plan, Path("lm")).data
    text = corpus.read_bytes()
    assert data.facts == Facts(rows=1, bad=0, truncated=0, tokens=len(text) + 1, encoded=0, unknown=0, ambiguous=0)
    blocks = [data.examples[index]["input_ids"] for index in range(len(data.examples))]
    assert len(blocks) == len(text) // 16
    read = [number for block in blocks for number in block[:-1].tolist()]
    assert bytes(read) == text[: len(read)]
    assert all(one[-1] == other[0] for one, other in itertools.pairwise(blocks))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("training.json", "data", [["corpus.txt"]]),
        ("training.json", "data", []),
        ("training.json", "digests", ["x"]),
        ("training.json", "trackers", 3),
        ("training.json", "columns", {"text": None}),
        ("training.json", "settings", 3),
        ("training.json", "lora", 3),
        ("training.json", "options", []),
        ("metrics.jsonl", "", "[1]"),
        ("metrics.jsonl", "", '{"step": 1}'),
    ],
)
def test_malformed_run_is_not_continued(
    zoo: Zoo, corpus: Path, seal: Callable[[Path], None], file: str, name: str, value: object
) -> None:
    """A file that the manifest lists may have any content."""
    plan = make_plan("gpt-tiny", settings={"max_length": 16}, data=[str(corpus)], columns={})
    start(plan, Path("lm")).release()
    path = Path("lm") / file
    if name:
        content = json.loads(path.read_text())
        content["plan"][name] = value
        path.write_text(json.dumps(content))
    else:
        path.write_text(str(value))
    seal(Path("lm"))
    assert "of a training run" in zoo("train", "lm", "--resume").failed(3)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("plan", {"options": {"nothing": 1}}, "unknown key 'nothing'"),
        ("plan", {"options": {"masked": "no"}}, "unknown key 'masked'"),
        ("progress", {"origin": {"kind": 3}}, "kind must be"),
    ],
)
def test_values_of_a_stored_run_are_not_those_of_the_command(
    zoo: Zoo, corpus: Path, seal: Callable[[Path], None], part: str, value: dict[str, Any], message: str
) -> None:
    plan = make_plan("gpt-tiny", settings={"max_length": 16}, data=[str(corpus)], columns={})
    start(plan, Path("lm")).release()
    path = Path("lm/training.json")
    content = json.loads(path.read_text())
    content[part] |= value
    path.write_text(json.dumps(content))
    seal(Path("lm"))
    zoo("train", "lm", "--resume").failed(3, message, "lm/training.json")


def test_end_token_outside_of_the_vocabulary_is_refused(zoo: Zoo, corpus: Path) -> None:
    arguments = ("gpt-tiny", "--data", str(corpus), "-o", "x", "--set", "eos_token_id=999", *FAST)
    zoo("train", *arguments).failed(2, "eos_token_id 999 is no token, but '<eos>' is 258: bytes: set eos_token_id=258")
