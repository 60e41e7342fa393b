"""Memory of an export and its comparison, relative to the weights and to the outputs of the longest input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import re, sys
from pathlib import Path
from zoo.cli.entry import main

status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""
SMALL = {"num_layers": 2, "num_heads": 2, "hidden_size": 64, "vocab_size": 1000, "max_seq_len": 32}
WEIGHTS = {"num_layers": 10, "num_heads": 8, "hidden_size": 512, "vocab_size": 8000}
OUTPUTS = {"vocab_size": 50_000, "max_seq_len": 512}


def run(*command: str) -> int:
    """Run a command of zoo in a process of its own, and return its peak of resident memory, in bytes."""
    environment = {**os.environ, "ZOO_CACHE": "off", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]) * 1024


def peak(name: str, **settings: int) -> int:
    """Build and export a model with these settings. Returns the peak of the export."""
    chosen = [f"--set={key}={value}" for key, value in (SMALL | settings).items()]
    run("build", "gpt-tiny", "-o", name, *chosen)
    return run("export", name, "--onnx")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_peak_of_a_comparison() -> None:
    """Weights are mapped once, repacked once, and a part is read by the optimised session.

    Each output of a long input takes 8 bytes in float64, 4 in a graph or in PyTorch, and others in single operators.
    """
    base = peak("small")
    weights = (peak("weights", **WEIGHTS) - base) / Path("weights/model.safetensors").stat().st_size
    longest = peak("outputs", **OUTPUTS) - base
    points = json.loads(Path("outputs/parity.json").read_text())["grid"]["points"]
    outputs = longest / max(point["batch"] * point["length"] for point in points) / OUTPUTS["vocab_size"]
    assert weights < 3
    assert outputs < 24  # as zoo_export.parity.memory reserves
