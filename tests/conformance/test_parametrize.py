"""The conformance kit in a plugin's own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conformance.plugin import EDITS, expecting, install_edited
from zoo import PluginError, UsageError
from zoo.testing import all_checks, parametrize_with_checks, run_checks

TESTS = """
from zoo.testing import parametrize_with_checks

@parametrize_with_checks({names}, expected_failures={expected})
def test_conformance(check):
    check()
"""
COLLECTED = """
import sys

def pytest_collection_finish(session):
    print("heavy:", sorted({"torch", "onnx", "onnxruntime"} & set(sys.modules)))
"""


def run_pytest(folder: Path, names: list[str], expected: Mapping[str, str], *options: str) -> tuple[int, list[str]]:
    """Run conformance tests on these names in a subprocess; return the exit status and the output lines."""
    (folder / "test_it.py").write_text(TESTS.format(names=names, expected=expected))
    (folder / "conftest.py").write_text(COLLECTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-s", *options, "test_it.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_each_check_is_a_test_and_collecting_them_builds_nothing(install, tmp_path: Path) -> None:
    name = install_edited(install, "zoo-acme")
    status, lines = run_pytest(tmp_path, [name, "bert-tiny"], {}, "--collect-only", "-q")
    assert status == 0
    ids = [line.partition("::")[2] for line in lines if "::" in line]
    assert ids == [f"test_conformance[{each}-{check.name}]" for each in (name, "bert-tiny") for check in all_checks()]
    assert "heavy: []" in lines


@pytest.mark.slow
@pytest.mark.parametrize("strict", ["true", "false"])
def test_expected_failure_that_passes_is_a_failure(strict: str, install, tmp_path: Path) -> None:
    """The project's ``xfail_strict`` setting has no effect."""
    name = install_edited(install, "zoo-acme", EDITS["documented"])
    expected = {"documented": "known", "unknown-keys": "not so"}
    choice = "documented or unknown-keys or declaration"
    status, lines = run_pytest(tmp_path, [name], expected, "-k", choice, "-o", f"xfail_strict={strict}")
    assert status == 1
    ends = {line.partition(" ")[0]: line for line in lines if f"[{name}-" in line and line.split(" ")[0].isupper()}
    assert ends["XFAIL"].endswith("documented] - known")
    assert "unknown-keys]" in ends["FAILED"]
    assert any("declaration]" in line for line in lines if line.startswith("PASSED"))


@pytest.mark.slow
def test_failure_names_the_explanation(install, tmp_path: Path) -> None:
    name = install_edited(install, "zoo-acme", EDITS["documented"])
    status, lines = run_pytest(tmp_path, [name], {}, "-k", "documented")
    assert status == 1
    text = "\n".join(lines)
    assert "expected: every field has a docstring" in text
    assert "happened: hidden_size of Settings has none" in text
    assert "read more: zoo plugins check --explain documented" in text


def test_unknown_names_and_checks_are_errors(install) -> None:
    with pytest.raises(UsageError, match="no architecture or model 'gtp': did you mean 'gpt'"):
        parametrize_with_checks(["gtp"])
    with pytest.raises(UsageError, match="no check 'cash': expected_failures: did you mean 'cache'"):
        parametrize_with_checks(["gpt"], expected_failures={"cash": "why"})
    name = install_edited(install, "zoo-acme", [expecting({"cash": "why"})])
    with pytest.raises(PluginError, match="no check 'cash'"):
        run_checks(name)
