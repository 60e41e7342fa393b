"""Lexers of commands and their output, which the button of a block copies without prompts and output.

The one of Pygments also takes ``# `` and ``% `` for prompts, and parentheses for the name of a virtual environment, so
that output which begins with them would be copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pygments.lexers.shell import BashSessionLexer
from pygments.token import Generic
from sphinx.application import Sphinx

__all__ = ["RUN", "ConsoleLexer", "RunLexer", "setup"]

RUN = "zoo-run"
"""The language of a block with one command, on its first line."""
Tokens = Iterator[tuple[int, Any, str]]


class ConsoleLexer(BashSessionLexer):
    """Commands behind ``$ ``, continued on the next line after a backslash. All other lines are output."""

    _ps1rgx = re.compile(r"^(\$ )(.*\n?)")
    _ps2 = "> "
    _venv = re.compile(r"(?!)")  # matches nothing


class RunLexer(ConsoleLexer):
    """One command, on the first line. All other lines are output, even those that begin with ``$ ``."""

    def get_tokens_unprocessed(self, text: str) -> Tokens:
        """Yield the position, the kind and the text of each token."""
        command, separator, output = text.partition("\n")
        yield from super().get_tokens_unprocessed(command + separator)
        if output:
            yield len(command) + 1, Generic.Output, output


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the lexers, the first in place of that of Pygments."""
    app.add_lexer("console", ConsoleLexer)
    app.add_lexer(RUN, RunLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
