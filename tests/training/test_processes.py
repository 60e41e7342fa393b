"""Runs that several processes share, started by torchrun with Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import Result
from tests.training.test_run import FAST, weights

Zoo = Callable[..., Result]


def launch(count: int, *arguments: str, module: tuple[str, ...] = ("zoo", "train")) -> subprocess.Popen[str]:
    """Start ``zoo train``, or another module, in a number of processes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)) if count > 1 else ()
    command = [sys.executable, *torchrun, "-m", *module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all its children, which torchrun starts in sessions of their own."""
    found = psutil.Process(process.pid)
    for item in (*found.children(recursive=True), found):
        item.kill()
    process.communicate()


def steps_of(directory: str) -> int:
    """Return the number of steps that the last checkpoint has done."""
    try:
        return int(json.loads((Path(directory) / "training.json").read_text())["progress"]["step"])
    except (OSError, ValueError, KeyError):
        return 0


@pytest.mark.slow
def test_number_of_processes_may_change(zoo: Zoo) -> None:
    """2, then 1, then 2 processes end with the weights of a run in one, up to the rounding of sums."""
    Path("corpus.txt").write_text("".join(f"line {number} counts to {number + 1}\n" for number in range(300)))
    options = (*FAST, "--set", "micro_batch_size=4", "--set", "checkpoint_every=1", "--max-steps", "60")
    arguments = ("gpt-tiny", "--data", "corpus.txt", "--validation", "corpus.txt", *options)
    assert zoo("train", *arguments, "-o", "whole").status == 0
    process = launch(2, *arguments, "-o", "shared")
    for count in (1, 2):
        before = steps_of("shared")
        while steps_of("shared") < before + 8 and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        kill(process)
        process = launch(count, "shared", "--resume")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("shared: 60 steps") == 1
    expected, found = weights("whole"), weights("shared")
    for name, values in expected.items():
        if not name.endswith("attention.key.bias"):  # its gradient is 0, so that only rounding errors move it
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
    rows = [
        [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "shared")
    ]
    assert [row["targets"] for row in rows[0]] == [row["targets"] for row in rows[1]]
    assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=1e-5)
    assert rows[0][-1]["evaluation"]["loss"] == pytest.approx(rows[1][-1]["evaluation"]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("all_processes", [False, True], ids=["one", "all"])
def test_signal_saves(zoo: Zoo, all_processes: bool) -> None:
    """All processes save after the same step, whether torchrun tells all of them or one is told alone."""
    Path("corpus.txt").write_text("".join(f"line {number} counts to {number + 1}\n" for number in range(300)))
    options = (*FAST, "--set", "micro_batch_size=4", "--set", "workers=1", "--max-steps", "4000")
    arguments = ("gpt-tiny", "--data", "corpus.txt", *options)
    process = launch(2, *arguments, "-o", "shared")
    assert process.stderr is not None
    found = psutil.Process(process.pid)
    for line in process.stderr:
        if line.startswith("step 20 "):
            break
    if all_processes:
        process.terminate()
    else:
        last = next(item for item in found.children() if item.environ()["RANK"] == "1")
        last.terminate()
    _, err = process.communicate(timeout=120)
    saved = steps_of("shared")
    assert saved >= 20
    assert f"saved at step {saved:,}: zoo train shared --resume" in err
    again = launch(1, "shared", "--resume")
    assert again.stderr is not None
    assert again.stderr.readline() == f"continuing at step {saved:,}\n"
    kill(again)


@pytest.mark.slow
def test_too_few_parts_are_refused(zoo: Zoo) -> None:
    Path("corpus.txt").write_text("some text to learn " * 50)
    process = launch(2, "gpt-tiny", "--data", "corpus.txt", *FAST, "--set", "micro_batch_size=8", "-o", "m")
    _, err = process.communicate()
    assert process.returncode != 0
    assert "a step has 1 parts, fewer than the 2 processes" in err


@pytest.mark.slow
def test_loss_of_two_terms_is_shared(zoo: Zoo) -> None:
    """The processes have unequal numbers of masked tokens, and one has nothing to evaluate."""
    texts = [("a few words " * (number % 7 + 1)).strip() for number in range(40)]
    rows = [{"text": text, "pair": text[::-1], "label": number % 2} for number, text in enumerate(texts)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("few.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    arguments = (
        "bert-tiny", "--task", "pretraining", "--data", "rows.jsonl", "--validation", "few.jsonl", *FAST,
        "--tokenizer", "bytes", "--set", "dropout=0", "--set", "buckets=false", "--max-steps", "6",
    )  # fmt: skip
    assert zoo("train", *arguments, "-o", "whole").status == 0
    process = launch(2, *arguments, "-o", "shared")
    _, err = process.communicate()
    assert process.returncode == 0, err
    expected, found = weights("whole"), weights("shared")
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-5)
    lines = [(Path(name) / "metrics.jsonl").read_text().splitlines()[-1] for name in ("whole", "shared")]
    one, other = (json.loads(line)["evaluation"] for line in lines)
    assert other.pop("terms") == pytest.approx(one.pop("terms"), rel=1e-5)
    assert other == pytest.approx(one, rel=1e-5)
