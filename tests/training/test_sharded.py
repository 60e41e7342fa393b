"""Runs whose weights are divided among processes, started by torchrun with Gloo."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from tests.training.conftest import small_gpt
from tests.training.test_architectures import own_objectives
from tests.training.test_processes import Zoo, kill, launch, steps_of
from tests.training.test_run import FAST, SMALL, weights
from zoo.training.processes import Processes
from zoo.training.sharding import shard, whole


def metrics(name: str) -> list[dict[str, object]]:
    """Return the rows of a run's record."""
    return [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]


def check_equal(name: str, other: str) -> None:
    """Two runs have read the same examples, and end with the same weights up to the rounding of sums."""
    expected, found = weights(name), weights(other)
    assert list(expected) == list(found)
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=1e-5, atol=1e-6)
    one, two = metrics(name), metrics(other)
    for key in ("targets", "loss", "gradient_norm"):
        assert [row[key] for row in one] == pytest.approx([row[key] for row in two], rel=1e-4)
    assert one[-1]["evaluation"] == pytest.approx(two[-1]["evaluation"], rel=1e-5)


@pytest.mark.slow
def test_sharded_run_equals_one_process(zoo: Zoo, corpus: Path) -> None:
    """With uneven shares of a step, clipping, an average, rates by layer, frozen weights and recomputed activations."""
    arguments = (
        "gpt-tiny", "--data", "corpus.txt", "--validation", "corpus.txt", *FAST, "--max-steps", "8",
        "--set", "micro_batch_size=3", "--set", "clip_norm=0.5", "--set", "ema=0.8", "--set", "layer_decay=0.7",
        "--set", "freeze=*norm*", "--set", "evaluate_every=4", "--set", "activation_checkpointing=true",
    )  # fmt: skip
    assert zoo("train", *arguments, "-o", "whole").status == 0
    process = launch(2, *arguments, "--fsdp", "-o", "shared")
    _, err = process.communicate()
    assert process.returncode == 0, err
    check_equal("whole", "shared")


@pytest.mark.slow
def test_number_of_processes_and_sharding_may_change(zoo: Zoo, corpus: Path) -> None:
    """2 sharded, 1, 2 replicated, then 2 sharded processes.

    The gradient of a bias of keys is 0, which Adam would divide by: softmax does not depend on it.
    """
    options = (
        *FAST,
        "--set",
        "freeze=*.key.bias",
        "--set",
        "micro_batch_size=4",
        "--set",
        "checkpoint_every=1",
        "--max-steps",
        "60",
    )
    arguments = ("gpt-tiny", "--data", "corpus.txt", "--validation", "corpus.txt", *options)
    assert zoo("train", *arguments, "-o", "whole").status == 0
    process = launch(2, *arguments, "--fsdp", "-o", "shared")
    for count, option in ((1, "--fsdp"), (2, "--no-fsdp"), (2, "--fsdp")):
        before = steps_of("shared")
        while steps_of("shared") < before + 8 and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        kill(process)
        process = launch(count, "shared", "--resume", option)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("shared: 60 steps") == 1
    check_equal("whole", "shared")


@pytest.mark.slow
def test_every_architecture_can_be_sharded(zoo: Zoo) -> None:
    """Its blocks are found, unless parts of them are called on their own, and gradients are those of one process."""
    process = launch(2, module=("tests.training.sharded_architectures",))
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "differs" not in out, out
    units = dict(line.split(": ") for line in out.splitlines())
    assert set(units) == set(own_objectives())
    assert units["gpt-tiny"] == units["llama-tiny"] == "3 units"  # two blocks and the rest
    assert units["reformer-tiny"] == "1 units"


@pytest.mark.slow
def test_sharded_run_ends_at_a_number_that_is_not_finite(zoo: Zoo, corpus: Path) -> None:
    """All processes find it, and the last checkpoint stands."""
    settings = ("--set", "learning_rate=1e30", "--set", "checkpoint_every=1", "--set", "clip_norm=none")
    process = launch(2, "gpt-tiny", "--data", "corpus.txt", *FAST, *settings, "--max-steps", "9", "--fsdp", "-o", "m")
    _, err = process.communicate()
    assert process.returncode != 0
    assert err.count("is not finite (examples") == 2
    assert 0 < steps_of("m") < 9
    assert all(values.isfinite().all() for values in weights("m").values())


@pytest.mark.slow
def test_sharded_adapters_equal_those_of_one_process(zoo: Zoo, corpus: Path) -> None:
    assert zoo("build", "gpt-tiny", "-o", "base", *SMALL).status == 0
    arguments = (
        "base", "--data", "corpus.txt", "--lora", "rank=2,dropout=0.1", "--max-steps", "5", "--set", "batch_size=8",
        "--set", "micro_batch_size=4", "--set", "log_every=1",
    )  # fmt: skip
    assert zoo("train", *arguments, "-o", "whole").status == 0
    process = launch(2, *arguments, "--fsdp", "-o", "shared")
    _, err = process.communicate()
    assert process.returncode == 0, err
    expected, found = (load_file(Path(name) / "adapter_model.safetensors") for name in ("whole", "shared"))
    assert list(expected) == list(found)
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_sharded_gradients_in_a_group_of_one(backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    device = torch.device("cpu" if backend == "gloo" else "cuda:0")
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        models = [small_gpt(0.0).to(device), small_gpt(0.0)]
        models[1].load_state_dict(models[0].state_dict())
        ids = torch.arange(10).view(1, -1)
        shard(models[1], Processes(device=device), lambda: models[1](ids))
        for model in models:
            model(ids.to(device)).sum().backward()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(whole(other.grad), one.grad)
    finally:
        distributed.destroy_process_group()
