"""Costs that must not grow: processor seconds and peak memory of ten everyday steps; run by CI.

    python benchmarks/guard.py             # compare with benchmarks/guard.toml
    python benchmarks/guard.py --record    # measure on an idle machine, and write guard.toml and docs/benchmarks.md

Exits with 1 if a step costs more than 15 % above the table. What is above is measured again, and the least counts:
other processes can only add to a measurement. A second export, a run and a server use a model and a cache that are made
before; other exports start with an empty cache.

Machines differ in speed, and the speed of one varies with its other work. So seconds are multiples of those of a
calibration, a process that imports PyTorch, which is timed before and after each measurement. Short steps spend their
time on imports themselves. Memory and sizes are compared as they are. Everything runs on one core, chosen at random
before each measurement: threads that wait for each other take more processor time the more of them there are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from zoo.system import limit_memory

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "guard.toml"
PAGE = ROOT / "docs" / "benchmarks.md"
MARKERS = ("<!-- guard.toml -->\n", "<!-- end of guard.toml -->\n")
MARGIN = 1.15
ATTEMPTS = 8
"""Measurements of a step until one is within its limit."""
PAUSE = 5.0
"""Seconds between the rounds of measurements, in which other work on the machine may end."""
RECORDED = 3
"""Measurements of each step for the table."""
LARGEST_PROCESS = 6 * 10**9
"""Bytes that a measured process may allocate: one that needs more fails, instead of the machine."""
TINY = ("gpt-tiny", "--set", "max_seq_len=32")
ZOO = ("-m", "zoo")
CALIBRATION = ("-c", "import torch")


@dataclass(frozen=True)
class Cost:
    """Processor time and memory of a step; 0 where it has no limit."""

    seconds: float = 0.0
    """Processor seconds of all its processes, in a measurement; in the table, multiples of the calibration."""
    megabytes: float = 0.0
    """Peak resident memory of its largest process, or the size of what is installed."""

    def least(self, other: Cost) -> Cost:
        return Cost(min(self.seconds, other.seconds), min(self.megabytes, other.megabytes))

    def relative(self, calibration: float) -> Cost:
        """Return the cost with its seconds as multiples of the calibration."""
        return Cost(self.seconds / calibration, self.megabytes)

    def exceeds(self, limit: Cost) -> bool:
        """Return whether it is above the limit by more than the margin."""
        return self.seconds > MARGIN * limit.seconds or self.megabytes > MARGIN * limit.megabytes


def start(command: Sequence[str], folder: Path, cache: Path) -> subprocess.Popen[bytes]:
    """Start Python on the cores of this process, with one thread of PyTorch and without the user's presets."""
    variables = {"ZOO_CACHE": str(cache), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "XDG_CONFIG_HOME": str(folder / "user"), **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=partial(limit_memory, LARGEST_PROCESS),
    )


def run(command: Sequence[str], folder: Path, cache: Path) -> Cost:
    """Run Python with this command to its end."""
    process = start(command, folder, cache)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {errors.decode()[-2000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def calibrate(folder: Path) -> float:
    """Return the processor seconds of the calibration."""
    return run(CALIBRATION, folder, folder).seconds


def warm(*step: str) -> Callable[[Path], Cost]:
    """Return a function that measures a command beside the prepared model, with its cache."""
    return lambda folder: run((*ZOO, *step), folder, folder / "cache")


def cold(*step: str) -> Callable[[Path], Cost]:
    """Return a function that measures a command with an empty cache."""

    def measure(folder: Path) -> Cost:
        with tempfile.TemporaryDirectory() as cache:
            return run((*ZOO, *step), folder, Path(cache))

    return measure


def prepare(folder: Path) -> None:
    """Make the model of some steps, with its graph, and compile all modules."""
    warm("build", *TINY, "-o", "model")(folder)
    warm("export", "model", "--onnx", "--graph-only")(folder)
    warm("list")(folder)


def first_token(folder: Path) -> Cost:
    """Return the cost of a server up to the first token that it sends."""
    command = (*ZOO, "serve", "model", "--unverified", "--port", "0", "--threads", "1")
    with start(command, folder, folder / "cache") as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr if line.startswith(b"{"))
            url = next(line["url"] for line in lines if line["event"] == "listening")
            body = json.dumps({"prompt": "time", "max_tokens": 4, "stream": True}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                assert answer.readline().startswith(b"data: ")
                server = psutil.Process(process.pid)
                return Cost(sum(server.cpu_times()[:4]), server.memory_info().rss / 2**20)
        finally:
            process.kill()


def installed(_: Path) -> Cost:
    """Return the size of the files that are installed, without dependencies."""
    folders = [ROOT / name for name in ("zoo", "export", "plugins")]
    files = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return Cost(megabytes=sum(path.stat().st_size for path in files if path.is_file()) / 2**20)


GRAPH = ("--onnx", "--graph-only", "--force", "-o", "graph")
FIGURES: Mapping[str, Callable[[Path], Cost]] = {
    "start-up": warm("--help"),
    "list": warm("list"),
    "graph of gpt-small": cold("export", "gpt-small", *GRAPH),
    "graph of gpt-xl": cold("export", "gpt-xl", *GRAPH),
    "graph of gpt3-175b": cold("export", "gpt3-175b", *GRAPH),
    "second export": warm("export", *TINY, *GRAPH),
    "complete export": cold("export", "model", "--onnx", "--force"),
    "run": warm("run", "model", "time", "--unverified", "--max-new-tokens", "20"),
    "first token of serve": first_token,
    "install size": installed,
}
"""The steps that are measured."""


def measure(names: Sequence[str], limits: Mapping[str, Cost], repeats: int) -> dict[str, Cost]:
    """Return the cost of each step; one above its limit, or without one, is measured repeatedly."""
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for repeat in range(repeats):
            again = [
                name for name in names if name not in costs or name not in limits or costs[name].exceeds(limits[name])
            ]
            if again and repeat:
                time.sleep(PAUSE)
            for name in again:
                with one_core():
                    before = calibrate(folder)
                    cost = FIGURES[name](folder).relative(min(before, calibrate(folder)))
                costs[name] = cost.least(costs[name]) if name in costs else cost
    return costs


@contextmanager
def one_core() -> Iterator[None]:
    """Let this process and those that it starts run on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(cores))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def read_table() -> dict[str, Cost]:
    """Return the recorded costs, none before the first record."""
    if not TABLE.exists():
        return {}
    return {name: Cost(**row) for name, row in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


def rows(costs: Mapping[str, Cost]) -> str:
    """Return a table in Markdown."""
    lines = ["| step | multiples of the calibration | MB |", "| --- | ---: | ---: |"]
    for name, cost in costs.items():
        lines.append(f"| {name} | {f'{cost.seconds:.3g}' if cost.seconds else ''} | {cost.megabytes:.1f} |")
    return "\n".join(lines) + "\n"


def write_table(costs: Mapping[str, Cost]) -> None:
    """Write the table, and quote it in the documentation."""
    lines = ["# Written by python benchmarks/guard.py --record"]
    for name, cost in costs.items():
        lines.append(f'["{name}"]\nseconds = {float(f"{cost.seconds:.3g}")}\nmegabytes = {cost.megabytes:.1f}\n')
    TABLE.write_text("\n".join(lines), encoding="utf-8")
    begin, end = map(re.escape, MARKERS)
    quoted = MARKERS[0] + "\n" + rows(read_table()) + "\n" + MARKERS[1]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{begin}.*{end}", lambda _: quoted, text, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the table instead of comparing with it")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"by default all: {', '.join(FIGURES)}")
    arguments = parser.parse_args()
    table = read_table()
    names = arguments.steps or list(FIGURES)
    costs = measure(names, {}, RECORDED) if arguments.record else measure(names, table, ATTEMPTS)
    print(rows(costs), end="")
    if arguments.record:
        write_table({name: cost for name, cost in {**table, **costs}.items() if name in FIGURES})
        return
    above = [name for name in names if name not in table or costs[name].exceeds(table[name])]
    for name in above:
        limit = f"{rows({name: table[name]}).splitlines()[-1]}" if name in table else "absent"
        print(f"error: {name} costs more than 15 % above the table: {limit}", file=sys.stderr)
    if above:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
