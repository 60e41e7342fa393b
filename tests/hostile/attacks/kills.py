"""Commands killed at random times: ``python -m tests.hostile.attacks.kills SAMPLES WORK SEED``.

The process has imported zoo and forks for each command, so that thousands can be killed. It reads jobs from stdin, one
JSON object per line, and answers with a line per kill: its number, whether the command was still running, and what was
broken, if anything. After a kill, the target must be the old or the new one, complete and openable. After the last kill
of a job, the command must succeed, and nothing of the killed ones may be left.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NoReturn

from tests.hostile.attacks.samples import SMALL
from zoo.artifact.outputs import RECORD
from zoo_runtime.batch.folders import MANIFEST, is_temporary

__all__ = ["SCENARIOS", "Scenario"]

State = Mapping[str, str]
"""SHA-256 by file name."""


@dataclass(frozen=True)
class Scenario:
    """A command, and what it writes."""

    name: str
    arguments: tuple[str, ...]
    target: str
    """The directory or file that it writes."""
    before: str = ""
    """The sample that is the target before; none if empty."""
    finish: tuple[str, ...] = ()
    """The command that completes a killed one, if it is another."""


_TRAIN = ("--data", "inputs/rows.txt", "--max-steps", "4", "--set", "batch_size=2", "--set", "evaluate_every=1")
SCENARIOS = (
    Scenario("build", ("build", "gpt-tiny", "-o", "made", *SMALL), "made"),
    Scenario("build --force", ("build", "gpt-tiny", "-o", "made", "--force", *SMALL), "made", "model"),
    Scenario("import --force", ("import", "gpt-hub", "-o", "made", "--no-verify", "--force"), "made", "gpt-built"),
    Scenario("adapt", ("adapt", "model", "--set", "max_seq_len=16", "-o", "made"), "made"),
    Scenario("relink", ("relink", "made"), "made", "retrained"),
    Scenario("export --force", ("export", "made", "--onnx", "--force"), "made", "model"),
    Scenario("quantize", ("quantize", "made", "--dtype", "float16", "--force"), "made", "model"),
    Scenario("sign", ("sign", "made", "--key", "keys/signer.key", "--force"), "made", "model"),
    Scenario("publish standalone", ("publish", "model", "made", "--layout", "standalone", "--force"), "made", "alone"),
    Scenario("publish hub", ("publish", "model", "made", "--layout", "hub"), "made"),
    Scenario("train", ("train", "model", "-o", "made", *_TRAIN), "made", finish=("train", "made", "--resume")),
    Scenario("train --resume", ("train", "made", "--resume"), "made", "unfinished"),
    Scenario("run", ("run", "model", "--input", "inputs/rows.txt", "-o", "made.jsonl", "--max-new-tokens", "4"),
             "made.jsonl", finish=("--resume",)),
    Scenario("run --force", ("run", "model", "--input", "inputs/rows.txt", "-o", "made.jsonl", "--max-new-tokens", "4",
                             "--force"), "made.jsonl", "inputs/rows.jsonl"),
    Scenario("run on a folder", ("run", "model", "--input", "texts", "-o", "made", "--max-new-tokens", "4"), "made",
             finish=("--resume",)),
    Scenario("tokenizer train", ("tokenizer", "train", "inputs/rows.txt", "-o", "made.json", "--vocab-size", "270"),
             "made.json"),
    Scenario("tokenizer train --force", ("tokenizer", "train", "inputs/rows.txt", "-o", "made.json", "--vocab-size",
                                         "270", "--force"), "made.json", "model/tokenizer.json"),
)  # fmt: skip


class Killer:
    """Runs commands in a copy of the samples, and kills them."""

    def __init__(self, samples: Path, work: Path, seed: int) -> None:
        self.samples, self.seed = samples, seed
        shutil.copytree(samples, work / "files", dirs_exist_ok=True)
        os.chdir(work / "files")
        os.environ |= {"ZOO_CACHE": str(work / "cache"), "XDG_CONFIG_HOME": str(work / "user")}
        self._files = {str(path) for path in Path().rglob("*")}
        self.output = os.open(work / "output", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._known: dict[str, tuple[float, State]] = {}

    def attempt(self, scenario: Scenario, number: int) -> tuple[bool, str | None]:
        """Kill a command once. Returns whether it was running, and what was broken."""
        random = Random(f"{self.seed} {scenario.name} {number}")
        if scenario.name not in self._known:
            self._known[scenario.name] = self._complete(scenario)
        duration, new = self._known[scenario.name]
        self._reset(scenario)
        old = state(Path(scenario.target))
        # Half of the kills hit the end, in which files appear.
        moment = duration * (random.random() if random.random() < 0.5 else 1 - random.random() ** 2 / 2)
        status, seconds = self._run(scenario.arguments, moment)
        if status != -signal.SIGKILL:  # other load was gone
            self._known[scenario.name] = (min(duration, seconds), new)
        return status == -signal.SIGKILL, self._problem(scenario, old, new)

    def finish(self, scenario: Scenario) -> str | None:
        """Complete the last killed command, which removes what the killed ones have left."""
        arguments = scenario.arguments
        if scenario.finish and Path(scenario.target).exists():
            arguments = scenario.finish if len(scenario.finish) > 1 else (*arguments, *scenario.finish)
        elif not scenario.finish and not scenario.before and Path(scenario.target).exists():
            arguments = (*arguments, "--force")
        status, _ = self._run(arguments)
        if status not in (0, 3 if "--resume" in arguments else 0):  # 3: the run was complete
            return f"cannot be completed: status {status}: {self._said()}"
        left = {str(path) for path in Path().rglob("*")} - self._files
        targets = {other.target for other in SCENARIOS}
        left = {name for name in left if name not in targets and (not name.startswith("made/") or _hidden(name))}
        return f"left behind: {', '.join(sorted(left)[:3])}" if left else None

    def _complete(self, scenario: Scenario) -> tuple[float, State]:
        """Return the duration of a command that is not killed, and what it writes."""
        for _ in range(2):  # the first fills the cache
            self._reset(scenario)
            status, seconds = self._run(scenario.arguments)
            assert status == 0, (scenario.name, status, self._said())
        return seconds, state(Path(scenario.target))

    def _reset(self, scenario: Scenario) -> None:
        target = Path(scenario.target)
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        if scenario.before:
            source = self.samples / scenario.before
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)

    def _run(self, arguments: tuple[str, ...], seconds: float = math.inf) -> tuple[int, float]:
        """Run a command, and kill it after some time. Returns its status, negative for a signal, and its duration."""
        started = time.monotonic()
        process = os.fork()
        if not process:
            _command(arguments, self.output)
        while time.monotonic() < started + seconds:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status), time.monotonic() - started
            time.sleep(0.0005)
        os.kill(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), seconds

    def _problem(self, scenario: Scenario, old: State, new: State) -> str | None:
        """Return what is wrong with the target of a killed command."""
        target = Path(scenario.target)
        _recover(target)
        found = state(target)
        if found in (old, new):
            return None
        if scenario.name == "run on a folder":
            shown = [name for name in found if name != MANIFEST and not is_temporary(name)]
            wrong = [name for name in shown if found[name] != new.get(name)]
            return f"neither absent nor complete: {wrong}" if wrong else None
        if scenario.target.endswith(".jsonl"):
            lines = target.read_bytes().split(b"\n")
            complete = not scenario.before and all(json.loads(line) for line in lines[:-1])
            return None if complete else "neither the old file nor the new one"
        if scenario.name.startswith("train"):  # any checkpoint
            return _opens(target)
        if found.keys() != new.keys():
            return f"neither old nor new: {sorted(found.keys() ^ new.keys())[:5]}"
        return _opens(target) or (_is_signed(target) if scenario.name == "sign" else None)

    def _said(self) -> str:
        size = os.fstat(self.output).st_size
        return os.pread(self.output, 500, max(0, size - 500)).decode("utf-8", "replace")


def _hidden(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last.startswith(".") and last != RECORD


def _command(arguments: tuple[str, ...], output: int) -> NoReturn:
    """Run a command in this forked process, and end it."""
    status = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from zoo.cli import main

        status = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _recover(target: Path) -> None:
    """Do what each command does first with a directory."""
    from zoo import storage

    if not target.suffix:
        storage.recover(target)


def _opens(target: Path) -> str | None:
    """Return why a directory is not complete."""
    from zoo.artifact import ModelDirectory
    from zoo.errors import ZooError

    record = target / RECORD
    if record.exists():
        files = json.loads(record.read_bytes())["files"]
        found = state(target)
        wrong = [name for name, entry in files.items() if found.get(name) != entry["sha256"]]
        return f"differs from its record: {wrong[:3]}" if wrong else None
    try:
        stored = ModelDirectory.open(target, rehash=True)
        _ = stored.spec, stored.layout
    except ZooError as error:
        return f"does not open: {error}"
    return None


def _is_signed(target: Path) -> str | None:
    """Return why a directory is not signed. Each signature is another."""
    from zoo.artifact.signature import check_signature
    from zoo.errors import ZooError

    try:
        check_signature(target, Path("keys/signer.pub"))
    except ZooError as error:
        return f"is not signed: {error}"
    return None


def state(path: Path) -> State:
    """Return the digest of each file of a directory, or of one file. Stages, which nothing reads, are left out."""
    if path.is_file():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    files = (file for file in path.rglob("*") if file.is_file() and ".zoo-stage-" not in str(file))
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    """Answer jobs until stdin ends."""
    samples, work, seed = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3])
    ctypes.CDLL(None).prctl(1, 9)  # ends with its parent
    import tests.hostile.attacks.readers  # noqa: F401
    import zoo_export.cli.export
    import zoo_export.cli.quantize  # noqa: F401

    killer, scenarios = Killer(samples, work, seed), {scenario.name: scenario for scenario in SCENARIOS}
    channel: Callable[[object], None] = lambda value: print(json.dumps(value), flush=True)  # noqa: E731
    channel("ready")
    for line in sys.stdin:
        job = json.loads(line)
        scenario, end = scenarios[job["target"]], job["first"] + job["count"]
        for number in range(job["first"], end):
            running, problem = killer.attempt(scenario, number)
            if number == end - 1:
                problem = problem or killer.finish(scenario)
            channel([number, int(running), problem])


if __name__ == "__main__":
    main()
