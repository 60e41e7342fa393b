"""Mutated files and killed commands. Each test prints its seed; benchmarks/hostile.py tries far more of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

import pytest

from tests.hostile.attacks.drive import INPUTS, KILLS, Process, make_samples
from tests.hostile.attacks.kills import SCENARIOS
from tests.hostile.attacks.mutate import MUTATIONS
from tests.hostile.attacks.targets import TARGETS

QUICK = {"build": pytest.mark.slow}
"""The commands that the slow tests kill; hostile tests kill the others, too."""
Start = Callable[[str, int], Process]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts a process with a seed."""
    folder = tmp_path_factory.mktemp("hostile")
    make_samples(folder / "samples")
    started: list[Process] = []

    def begin(module: str, seed: int) -> Process:
        started.append(Process(module, folder / "samples", folder / f"{module}{seed}", seed))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def broken(process: Process, name: str, count: int) -> list[str]:
    """Return what was broken by the first inputs or kills."""
    return [f"{attempt.number}: {attempt.problem}" for attempt in process.run(name, 0, count) if attempt.problem]


@pytest.mark.slow
def test_mutated_files_are_refused_in_one_line(start: Start) -> None:
    """A few of each target, with fixed inputs."""
    process = start(INPUTS, 0)
    found = {target.name: broken(process, target.name, max(1, target.share // 1000)) for target in TARGETS}
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.hostile
def test_many_mutated_files_are_refused_in_one_line(start: Start) -> None:
    """Other inputs in every run."""
    seed = int(time.time())
    print("seed", seed)
    process = start(INPUTS, seed)
    found = {target.name: broken(process, target.name, max(10, target.share // 50)) for target in TARGETS}
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "name",
    [pytest.param(item.name, marks=QUICK.get(item.name, pytest.mark.hostile)) for item in SCENARIOS],
)
def test_killed_commands_leave_the_old_or_the_new_state(start: Start, name: str) -> None:
    seed = int(time.time())
    print("seed", seed)
    assert broken(start(KILLS, seed), name, 10) == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_seed_reproduces_a_mutation(mutation: str) -> None:
    data = b'{"a": [1, 2, {"b": "c"}], "d": null}\n[x]\ny = 1\n'
    first, again = ([MUTATIONS[mutation](random, data) for _ in range(50)] for random in (Random(3), Random(3)))
    assert first == again
    assert len(set(first)) > 25
