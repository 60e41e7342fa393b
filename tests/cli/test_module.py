"""``python -m zoo``."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_module_runs_the_command() -> None:
    """``python -m zoo`` has the output and exit status of ``zoo``."""
    version = subprocess.run([sys.executable, "-m", "zoo", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("zoo, version ")
    unknown = subprocess.run([sys.executable, "-m", "zoo", "no-such-command"], capture_output=True, text=True)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("command", "status"), [("list >&-", 0), ("show gpt-tiny --json >&- 2>&-", 0), ("show absent >&- 2>&-", 2)]
)
def test_closed_streams_are_discarded(command: str, status: int) -> None:
    """The status is the same as with open streams, and an open stderr stays empty."""
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m zoo {command}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_files_do_not_get_the_numbers_of_closed_streams() -> None:
    """Native libraries would print into them."""
    code = """
import atexit, os, sys
from zoo.__main__ import run
sys.argv[1:] = ["--version"]
atexit.register(lambda: os._exit(os.open(os.devnull, os.O_RDONLY)))
run()
"""
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", sys.executable, "-c", code])
    assert done.returncode > 2
