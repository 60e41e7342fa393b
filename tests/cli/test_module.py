"""``python -m zoo``."""

from __future__ import annotations

import subprocess
import sys


def test_module_runs_the_command() -> None:
    """``python -m zoo`` has the output and exit status of ``zoo``."""
    version = subprocess.run([sys.executable, "-m", "zoo", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("zoo, version ")
    unknown = subprocess.run([sys.executable, "-m", "zoo", "no-such-command"], capture_output=True, text=True)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("error: ")
