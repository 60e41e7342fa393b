"""Time and peak memory of building, exporting and verifying a model, as a table. Each step is a separate process.

    python benchmarks/main_job.py [--model gpt-small] [--repeat 3]

The table includes the start-up of a bare interpreter and of `import torch` for comparison.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(command: list[str], folder: Path) -> tuple[float, float]:
    """Return wall-clock seconds and peak resident MB of one process."""
    started = time.perf_counter()
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)  # usage of this child only
    child.returncode = status
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    """Run every step in a temporary directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of fast steps; the best is reported")
    options = parser.parse_args()
    name, zoo = options.model, [str(Path(sys.executable).with_name("zoo"))]
    steps: list[tuple[str, list[str], int]] = [
        ("python -c pass", [sys.executable, "-c", "pass"], options.repeat),
        ("import torch", [sys.executable, "-c", "import torch"], options.repeat),
        ("zoo --help", [*zoo, "--help"], options.repeat),
        ("zoo list", [*zoo, "list"], options.repeat),
        ("zoo show gpt3-175b", [*zoo, "show", "gpt3-175b"], options.repeat),
        (f"zoo build {name}", [*zoo, "build", name, "--force"], 1),
        (f"export {name}, graph only", [*zoo, "export", name, "--onnx", "--graph-only", "--force"], 1),
        (f"zoo export {name} --onnx", [*zoo, "export", name, "--onnx", "--force"], 1),
        (f"zoo verify {name}", [*zoo, "verify", name], 1),
    ]
    print("| step | seconds | peak MB |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for label, command, repeat in steps:
            seconds, peak = min(measure(command, Path(folder)) for _ in range(repeat))
            print(f"| {label} | {seconds:.2f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
