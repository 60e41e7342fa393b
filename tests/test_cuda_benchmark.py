"""The command that needs a GPU refuses to start without one, and rehearses on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_without_a_gpu_it_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no GPU (torch has no CUDA device): --device cpu rehearses on the CPU\n"


@pytest.mark.slow
def test_rehearsal_on_the_cpu() -> None:
    done = run("--device", "cpu", "--only", "verify", "--only", "speed", "--verify", "bert-tiny", "--speed", "gpt-tiny",
               "--seconds", "0.05")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    verified = dict(zip(rows[0], rows[2], strict=True))
    assert verified.pop("verified on cpu") == "bert-tiny"
    assert list(verified) == ["float32", "profile cpu", "float16", "int8", "int4"]
    assert all(0 < float(share) <= 1 for share in verified.values())
    speeds = {row[0]: [float(cell) for cell in row[1:]] for row in rows[5:]}
    backends = ("onnxruntime", "torch", "torch.compile", "transformers")
    assert set(speeds) == {f"{dtype}, {name}" for dtype in ("float32", "float16") for name in backends} | {
        "int8",
        "int4",
    }
    assert all(len(times) == 4 and min(times) > 0 for times in speeds.values())
