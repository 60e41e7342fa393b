"""Throughput of a batch by engine, as a table: rows per second, processor seconds and the memory of workers.

    python benchmarks/engines.py MODEL [--shards 24] [--rows 40] [--words 30]

MODEL is an exported model that reads texts. Inputs are random words. Each run writes all files of results, whose bytes
are compared with those of the first run. The rate counts the rows after the first results, so that it leaves out the
start of workers and of Ray; the seconds are those of the whole command. Memory is the proportional share (PSS) of all
workers.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from zoo import system

CORES = system.usable_cores()


def write_inputs(folder: Path, shards: int, rows: int, words: int) -> None:
    """Write files of texts of 1 to twice ``words`` random words."""
    chance = random.Random(0)
    known = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(5000)]
    folder.mkdir()
    for shard in range(shards):
        texts = [" ".join(chance.choices(known, k=chance.randint(1, 2 * words))) for _ in range(rows)]
        (folder / f"{shard:03}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def share(run: psutil.Popen, seen: dict[int, float]) -> float:
    """Return the memory of the workers of a run in MB, and record the processor seconds of each process."""
    memory = 0.0
    for child in run.children(recursive=True):
        try:
            seen[child.pid] = sum(child.cpu_times()[:2])
            if "batch.worker" in " ".join(child.cmdline()) or "_Actor" in " ".join(child.cmdline()):
                memory += child.memory_full_info().pss / 1e6
        except psutil.Error:
            continue
    return memory


def measure(
    model: Path, inputs: Path, output: Path, options: list[str], rows: int
) -> tuple[float, float, float, float]:
    """Return rows per second after the start, and the command's seconds, processor seconds and memory of workers."""
    started, peak, seen = time.time(), 0.0, dict[int, float]()
    command = [
        sys.executable,
        "-m",
        "zoo",
        "run",
        str(model),
        "--input",
        str(inputs),
        "--output",
        str(output),
        *options,
    ]
    run = psutil.Popen(command, stderr=subprocess.PIPE, text=True)
    while run.poll() is None:
        seen[run.pid] = sum(run.cpu_times()[:2])
        peak = max(peak, share(run, seen))
        time.sleep(0.5)
    if run.returncode:
        raise SystemExit(run.stderr.read())
    seconds = time.time() - started
    times = sorted(path.stat().st_mtime for path in output.glob("*.jsonl"))
    return (len(times) - 1) * rows / (times[-1] - times[0]), seconds, sum(seen.values()), peak


def main() -> None:
    """Measure every engine on the same inputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--words", type=int, default=30)
    given = parser.parse_args()
    runs = {
        f"local, 1 worker of {CORES} threads": ["--workers", "1", "--threads", str(CORES)],
        "local, 1 worker": ["--workers", "1"],
        f"local, {CORES} workers": [],
        f"local, {CORES} workers, mapped": ["--memory", "mapped"],
        "ray": ["--engine", "ray"],
    }
    print(
        "| engine | rows/s | seconds | processor seconds | memory of workers, MB |\n| --- | ---: | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory() as place:
        inputs, expected = Path(place) / "inputs", None
        write_inputs(inputs, given.shards, given.rows, given.words)
        for number, (name, options) in enumerate(runs.items()):
            output = Path(place) / f"output{number}"
            rate, seconds, used, memory = measure(given.model, inputs, output, options, given.rows)
            found = {path.name: path.read_bytes() for path in output.glob("*.jsonl")}
            expected = expected or found
            same = "" if found == expected else " (other bytes)"
            print(f"| {name}{same} | {rate:.1f} | {seconds:.1f} | {used:.1f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
