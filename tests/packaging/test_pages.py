"""The README and the documentation are correct: their files are written, commands run, and outputs compared."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.conftest import make_environment

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MODEL_SIZE = re.compile(r"[\d,]+ parameters, [\d.]+ [kMG]?B")
PAGES = {"README.md": 15, "docs/tutorial.md": 8} | {
    f"docs/howto/{name}.md": count
    for name, count in {
        "answers": 28,
        "attention-page": 18,
        "attention-weights": 5,
        "audit": 7,
        "batches": 8,
        "checkpoints": 8,
        "commands": 3,
        "datasets": 3,
        "deploy": 8,
        "engines": 5,
        "exporters": 7,
        "exports": 16,
        "figures": 11,
        "objectives": 3,
        "own-module": 9,
        "presets": 6,
        "report": 6,
        "resolution": 7,
        "run": 16,
        "serve": 19,
        "signing": 8,
        "tasks": 3,
        "tokenizers": 3,
        "train": 15,
        "trackers": 3,
        "translator": 5,
    }.items()
}
"""Each page with its minimum number of commands and programs."""


def shape(line: str) -> str:
    """Return a line without machine-dependent parts: numbers, and spaces that align them."""
    return " ".join(NUMBER.sub("#", line).split())


def alike(wanted: str, found: str) -> bool:
    """Return whether a line of output equals the line on the page, up to machine-dependent parts.

    The size of a model is the same on every machine.
    """
    if wanted.startswith("worst output "):  # depends on the machine
        return found.startswith("worst output ")
    return shape(wanted) == shape(found) and MODEL_SIZE.findall(wanted) == MODEL_SIZE.findall(found)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Yield each ``$ command`` of a console block with the output shown for it."""
    parts: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            parts.append((line[2:], []))
        else:
            parts[-1][1].append(line)
    return parts


def check_output(command: str, wanted: list[str], found: list[str]) -> None:
    """Fail unless the lines are as shown. A line ``...`` stands for any number of lines."""
    if "..." in wanted:
        place = wanted.index("...")
        end = len(found) - (len(wanted) - place - 1)
        assert end >= place, (command, found)
        wanted, found = wanted[:place] + wanted[place + 1 :], found[:place] + found[end:]
    assert len(found) == len(wanted), (command, found)
    for expected, line in zip(wanted, found, strict=True):
        assert alike(expected, line), (command, found)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("page")
    environment = make_environment(place / "environment", wheel)
    work = place / "work"
    work.mkdir()
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ZOO"))}
    variables |= {
        "PATH": f"{environment / 'bin'}{os.pathsep}{variables['PATH']}",
        "XDG_CONFIG_HOME": str(place / "config"),
        "XDG_CACHE_HOME": str(place / "cache"),
        "PIP_NO_BUILD_ISOLATION": "false",  # without build isolation, so that nothing is downloaded
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
    }
    (work / "tests").symlink_to(ROOT / "tests")  # the commands expect a clone
    ran = 0
    for language, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            path = work / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[named.end() :], encoding="utf-8")
        elif language == "python":
            subprocess.run([environment / "bin/python", "-c", text], cwd=work, env=variables, check=True)
            ran += 1
        elif language == "console":
            for command, wanted in commands(text):
                done = subprocess.run(
                    command, shell=True, cwd=work, env=variables, text=True, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                found = [] if command.startswith("pip ") else done.stdout.replace(str(work), ".").splitlines()
                check_output(command, wanted, found)
                assert done.returncode == 0 or re.search("error|FAILURES", "\n".join(wanted)), (command, done.stdout)
                ran += 1
    assert ran >= PAGES[page]
