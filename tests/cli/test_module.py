"""The package as a program."""

from __future__ import annotations

import subprocess
import sys


def test_module_is_the_command() -> None:
    """``python -m zoo`` prints and exits as ``zoo`` does."""
    version = subprocess.run([sys.executable, "-m", "zoo", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("zoo, version ")
    unknown = subprocess.run([sys.executable, "-m", "zoo", "no-such-command"], capture_output=True, text=True)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("error: ")
