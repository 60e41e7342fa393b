"""Costs that must not grow, as ratios of two measurements on the same machine; run by CI.

    python benchmarks/guard.py

Prints one row per cost, and exits with 1 if one is above its limit. Each process may allocate a few gigabytes: one that
needs more fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial

from zoo.system import limit_memory

LARGEST_PROCESS = 3 * 10**9
"""Bytes that a measured process may allocate."""
GRAPH = ["-c", "from zoo.cli import run; run()", "export", "--onnx", "--graph-only", "-o", "graph"]
HUGE = ["gpt3-175b", "--set", "num_layers=2", "--set", "hidden_size=1228800", "--set", "num_heads=9600"]
"""A model whose keys and values take 7 GB in a layer at the sizes of a trace, and whose weights take 150 TB."""


def peak(*arguments: str) -> float:
    """Return the peak resident MB of a Python process in an empty folder, without zoo's cache."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "ZOO_CACHE": "off"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=partial(limit_memory, LARGEST_PROCESS),
        )
        assert child.stderr is not None
        errors = child.stderr.read()
        _, child.returncode, usage = os.wait4(child.pid, 0)
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed: {errors.decode()[-2000:]}")
    return usage.ru_maxrss / 1024


def main() -> None:
    """Measure and print all costs."""
    small, huge = peak(*GRAPH, "gpt-tiny"), peak(*GRAPH, *HUGE)
    rows = [("memory of the graph of a huge model, over that of a tiny one", huge / small, 1.2)]
    print("| cost | ratio | limit |\n| --- | ---: | ---: |")
    for what, ratio, limit in rows:
        print(f"| {what} | {ratio:.2f} | {limit} |")
    if any(ratio > limit for _, ratio, limit in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
