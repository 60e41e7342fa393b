"""A command whose n-th system call fails has succeeded, or has failed with one line and changed nothing."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.hostile.commands import CACHE, COMMANDS, Command, Tree, leftovers, open_models, tree
from tests.hostile.conftest import Forks, Outcome, Starts
from tests.hostile.forks import CALLS
from zoo import ZooError

TOLD = ("warning: ", "note: ", "continuing at step ", "step ")
"""Beginnings of lines that are no errors."""
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES")}
QUICK = dict.fromkeys(("build over", "relink", "tokenizer over"), pytest.mark.slow)
"""Commands of which a slow test tries a sample; hostile tests try the others, too."""


class Attack:
    """A command, what it does undisturbed, and a check of what it does with failing calls."""

    def __init__(self, forks: Forks, starts: Starts, command: Command) -> None:
        self.forks, self.starts, self.command = forks, starts, command
        starts.put(command.start, forks.root)
        self.before, self.opens_before = tree(forks.root), self._opens()
        outcome = forks.run(command.arguments, cached=command.cached)
        assert (outcome.status, leftovers(tree(forks.root))) == (0, set()), outcome.err
        self.complete, self.calls = self._content(), outcome.calls

    def _content(self) -> Tree:
        """Return the content of the folder without what the next command removes, what varies, and the cache."""
        content = tree(self.forks.root)
        without = {name for name in content if name in self.command.varying or name.split("/")[0] == CACHE}
        return {name: content[name] for name in content.keys() - leftovers(content) - without}

    def _opens(self) -> str:
        """Open every model, as a reader does. Return the error, if any."""
        try:
            open_models(self.forks.root)
        except ZooError as error:
            return str(error)
        return ""

    def run(self, call: str, number: int, error: str, *, lasting: bool = False) -> tuple[Outcome, list[str]]:
        """Run the command with failing calls. Returns the outcome and what is wrong with it."""
        forks = self.forks
        self.starts.put(self.command.start, forks.root)
        outcome = forks.run(
            self.command.arguments, call, number, ERRORS[error], lasting=lasting, cached=self.command.cached
        )
        wrong = list(_lines(outcome, call))
        found, left = self._content(), leftovers(tree(forks.root))
        problem = self._opens()
        opened = self._content()
        old, new = self._same(found, self.before), self._same(opened, self.complete)
        if outcome.status == 0:
            if not new:
                wrong.append("status 0, but incomplete")
        elif opened != found:
            wrong.append("a reader finds other files after the failure")
        elif call == "read" and new:
            pass  # what was written cannot be read again
        elif not old and not self._continues():
            wrong.append(f"status {outcome.status}, but changed")
        if problem not in ("", self.opens_before):
            wrong.append(f"a reader fails: {problem}")
        if left and not wrong:
            forks.run(self.command.next(changed=not old))
            if left := leftovers(tree(forks.root)):
                wrong.append(f"left after the next command: {min(left)}")
        where = f"{call} {number} {error}{' lasting' * lasting}: status {outcome.status}"
        return outcome, [f"{where}: {what}: {outcome.err!r}" for what in wrong]

    def _same(self, one: Tree, other: Tree) -> bool:
        return {**one, **dict.fromkeys(self.command.varying)} == {**other, **dict.fromkeys(self.command.varying)}

    def _continues(self) -> bool:
        """Whether the command that continues this one completes it."""
        continued = self.command.continued
        return bool(continued) and self.forks.run(continued).status == 0 and self._same(self._content(), self.complete)


def _lines(outcome: Outcome, call: str) -> Iterator[str]:
    """Yield what is wrong with the status and the lines on stderr."""
    lines = [line for line in outcome.err.splitlines() if not line.startswith(TOLD)]
    if outcome.status == 0:
        if any(line.startswith("error: ") for line in lines):
            yield "an error with status 0"
    elif outcome.status not in ((3, 6) if call == "read" else (6,)):
        yield "another status"
    elif len(lines) != 1 or not lines[0].startswith("error: "):
        yield "not one line"


@pytest.fixture(scope="module")
def attack(forks: Forks, starts: Starts) -> Callable[[str], Attack]:
    """Prepare an attack on a command, once."""
    return cache(lambda name: Attack(forks, starts, COMMANDS[name]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=QUICK.get(name, pytest.mark.hostile)) for name in COMMANDS])
def test_one_failing_call_of_each_kind(name: str, attack: Callable[[str], Attack], chance: random.Random) -> None:
    """A sample for a quick look; :func:`test_every_failing_call` takes hours."""
    prepared = attack(name)
    for call in CALLS:
        if count := prepared.calls[call]:
            _, wrong = prepared.run(call, chance.randint(1, count), chance.choice([*ERRORS]))
            assert not wrong


@pytest.mark.hostile
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_failing_call(
    name: str, error: str, lasting: bool, attack: Callable[[str], Attack], tried: Callable[[str, int], None]
) -> None:
    """As SQLite does: the first, second, ... call fails until a run makes fewer calls."""
    prepared, wrong, count = attack(name), [], 0
    for call in CALLS:
        number = 1
        while True:
            outcome, found = prepared.run(call, number, error, lasting=lasting)
            if outcome.calls.get(call, number) < number:
                break
            wrong, count, number = wrong + found, count + 1, number + 1
    tried(f"{name} with {error}{' lasting' * lasting}", count)
    assert not wrong, "\n".join(wrong)
