"""The how-to guide of web pages: its commands are run, and its module in a browser."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.packaging.test_pages import BLOCK, check_output, commands
from zoo_runtime import load_session

BLOCKS = BLOCK.findall((ROOT / "docs" / "howto" / "web-page.md").read_text(encoding="utf-8"))
UNTESTED = ["npm install onnxruntime-web @huggingface/tokenizers", 'pip install "attention-zoo[web]"']
"""Commands of the page that download."""


@pytest.mark.slow
def test_commands_and_module(onnxruntime_web: Path, serve: Any, tab: Any) -> None:
    """The number of files is the one on the page; the program prints its progress and the text of ``zoo run``."""
    for block in (text for language, text in BLOCKS if language == "console"):
        for command, wanted in commands(block):
            program, *arguments = shlex.split(command)
            assert program == "zoo"
            done = subprocess.run([sys.executable, "-m", "zoo", *arguments], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
            found = done.stdout.splitlines()
            check_output(command, wanted, found)
            if arguments[0] == "publish":
                assert found == wanted
    (program,) = (text for language, text in BLOCKS if language == "js")
    Path("index.html").write_text("<!doctype html><title>own</title><link rel=icon href=data:,>")
    Path("own.js").write_text(program)
    page = tab(serve(Path()).url, allow=".")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.add_script_tag(url="own.js", type="module")
    page.wait_for_function("async () => (await import('./own.js')) && true")
    with load_session("gpt-tiny") as session:
        (wanted_text,) = session.run(["hello"], max_new_tokens=8)
    progress = [line for line in said if re.fullmatch(r"(\d+) of \d+ bytes", line)]
    assert progress[-1] == f"{progress[-1].partition(' ')[0]} of {progress[-1].split()[0]} bytes"
    assert "".join(said[len(progress) :]) == wanted_text["generated"]


def test_other_commands_download() -> None:
    assert [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()] == UNTESTED
