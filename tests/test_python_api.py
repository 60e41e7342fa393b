"""The Python API: public names, paths as text, and error messages in terms of arguments."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo as library
import zoo_export
import zoo_runtime
from zoo.errors import ArtifactError, UsageError, ZooError, argument
from zoo.exporters import export_to
from zoo_export.export import export_graphs_only
from zoo_runtime import load_session

OPTION = "--"


@pytest.mark.parametrize("module", ["zoo", "zoo_export", "zoo_runtime"])
def test_dir_lists_public_names(module: str) -> None:
    """Exactly the public names, even before lazy imports."""
    code = f"import {module}, sys; print(*dir({module})); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in listed if not name.startswith("__")] == sorted(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", [library, zoo_export, zoo_runtime, importlib.import_module("zoo.exporters")])
def test_public_functions_take_paths_as_text(module: Any) -> None:
    """Every argument that is a path accepts strings and path objects."""
    for name in module.__all__:
        item = getattr(module, name)
        parameters = inspect.signature(item).parameters.values() if inspect.isfunction(item) else ()
        for parameter in parameters:
            if "Path" in str(parameter.annotation):
                assert "str | os.PathLike[str]" in str(parameter.annotation), f"{name}({parameter})"


def test_export_takes_text(copy_of: Callable[..., Path]) -> None:
    """For a model that is already exported, so that nothing is computed."""
    export_graphs_only(copy_of("gpt-tiny"))
    with pytest.raises(UsageError, match="already exported"):
        zoo_export.export_model("gpt-tiny")
    with pytest.raises(UsageError, match="no plugin"):
        export_to("gpt-tiny", "absent")
    with pytest.raises(ArtifactError, match="no such directory"):
        zoo_export.verify_model("absent")


def test_messages_have_two_wordings() -> None:
    """One for Python, one for the command line."""
    error = UsageError("exists", "there", argument("max_new_tokens", 3, "or use {}"))
    assert str(error) == "exists: there: or use max_new_tokens=3"
    assert error.command_line == "exists: there: or use --max-new-tokens 3"
    assert argument("force", True).command_line == "--force"
    assert argument("force", 1).command_line == "--force 1"
    assert ZooError("what", None, "").command_line == "what"


def test_errors_name_arguments_or_options(copy_of: Callable[..., Path], zoo: Callable[..., Any]) -> None:
    """The same failures in Python and on the command line."""
    folder = copy_of("gpt-tiny")
    export_graphs_only(folder)
    cases: list[tuple[Callable[[], object], tuple[object, ...], str, str]] = [
        (lambda: library.save(library.load(folder), folder), ("build", "gpt-tiny"), "force=True", "--force"),
        (lambda: zoo_export.export_model(folder), ("export", folder, "--onnx"), "force=True", "--force"),
        (lambda: load_session(folder), ("run", folder, "x"), "unverified=True", "--unverified"),
    ]
    for call, command, said, option in cases:
        with pytest.raises(ZooError) as raised:
            call()
        assert said in str(raised.value)
        assert OPTION not in str(raised.value).replace(str(folder), "")
        assert option in zoo(*command).failed(raised.value.exit_code)
