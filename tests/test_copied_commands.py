"""What the button of a block in the documentation copies: commands, without prompts and output."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("sphinx")
OUTPUT = ("# name", "% 50", "$ not a command", "> quoted", "(zoo) text", "[x] $ y", "user@host $ z")
"""Lines that look like commands to the lexer of Pygments."""
CONF = f"""
import sys
sys.path.insert(0, {str(ROOT / "docs" / "_ext")!r})
extensions = ["myst_parser", "sphinx.ext.autodoc", "zoo_console", "zoo_docs"]
"""


def copied(block: str) -> str:
    """Return the text of a block of HTML, without blank lines and the elements that ``copybutton_exclude`` names."""
    (excluded,) = re.findall(r'^copybutton_exclude = "(.*?)"', (ROOT / "docs" / "conf.py").read_text(), re.MULTILINE)
    for name in excluded.replace(".", "").split(", "):
        block = re.sub(rf'<span class="{name}">.*?</span>', "", block, flags=re.DOTALL)
    return re.sub(r"\n+", "\n", html.unescape(re.sub(r"<.*?>", "", block)).strip())  # ends of lines are in no element


def test_output_is_not_copied(tmp_path: Path) -> None:
    """A block that is run has one command. Others have several, which may continue on the next line."""
    (tmp_path / "conf.py").write_text(CONF)
    printed = " ".join(f"'{line}'" for line in OUTPUT)
    written = "\n".join(line for line in OUTPUT if not line.startswith("$ "))
    (tmp_path / "index.md").write_text(
        f"# Page\n\n```{{run}} printf '%s\\n' {printed}\n```\n\n"
        f"```console\n$ first --option\n{written}\n$ second \\\n    --option\n{written}\n```\n"
    )
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(tmp_path), str(tmp_path / "html")]
    subprocess.run(build, check=True)
    page = (tmp_path / "html" / "index.html").read_text()
    run, shown = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    assert copied(run) == f"printf '%s\\n' {printed}"
    assert copied(shown) == "first --option\nsecond \\\n    --option"
    assert all(html.unescape(re.sub(r"<.*?>", "", block)).count(line) for block in (run, shown) for line in OUTPUT[3:])
