"""The README says what happens: its files are written, its commands run, its output compared, its Python executed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def shape(line: str) -> str:
    """A line without what a machine may change: numbers, and the spaces that align them."""
    return " ".join(NUMBER.sub("#", line).split())


def alike(wanted: str, found: str) -> bool:
    """Whether a line of output is the line the README shows."""
    if wanted.startswith("largest"):  # which output is the worst depends on the machine
        return found.startswith("largest error, relative to what is allowed: ")
    return shape(wanted) == shape(found)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each ``$ command`` of a console block and the output shown for it."""
    parts: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            parts.append((line[2:], []))
        else:
            parts[-1][1].append(line)
    return parts


@pytest.mark.slow
def test_readme(environment: Path, tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ZOO"))}
    variables |= {
        "PATH": f"{environment / 'bin'}{os.pathsep}{variables['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_NO_BUILD_ISOLATION": "false",  # which means: without isolation, so that nothing is downloaded
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
    }
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # the commands are those of a clone
    ran = 0
    for language, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            path = tmp_path / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[named.end() :], encoding="utf-8")
        elif language == "python":
            subprocess.run([environment / "bin/python", "-c", text], cwd=tmp_path, env=variables, check=True)
            ran += 1
        elif language == "console":
            for command, wanted in commands(text):
                done = subprocess.run(
                    command, shell=True, cwd=tmp_path, env=variables, text=True, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                found = [] if command.startswith("pip ") else done.stdout.splitlines()
                assert len(found) == len(wanted), (command, done.stdout)
                for expected, line in zip(wanted, found, strict=True):
                    assert alike(expected, line), command
                ran += 1
    assert ran > 15
