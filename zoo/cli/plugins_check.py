"""``zoo plugins check``: run the conformance kit on an installed plugin, each check in its own process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from zoo import plugins
from zoo.cli.completion import complete_plugins, complete_presets
from zoo.cli.options import DocumentedCommand, json_option
from zoo.cli.output import VERDICTS, echo
from zoo.cli.progress import is_shown
from zoo.cli.report import columns, emit_json
from zoo.errors import PluginError, UsageError, nearest
from zoo.plugins import Plugin, isolation
from zoo.plugins.plain import read_plain
from zoo.terminal import one_line

if TYPE_CHECKING:
    from zoo.testing import Check, Result

__all__ = ["check_plugin"]

_JOBS = "zoo.testing.running"
_LOAD = "load"
_EXCEPTION = re.compile(
    r"\b\w+(?:Error|Exception): (?P<message>[^;]{8,}?)(?:;.*)?(?: \([\w./-]+:\d+, in [^()]*\))?$", re.DOTALL
)
"""An exception in what happened, with the remedy and the place that follow some of them."""


@dataclass(frozen=True)
class _CheckRow:
    """The result of one check of a model or of the plugin."""

    plugin: Plugin
    model: str | None
    result: Result
    output: str = ""

    @property
    def title(self) -> str:
        return self.model or self.plugin.name

    def to_dict(self) -> dict[str, Any]:
        result = self.result
        return {
            "plugin": self.plugin.name,
            "distribution": self.plugin.distribution,
            "version": self.plugin.version,
            "model": self.model,
            "check": result.check,
            "status": result.status,
            "seconds": round(result.seconds, 3),
            "expected": result.expected or None,
            "happened": result.happened or None,
            "reason": result.reason or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckedModel:
    """A model to check."""

    name: str
    model: str
    """The name in results."""
    expected_failures: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Described:
    """What there is to check."""

    reason: str | None
    """Why the plugin did not load, or None."""
    models: tuple[_CheckedModel, ...] = ()
    expected_failures: Mapping[str, str] = field(default_factory=dict)


@click.command(
    "check",
    cls=DocumentedCommand,
    examples=(
        "zoo plugins check gpt",
        "zoo plugins check --explain padding-invariance",
    ),
    page="reference/checks.md",
)
@click.argument("name", shell_complete=complete_plugins, required=False)
@click.option(
    "--model",
    "models",
    shell_complete=complete_presets,
    metavar="PRESET",
    multiple=True,
    help="Check this preset instead of the smallest.",
)
@click.option("--explain", metavar="CHECK", help="Explain what a check expects, why, and how to fix a failure.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Time limit per check.",
)
@json_option
@click.pass_context
def check_plugin(
    ctx: click.Context, name: str | None, models: tuple[str, ...], explain: str | None, timeout: float, as_json: bool
) -> None:
    """Run the conformance checks on a plugin, model by model. NAME is a plugin or a distribution.

    Each check runs in its own process, so a check that hangs or crashes fails without affecting the others.
    """
    if explain is not None:
        _explain(explain, as_json)
        return
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")  # once, not in every check
    if name is None:
        raise UsageError("no plugin given", None, "write zoo plugins check NAME")
    rows = []
    for plugin in _find(name):
        with _progress() as show:
            for row in _check(plugin, models, timeout):
                show(f"{row.title} {row.result.check}")
                rows.append(row)
    failed = [row for row in rows if row.result.status == "failed"]
    if as_json:
        emit_json("plugins.check", {"name": name, "passed": not failed, "results": [row.to_dict() for row in rows]})
    else:
        _print(rows)
    if ctx.find_root().params["debug"]:
        for row in failed:
            echo(f"{row.title} {row.result.check}\n{row.result.traceback}{row.output}", err=True)
    if failed:
        listed = ", ".join(dict.fromkeys(row.result.check for row in failed))
        raise PluginError(f"{failed[0].plugin} fails {len(failed)} of {len(rows)} checks ({listed})")


def _explain(name: str, as_json: bool) -> None:
    from zoo.testing import all_checks, find_check

    check = find_check(all_checks(), name, "--explain")
    if as_json:
        emit_json("plugins.check.explain", {"check": check.name, "explanation": check.explanation})
    else:
        echo(f"{check.name}\n\n{check.explanation}")


def _find(name: str) -> list[Plugin]:
    """Return the plugins of that name or distribution without importing them."""
    discovered = list(plugins.discover())
    matches = [plugin for plugin in discovered if name in (plugin.name, plugin.distribution)]
    if not matches:
        names = {text for plugin in discovered for text in (plugin.name, plugin.distribution)}
        raise UsageError(f"no plugin {name!r}", None, nearest(name, names))
    return matches


def _check(plugin: Plugin, models: tuple[str, ...], seconds: float) -> Iterator[_CheckRow]:
    """List the models and checks in a subprocess, then run the checks."""
    from zoo.testing import Result, all_checks

    about = {"plugin": plugin.name, "key": plugin.key}
    request = {**about, "models": list(dict.fromkeys(models))}
    (loaded,) = isolation.run(
        f"{_JOBS}:describe_job",
        {_LOAD: request},
        seconds=seconds,
        parse=lambda data: read_plain(_Described, data, "the description"),
    )
    reason = loaded.failure if loaded.failure is not None else loaded.value.reason
    if reason is not None:
        result = Result(
            check=_LOAD, status="failed", seconds=loaded.seconds, expected="the plugin loads", happened=reason
        )
        yield _CheckRow(plugin, None, result, loaded.output)
        return
    yield _CheckRow(plugin, None, Result(check=_LOAD, status="passed", seconds=loaded.seconds))
    asked: dict[str, tuple[Check, str | None, str | None]] = {}
    jobs = {}
    for model in (None, *loaded.value.models):
        expected = (model or loaded.value).expected_failures
        for check in all_checks():
            if check.of_plugin is (model is None):
                title = model.model if model else None
                job = f"{title or plugin.name} {check.name}"
                asked[job] = check, title, expected.get(check.name)
                jobs[job] = {
                    **about,
                    "check": check.name,
                    "model": model and model.name,
                    "expected_failure": expected.get(check.name),
                }
    for outcome in isolation.run(
        f"{_JOBS}:check_job", jobs, seconds=seconds, parse=lambda data: read_plain(Result, data, "the result")
    ):
        check, title, expected_failure = asked[outcome.job]
        if outcome.failure is None:
            result = outcome.value
        else:
            result = Result(
                check=check.name,
                status="failed" if expected_failure is None else "expected failure",
                seconds=outcome.seconds,
                expected=check.summary,
                happened=outcome.failure,
                reason=expected_failure or "",
            )
        yield _CheckRow(plugin, title, result, outcome.output)


def _print(rows: list[_CheckRow]) -> None:
    """Print a table of results, then the failures."""
    columns(
        [
            ("MODEL", "CHECK", "STATUS", "SECONDS", "WHY"),
            *(
                (row.title, row.result.check, row.result.status, f"{row.result.seconds:.1f}", row.result.reason)
                for row in rows
            ),
        ],
        right=[3],
        verdicts=VERDICTS,
    )
    failed = [row for row in rows if row.result.status == "failed"]
    while failed:
        first = failed[0]
        same = [row for row in failed if _has_cause_of(first, row)]
        failed = [row for row in failed if row not in same]
        echo("\n" + one_line(f"{first.title} {first.result.check}"))
        echo(f"  expected: {one_line(first.result.expected)}")
        echo(f"  happened: {one_line(first.result.happened)}")
        if len(same) > 1:
            echo(f"  the same in: {', '.join(row.result.check for row in same[1:])}")
        if first.result.check != _LOAD:
            echo(f"  read more: zoo plugins check --explain {first.result.check}")


def _has_cause_of(first: _CheckRow, other: _CheckRow) -> bool:
    """Return whether two failures are one, or the message of the exception in the first occurs in the other."""
    if first is other:
        return True
    raised = _EXCEPTION.search(first.result.happened)
    return first.title == other.title and raised is not None and raised["message"] in other.result.happened


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that shows the latest check on stderr; no-op unless stderr is a terminal."""
    if not is_shown():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("loading") as status:
        yield lambda text: status.update(Text(f"checked {one_line(text)}"))
