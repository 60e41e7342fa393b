"""Only commands print. Library functions return, raise or warn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}


def sources() -> Iterator[Path]:
    for folder in ("zoo", "export", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent.name != "cli":
                yield path


def is_stream(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in STREAMS


def prints(call: ast.Call) -> bool:
    """Yield calls of print without a file, of click.echo and of zoo.cli.output, and of write on standard streams."""
    match call.func:
        case ast.Name(id="print"):
            files = [keyword.value for keyword in call.keywords if keyword.arg == "file"]
            return not files or is_stream(files[0])
        case ast.Attribute(attr="echo" | "secho") | ast.Name(id="echo" | "message"):
            return True
        case ast.Attribute(attr="write", value=stream):
            return is_stream(stream)
    return False


@pytest.mark.slow
def test_no_library_call_prints() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    assert len(trees) > 100
    calls = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [f"{path.relative_to(ROOT)}:{call.lineno}" for path, call in calls if prints(call)] == []
