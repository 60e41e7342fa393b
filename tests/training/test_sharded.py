"""Runs whose weights are divided among processes, started by torchrun with Gloo."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.training.test_processes import Zoo, kill, launch, steps_of
from tests.training.test_run import FAST, weights


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
