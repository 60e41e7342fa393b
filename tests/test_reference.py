"""Pages that are generated from docstrings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT
from tests.rows import each_row
from tests.test_public_names import PUBLIC

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


@pytest.fixture
def zoo_api() -> ModuleType:
    """Import the module that writes the page of all public names."""
    spec = importlib.util.spec_from_file_location("zoo_api", ROOT / "docs" / "_ext" / "zoo_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_public_names_is_current(zoo_api: ModuleType) -> None:
    assert zoo_api.PAGE.read_text(encoding="utf-8") == zoo_api.written(), "run python docs/_ext/zoo_api.py"


def test_the_page_of_public_names_is_complete(zoo_api: ModuleType) -> None:
    """Each public name is in the section of its module, with a summary without markup that Markdown lacks."""
    pattern = re.compile(r"^<!-- ([\w.]+) -->\n(.*?)^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
    sections = dict(pattern.findall(zoo_api.written()))
    assert sections.keys() == set(PUBLIC)
    for module, text in sections.items():
        rows = re.findall(r"^\| \[`(\w+)[`(].*\]\((\S+)\) \| (.*) \|$", text, re.MULTILINE)
        public = importlib.import_module(module)
        names = [name for name in public.__all__ if not isinstance(getattr(public, name), ModuleType)]
        assert sorted(name for name, _, _ in rows) == sorted(names)
        for name, link, summary in rows:
            assert (ROOT / "docs" / "reference" / link).is_file(), link
            assert summary, f"{module}.{name} has no docstring"
            assert not re.search(r":\w+:`|``", summary), summary


@each_row(
    ("module", "name", "text"),
    [
        ("zoo.nn", "ACTIVATIONS", "The functions that activations name."),  # zoo.checkpoints has others
        (
            "zoo.checkpoints",
            "ACTIVATIONS",
            "zoo's activations by their transformers names. The first name of each activation is written.",
        ),
        ("zoo.audio", "HOP", "Samples between the starts of windows of both."),
        ("zoo.audio", "nothing", ""),
    ],
)
def test_docstrings_of_constants(zoo_api: ModuleType, module: str, name: str, text: str) -> None:
    assert zoo_api.comment_of(module, name) == text


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
