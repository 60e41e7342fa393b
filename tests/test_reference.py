"""Pages that are generated from docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CONFIGURATION = f"""
import sys
sys.path[:0] = [{str(ROOT / "docs" / "_ext")!r}, "."]
project = "letters"
extensions = ["myst_parser", "sphinx.ext.autodoc", "zoo_docs"]
"""
LETTERS = '''
"""(H) heads read S keys."""

__all__ = ["Bias"]

class Bias:
    """(S) keys to a bias.

    Args:
        heads: H.
        keys: S) or fewer.
    """

    def __init__(self, heads, keys): ...

    def forward(self, keys):
        """(S) -> (H, S), in float32.

        Args:
            keys: (S), at least 2.

        Returns:
            B. Other text.
        """
'''


def build(docstrings: str) -> subprocess.CompletedProcess[str]:
    """Build the reference of a module in the working directory, where warnings are errors."""
    pytest.importorskip("sphinx")
    Path("conf.py").write_text(CONFIGURATION)
    Path("letters.py").write_text(docstrings)
    Path("index.md").write_text("# letters\n\n```{public} letters\n```\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ".", "built"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_letters_of_shapes_do_not_number_a_list() -> None:
    done = build(LETTERS)
    assert (done.returncode, done.stderr) == (0, "")
    page = Path("built/index.html").read_text()
    assert "<ol" not in page
    for text in ("<p>(H) heads", "<p>(S) keys to a bias.", "<p>(S) -&gt; (H, S), in", "H.", "S) or fewer.", "B. Other"):
        assert text in page


def test_a_docstring_that_reads_as_a_numbered_list_fails_the_build() -> None:
    done = build(LETTERS.replace("(S) keys to", "2. keys to"))
    assert done.returncode
    assert "letters.Bias" in done.stderr
    assert "a docstring reads as a numbered list: keys to a bias." in done.stderr
