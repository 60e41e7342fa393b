"""Errors name options of the command that was called: one of another command is no help."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tests.conftest import ROOT, Result
from zoo.cli.entry import cli
from zoo.errors import UsageError, Wording, argument, name_options, task_option

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_OTHER_TOOLS = {"--nproc-per-node"}
"""Options in messages that quote a command of another program."""


@pytest.fixture
def of_command() -> Iterator[None]:
    name_options({"--force", "--provider"})
    yield
    name_options(None)


def test_messages_in_python_after_a_command_name_all_options(zoo: Callable[..., Result]) -> None:
    assert zoo("list", "--json").status == 0
    assert UsageError("exists", None, argument("force", True)).command_line == "exists: --force"


def commands(group: click.Group) -> Iterator[click.Command]:
    """Yield all commands below a group."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from commands(command)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the text for the command line in each error that a file raises, and in each wording."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            first = node.args[0]
            if node.func.id == "argument" and isinstance(first, ast.Constant):
                yield node.lineno, f"--{str(first.value).replace('_', '-')}"
            elif node.func.id == "Wording" and len(node.args) > 1:
                yield node.lineno, literal(node.args[1])
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in node.exc.args:
                if not (isinstance(part, ast.Call) and isinstance(part.func, ast.Name)):
                    yield node.lineno, literal(part)


def literal(node: ast.AST) -> str:
    """Return the constant parts of a text."""
    parts = (item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str))
    return " ".join(parts)


def test_every_option_in_a_message_exists() -> None:
    assert isinstance(cli, click.Group)
    known = {"--help", "--version"}
    for command in (cli, *commands(cli)):
        known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {flag}"
        for folder in ("zoo", "export", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in messages(path)
        for flag in FLAG.findall(text)
        if flag not in known | OF_OTHER_TOOLS
    ]
    assert unknown == []


@pytest.mark.parametrize(("wording", "expected"), [
    (argument("force", True, "use {} to replace it"), "use --force to replace it"),
    (argument("runtime", "web-wasm"), "runtime='web-wasm'"),
    (task_option("label=A", "set {}"), "set label=A"),
    (Wording("open it with unverified=True", "run it with --unverified", otherwise="verify it"), "verify it"),
    (Wording("python", "zoo export A --opset 20, or use --force"), "zoo export A --opset 20, or use --force"),
    (Wording("python", "zoo export DIR --onnx, or use --opset 20"), "python"),
])  # fmt: skip
def test_wording_follows_the_command(of_command: None, wording: Wording, expected: str) -> None:
    error = UsageError("what", wording, "remedy at STAGE")
    error.rename("STAGE", "DIR")
    assert error.command_line == f"what: {expected}: remedy at DIR"


def test_outside_commands_it_is_that_of_the_command_line() -> None:
    assert UsageError("what", argument("runtime", "web-wasm")).command_line == "what: --runtime web-wasm"


def test_commands_name_their_own_options(zoo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zoo_export.web.install import PACKAGE, find_package

    def fails(*_: object, **__: object) -> None:
        find_package("web-wasm")

    monkeypatch.setenv(PACKAGE, str(tmp_path))
    monkeypatch.setattr("zoo_export.publish.web.write_web", fails)
    published = zoo("publish", "model", "page", "--layout", "web")
    assert published.status == 2
    assert "runtime='web-wasm'" in published.err
    assert "--runtime" not in published.err
