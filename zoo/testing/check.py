"""Checks and their failures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zoo.errors import UsageError, nearest

__all__ = ["Check", "CheckFailure", "Inapplicable", "check_names", "fail", "find_check"]


class CheckFailure(AssertionError):  # noqa: N818  (reads better in test reports)
    """A failed check: what was expected and what happened. ``check`` is the check's name, if known."""

    def __init__(self, expected: str, happened: str, check: str | None = None) -> None:
        self.expected = expected
        self.happened = happened
        self.check = check
        text = f"expected: {expected}\nhappened: {happened}"
        super().__init__(f"{text}\nread more: {read_more(check)}" if check else text)


class Inapplicable(Exception):  # noqa: N818  (not an error)
    """A check does not apply to this model; the message says why."""


def fail(expected: str, happened: str) -> NoReturn:
    """Fail the running check."""
    raise CheckFailure(expected, happened)


def read_more(check: str) -> str:
    """Return the command that explains a check."""
    return f"zoo plugins check --explain {check}"


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement on a plugin or on each of its models."""

    function: Callable[[Any], None]
    """Raises :class:`CheckFailure` or :class:`Inapplicable`, or returns. Its docstring is the explanation."""
    of_plugin: bool = False
    """Whether the argument is a :class:`zoo.plugins.Plugin` rather than a :class:`zoo.testing.Subject`."""

    @property
    def name(self) -> str:
        """The name, such as ``batch-invariance``."""
        return self.function.__name__.replace("_", "-")

    @property
    def explanation(self) -> str:
        """What the check expects, why it matters, and how to fix a failure."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The first sentence of the explanation."""
        return " ".join(self.explanation.partition("\n\n")[0].split())

    def __call__(self, subject: Any) -> None:
        """Run the check on a :class:`zoo.testing.Subject`, or on a plugin if it is ``of_plugin``."""
        plugin = getattr(subject, "plugin", subject)
        try:
            self.function(plugin if self.of_plugin else subject)
        except CheckFailure as failure:
            raise CheckFailure(failure.expected, failure.happened, self.name) from failure.__cause__


def find_check(checks: Sequence[Check], name: str, where: object = None) -> Check:
    """Return the check of that name. An unknown name is a :class:`UsageError` that suggests the nearest."""
    check_names(checks, {name: ""}, where)
    return next(check for check in checks if check.name == name)


def check_names(checks: Sequence[Check], expected_failures: Mapping[str, str], where: object) -> None:
    """Raise :class:`UsageError` unless every key is the name of a check."""
    names = [check.name for check in checks]
    for name in expected_failures:
        if name not in names:
            raise UsageError(f"no check {name!r}", where, nearest(name, names))
