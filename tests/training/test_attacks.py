"""Runs that outsiders broke: numbers that are not finite, hidden randomness, doubtful data, processes that meet."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo as library
from tests.conformance.plugin import RETURN, Edit, install_edited
from tests.conftest import Result
from tests.training.conftest import Texts, small_gpt
from zoo.errors import PluginError, ZooWarning
from zoo.training.criterion import Loss, Sums
from zoo.training.loop import Trainer, TrainingError
from zoo.training.state import read_state, write_state

Make = Callable[..., Trainer]
Zoo = Callable[..., Result]
SMALL = ("--tokenizer", "bytes", "--set", "hidden_size=16", "--set", "num_layers=1", "--set", "num_heads=2",
         "--set", "max_seq_len=48", "--set", "batch_size=4")  # fmt: skip
ROWS = [{"text": f"text {number}", "label": "xy"[number % 2]} for number in range(12)]


def write_rows(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return name


def train(zoo: Zoo, *options: str, output: str = "m") -> Result:
    given = ("train", "bert-tiny", "--task", "text-classification", "--data", "rows.jsonl", "-o", output)
    return zoo(*given, *SMALL, "--max-steps", "2", *options)


def test_loss_of_an_evaluation_must_be_finite(make_trainer: Make) -> None:
    """NaN would remain the best loss for ever."""
    trainer = make_trainer()
    next(trainer.run())
    loss = trainer.criterion.loss
    trainer.criterion.loss = lambda *given: Loss(loss(*given).total * float("nan"), 4)
    with pytest.raises(TrainingError, match="the loss on the examples for evaluation is not finite: step 1"):
        trainer.evaluate()


def test_weights_that_are_not_finite_are_not_kept(zoo: Zoo) -> None:
    """A step of a finite loss may make them; the checkpoint before it stands."""
    write_rows(ROWS)
    options = ("--quiet", "--set", "learning_rate=1e38", "--set", "checkpoint_every=1")
    train(zoo, *options).failed(1, "is not finite: step 1")
    assert all(tensor.isfinite().all() for tensor in load_file("m/model.safetensors").values())
    assert zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch").status == 0


def test_model_of_numbers_that_are_not_finite_has_no_scores(zoo: Zoo) -> None:
    """The largest of several NaN is the first class."""
    write_rows([{"text": "a", "label": "x"}])
    model = library.create_model("bert-tiny", task="text-classification", labels=("x", "y"), num_classes=2)
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))
    library.save(model, "m", tokenizer="bytes")
    zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch").failed(3, "the loss is not a number")


class Noisy(nn.Module):
    """Adds noise of other generators to the logits in training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        logits: Tensor = self.model(input_ids, **given)
        return logits * (1 + 0.1 * random.random() + 0.1 * np.random.rand()) if self.training else logits


def test_noise_of_python_and_numpy_is_the_same_after_a_crash(make_trainer: Make, tmp_path: Path) -> None:
    """And the generators of the calling program are left as they were."""
    before = random.getstate()
    whole = make_trainer(Noisy(small_gpt()))
    list(whole.run())
    assert random.getstate() == before
    first = make_trainer(Noisy(small_gpt()))
    steps = first.run()
    for _ in range(5):
        next(steps)
    steps.close()
    write_state(first, tmp_path / "state", first.tensors().__getitem__)
    second = make_trainer(Noisy(small_gpt()))
    second.model.load_state_dict(first.model.state_dict())
    read_state(second, tmp_path / "state")
    random.seed(5)
    list(second.run())
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.model.state_dict().items())


def test_parameters_that_share_memory_are_refused(make_trainer: Make) -> None:
    """They are updated together, but stored as two."""
    model = small_gpt()
    model.extra = nn.Parameter(torch.zeros(1))
    trainer = make_trainer(model)
    model.extra.data = list(model.parameters())[1].data
    with pytest.raises(PluginError, match=r"share memory, but are two parameters: assign the same nn\.Parameter"):
        Trainer(model, trainer.criterion, Texts(), trainer.settings)


def test_buffers_without_data_are_refused_before_training(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot be loaded again would lose the whole run."""
    write_rows(ROWS)
    from zoo_plugins.bert.model import BERT

    build = BERT.__init__

    def with_buffer(self: Any, config: Any) -> None:
        build(self, config)
        self.register_buffer("average", torch.zeros(3), persistent=False)

    monkeypatch.setattr(BERT, "__init__", with_buffer)
    train(zoo).failed(5, "buffer average of BERT has no data")
    assert not Path("m").exists()


def test_statistics_of_batches_are_mentioned(make_trainer: Make) -> None:
    """A step of several parts has other statistics than a whole one."""
    model = small_gpt()
    model.norm_of_batch = nn.BatchNorm1d(4)
    with pytest.warns(ZooWarning, match="norm_of_batch normalises by statistics of its batch"):
        make_trainer(model, micro_batch_size=2)
    assert not [item for item in _warnings(lambda: make_trainer(model)) if "statistics" in item]


def _warnings(call: Callable[[], object]) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(item.message) for item in caught]


def test_negative_numbers_of_targets_are_refused() -> None:
    with pytest.raises(PluginError, match="the objective counts -3 targets in a batch"):
        Sums(1).add(Loss(torch.zeros(()), -3))


@pytest.mark.parametrize(
    ("name", "content", "status", "fragment"),
    [
        ("rows.csv", "text,label,label\na,x,y\nb,y,x\n", 3, "the column 'label' occurs twice"),
        (
            "rows.jsonl",
            '{"text": "a", "text": "b", "label": "x"}',
            3,
            "not JSON (the key 'text' occurs twice)",
        ),
        ("rows.jsonl", '{"text": "\\ud800 a", "label": "x"}\n{"text": "b", "label": "y"}', 3, "'text' is not valid"),
        ("rows.jsonl", '{"text": "a", "label": "\\ud800"}\n{"text": "b", "label": "y"}', 3, "'label' is not valid"),
        ("rows.jsonl", "\n".join(map(json.dumps, [*ROWS, {"text": "a", "label": ""}])), 3, "label '' is not one of"),
        ("rows.jsonl", "\n".join(map(json.dumps, [*ROWS, {"text": "a", "label": "x "}])), 2, "differ in spaces only"),
        ("rows.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "la', 3, "rows.jsonl, row 2"),
    ],
    ids=["column", "key", "surrogate", "label", "empty", "spaces", "truncated"],
)
def test_doubtful_data_is_refused(zoo: Zoo, name: str, content: str, status: int, fragment: str) -> None:
    Path(name).write_text(content)
    given = ("train", "bert-tiny", "--task", "text-classification", "--data", name, "-o", "m")
    zoo(*given, *SMALL, "--max-steps", "2").failed(status, fragment)
    assert not Path("m").exists()


def test_quiet_runs_can_be_continued_quietly(zoo: Zoo) -> None:
    write_rows(ROWS)
    assert train(zoo, "-q").status == 0
    zoo("train", "m", "--resume", "-q").failed(3, "holds no unfinished training")
    zoo("train", "m", "--resume", "--seed", "1").failed(2, "--seed: leave it out")


def test_state_that_a_killed_process_left_is_removed(zoo: Zoo) -> None:
    """Between the manifest of the finished model and the removal of the state. Other files of these names stay."""
    write_rows(ROWS)
    assert train(zoo).status == 0
    state, best = Path("m/training.safetensors"), Path("m/best.safetensors")
    save_file({"a": torch.zeros(1)}, state)
    zoo("train", "m", "--resume").failed(3, "holds no unfinished training")
    assert state.exists()
    save_file({"a": torch.zeros(1)}, state, {"step": "2"})
    save_file({"a": torch.zeros(1)}, best)
    zoo("train", "m", "--resume").failed(3, "holds no unfinished training")
    assert not state.exists()
    assert not best.exists()
    assert train(zoo, "--force").status == 0


PENALTY: Edit = (
    "model",
    "    def forward(",
    "    def training_penalty(self):\n        return self.head.weight.square().sum(0)\n\n    def forward(",
)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ((*RETURN, "        input_ids.add_(0)\n        return self.head(x)\n"), "modified by an inplace operation"),
        (PENALTY, "grad can be implicitly created only for scalar outputs"),
    ],
    ids=["input", "penalty"],
)
def test_errors_of_a_model_name_its_plugin(install: Callable[..., Path], zoo: Zoo, edit: Edit, reason: str) -> None:
    name = install_edited(install, "zoo-wrong", [edit])
    write_rows([{"text": [1, 2, 3, 4, 5]}] * 20)
    result = zoo("train", f"{name}-tiny", "--data", "rows.jsonl", "-o", "m", "--max-steps", "1")
    result.failed(5, "plugin 'zoo-wrong' (zoo-wrong 1.0) cannot train zoo_wrong ", reason)


RUN = """
import sys
from pathlib import Path
from zoo.training.launch import start
from zoo.training.plan import make_plan
from zoo import cli
plan = make_plan("bert-tiny", task="text-classification", data=["rows.jsonl"], tokenizer="bytes", columns={},
                 settings={"max_steps": 1, "max_length": 20})
run = start(plan, Path("m"), force=True)
print("started", flush=True)
sys.stdin.readline()
run.train()
"""


@pytest.mark.slow
def test_a_directory_has_one_run_at_a_time(zoo: Zoo) -> None:
    """The second is refused while the first lives; the first ends unharmed."""
    write_rows(ROWS)
    with subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "started\n"
        for options in (("m", "--resume"), ("bert-tiny", "--data", "rows.jsonl", "-o", "m", "--force", *SMALL)):
            zoo("train", *options).failed(6, "another run trains in this directory: m: wait until it ends")
        first.communicate("go\n")
    assert first.returncode == 0
    assert zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch").status == 0
