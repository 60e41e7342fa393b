"""Running a model uses no network and writes nothing outside zoo's folders."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

OWNER = ROOT / "export/zoo_runtime/onnx_runtime/ort.py"
"""The only module that may import onnxruntime."""
SOURCES = [path for folder in ("zoo", "export", "plugins") for path in sorted((ROOT / folder).rglob("*.py"))]

RUN = """
import os, re, socket, sys
events = []
def record(event, arguments):
    if event.startswith("socket.") and not (event == "socket.__new__" and arguments[1] == socket.AF_UNIX):
        events.append(event)
sys.addaudithook(record)
from zoo.cli import main
assert main(sys.argv[1:]) == 0
with open("/proc/self/net/unix") as file:
    local = {f"socket:[{line.split()[6]}]" for line in file}
sockets = [link for fd in os.listdir("/proc/self/fd") if os.path.islink(path := f"/proc/self/fd/{fd}")
           and (link := os.readlink(path)).startswith("socket:") and link not in local]
sys.exit(f"{events} {sockets}" if events or sockets else os.environ["ORT_DISABLE_TELEMETRY"] != "1")
"""
"""Runs the command, and fails if Python opened a socket to other machines or a library left one open."""


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a module imports anywhere, including through importlib.import_module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
            case ast.Call(
                func=ast.Attribute(attr="import_module" | "__import__") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                names.add(module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
def test_one_module_imports_onnxruntime() -> None:
    assert len(SOURCES) > 100
    assert [path for path in SOURCES if "onnxruntime" in imported(path)] == [OWNER]


def test_user_setting_takes_precedence() -> None:
    code = "import os, zoo_runtime.onnx_runtime.ort; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_run_uses_no_network_and_leaves_no_files(exported_model: Callable[..., Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(home)}
    environment |= {"ZOO_CACHE": str(tmp_path / "zoo"), "PYTHONDONTWRITEBYTECODE": "1"}
    model = exported_model("bert-tiny", "task=text-classification")
    done = subprocess.run([sys.executable, "-c", RUN, "run", str(model), "hello"], env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(home.rglob("*")) == []
