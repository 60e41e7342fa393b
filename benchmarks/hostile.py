"""Attacks on zoo: mutated files, and commands that are killed: `python benchmarks/hostile.py --seconds 1800`.

Prints how many files of each kind were tried and refused, how many commands were killed before they ended, and how many
attempts held or broke a law of worker.py or kills.py in tests/hostile/attacks. Each file that broke one is saved to a
folder, with the command that tries it again:

    python benchmarks/hostile.py --seed SEED --only "KIND: FILE" --number NUMBER
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hostile.attacks.drive import INPUTS, KILLS, Attempt, Process, make_samples
from tests.hostile.attacks.kills import SCENARIOS
from tests.hostile.attacks.targets import TARGETS, Target

_COMPLETE = 1800.0
"""Seconds for which the shares of targets and kills are meant."""
_KILLS = {"quantize": 20, "export --force": 40, "publish hub": 40, "train": 60, "train --resume": 60,
          "run on a folder": 100, "publish standalone": 200}  # fmt: skip
_OTHER_KILLS = 300
"""Kills of each scenario."""
_TARGETS = {target.name: target for target in TARGETS}
_MEMORY = "/dev/shm"
"""A file system in memory: on a disk, writing the files takes most of the time."""
_CHUNK = 50
_SHOWN = 5


def shares(only: str) -> dict[tuple[str, str], int]:
    """Return the number of inputs of each target, and of kills of each scenario, by module and name."""
    found = {(INPUTS, target.name): target.share for target in TARGETS}
    found |= {(KILLS, scenario.name): _KILLS.get(scenario.name, _OTHER_KILLS) for scenario in SCENARIOS}
    return {key: share for key, share in found.items() if only in key[1]}


def jobs(counts: dict[tuple[str, str], int], rounds: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield module, name, first number and count of each job. Every round has a part of each target."""
    for part in range(rounds):
        for (module, name), count in counts.items():
            first, end = count * part // rounds, count * (part + 1) // rounds
            for start in range(first, end, _CHUNK):
                yield module, name, start, min(_CHUNK, end - start)


class Run:
    """Attacks by several processes at a time."""

    def __init__(self, folder: Path, seed: int, found: Path, deadline: float) -> None:
        self.folder, self.seed, self.found, self.deadline = folder, seed, found, deadline
        self.tried: Counter[tuple[str, str]] = Counter()
        self.effective: Counter[tuple[str, str]] = Counter()
        self.broken: dict[tuple[str, str], list[Attempt]] = {}
        self._lock = threading.Lock()

    def work(self, number: int, waiting: Iterator[tuple[str, str, int, int]]) -> None:
        """Take jobs until none are left or the time is over."""
        processes = {
            module: Process(module, self.folder / "samples", self.folder / f"{module}{number}", self.seed)
            for module in (INPUTS, KILLS)
        }
        while time.monotonic() < self.deadline:
            with self._lock:
                job = next(waiting, None)
            if job is None:
                break
            module, name, first, count = job
            for attempt in processes[module].run(name, first, count):
                with self._lock:
                    self.tried[module, name] += 1
                    self.effective[module, name] += bool(attempt.status)
                if attempt.problem is not None:
                    self._report(module, name, attempt)
                if time.monotonic() > self.deadline + 60:
                    break
        for process in processes.values():
            process.close()

    def _report(self, module: str, name: str, attempt: Attempt) -> None:
        with self._lock:
            broken = self.broken.setdefault((module, name), [])
            broken.append(attempt)
            if len(broken) <= _SHOWN:
                print(f"{name}, number {attempt.number}: {ascii(attempt.problem)[:600]}", file=sys.stderr, flush=True)
        if module == INPUTS:
            self._save(_TARGETS[name], attempt.number)

    def _save(self, target: Target, number: int) -> None:
        """Write an input to a folder, with the command that tries it again."""
        folder = self.found / re.sub("[/: ]+", "-", f"{target.name} {number}")
        folder.mkdir(parents=True, exist_ok=True)
        file = Path(target.file)
        (folder / file.name).write_bytes(target.input(self.seed, number, (self.folder / "samples" / file).read_bytes()))
        command = f"python benchmarks/hostile.py --seed {self.seed} --only {target.name!r} --number {number}"
        (folder / "command.txt").write_text(f"{command}\n")

    def table(self) -> str:
        """Return the table of kinds."""
        kinds: dict[str, Counter[str]] = {}
        for (module, name), tried in self.tried.items():
            kind, total = (name.partition(": ")[0], "all files") if module == INPUTS else (f"zoo {name}", "all kills")
            broken = len(self.broken.get((module, name), ()))
            row = {"tried": tried, "effective": self.effective[module, name], "broken": broken}
            for key in (kind, total):
                kinds.setdefault(key, Counter()).update(row)
        names = [name for name in kinds if not name.startswith("all ")]
        names += sorted(kinds.keys() - set(names))
        lines = ["| attack | tried | refused or killed | held | broken |", "| :--- | ---: | ---: | ---: | ---: |"]
        for name in names:
            row = kinds[name]
            cells = row["tried"], row["effective"], row["tried"] - row["broken"], row["broken"]
            lines.append(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |")
        return "\n".join(lines)


def main() -> int:
    """Attack, and print the table. Returns whether anything broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=_COMPLETE, help="time for all attacks")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of all inputs and moments")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--number", type=int, help="try this input or kill alone")
    parser.add_argument("--found", type=Path, default=Path("hostile-found"), help="folder for inputs that break a law")
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as name:
        folder = Path(name)
        make_samples(folder / "samples")
        counts = shares(given.only)
        scale = max(1.0, given.seconds / _COMPLETE)
        if given.number is None:
            waiting = jobs({key: round(count * scale) for key, count in counts.items()}, rounds=20)
        else:
            waiting = iter([(module, target, given.number, 1) for module, target in counts])
        run = Run(folder, given.seed, given.found.resolve(), time.monotonic() + given.seconds)
        threads = [threading.Thread(target=run.work, args=(number, waiting)) for number in range(given.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(run.table())
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
