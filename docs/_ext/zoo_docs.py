"""Directives that generate documentation from the code: command output and reference sections.

``{run} COMMAND`` runs a command and shows its output. The others write reference sections: ``{public} MODULE`` for the
names in a module's ``__all__``, ``{docstring} MODULE`` for its docstring alone, ``{hooks}`` for the plugin contract,
``{commands}`` for the command line, and ``{checks}`` for the conformance kit.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import click
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext import napoleon
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode
from zoo_api import comment_of, public_names
from zoo_console import RUN

import zoo
from zoo import hookspecs
from zoo.cli.entry import cli
from zoo.version import DOCUMENTATION

__all__ = ["setup"]

_logger = logging.getLogger(__name__)
_SECONDS = 300
_ENUMERATOR = re.compile(r"^(\s*(?::[^:]+: )?)(?=(?:\([A-Za-z]\)|[A-Za-z][.)])(?:\s|$))", re.MULTILINE)
"""A letter at the start of a line or field that docutils would take for the number of a list item."""
_places: list[Path] = []
"""Root of the per-page working directories, shared by all reader processes."""


class Run(SphinxDirective):
    """Runs a shell command in the page's own directory, and shows the command and its output.

    The build fails if the exit status is not ``:status:`` (default 0). ``:hide:`` runs the command without showing it.
    With ``-D run_part=K/N``, only the commands of one of N parts of the pages are run, and others have no output.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {"status": directives.nonnegative_int, "hide": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Return a console block."""
        self.env.note_reread()  # the output depends on more than the page's source
        command = " ".join(self.arguments[0].split())
        printed = ""
        if in_part(self.env.docname, self.config.run_part):
            status, printed = run_command(command, page_folder(self.env.docname))
            if status != self.options.get("status", 0):
                raise self.error(f"{command}: status {status}\n{printed}")
        if "hide" in self.options:
            return []
        block = nodes.literal_block(text := f"$ {command}\n{printed}".rstrip(), text, language=RUN)
        self.set_source_info(block)
        return [block]


def in_part(page: str, part: str) -> bool:
    """Whether the page belongs to part K of N, written ``K/N``; any does if no part is given."""
    number, _, count = part.partition("/")
    return not part or zlib.crc32(page.encode()) % int(count) == int(number) % int(count)


def page_folder(page: str) -> Path:
    """Return the directory shared by the commands of a page, initially empty."""
    folder = _places[-1] / page.replace("/", "-")
    (folder / "work").mkdir(parents=True, exist_ok=True)
    return folder


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Run a command. Return its exit status and output (both streams), with this machine's paths replaced."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZOO", "XDG"))}
    changed = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        command, shell=True, cwd=folder / "work", env=kept | changed, text=True, check=False, timeout=_SECONDS,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    printed = done.stdout
    for place, name in {folder / "work": ".", folder: "..", Path.home(): "~"}.items():
        printed = printed.replace(str(place), name)
    return done.returncode, printed


class Written(SphinxDirective, ABC):
    """Base class of directives that generate Markdown and parse it in place."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes parsed from the Markdown."""
        self.env.note_reread()
        written = self.parse_text_to_nodes("\n".join(self.lines()), allow_section_headings=True)
        for found in (item for node in written for item in node.findall(nodes.enumerated_list)):
            _logger.warning("a docstring reads as a numbered list: %s", found.astext(), location=found)
        return written

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Return the lines of Markdown."""


class Docstring(Written):
    """Docstring of a module whose names are on other pages."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """Return the docstring, to which links to the module lead."""
        yield from ("```{eval-rst}", *_module(self.arguments[0]), "```")


def _module(name: str) -> Iterator[str]:
    yield from (f".. py:module:: {name}", "")
    yield from prose(inspect.cleandoc(import_module(name).__doc__ or "")).splitlines()


class Public(Written):
    """Reference of a module's public names, or of those that the submodules in ``:from:`` define."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"from": directives.unchanged_required}

    def lines(self) -> Iterator[str]:
        """Return autodoc directives, classes first."""
        module = import_module(self.arguments[0])
        yield "```{eval-rst}"
        yield from [f".. py:currentmodule:: {module.__name__}"] if "from" in self.options else _module(module.__name__)
        for name in public_names(module.__name__, self.options.get("from", "")):
            value = getattr(module, name)
            yield ""
            if isinstance(value, type):
                yield from (f".. autoclass:: {module.__name__}.{name}", "   :members:")
                if value.__bases__ != (object,):
                    yield "   :show-inheritance:"
            elif inspect.isroutine(value):
                yield f".. autofunction:: {module.__name__}.{name}"
            else:
                yield f".. py:data:: {module.__name__}.{name}"
                yield from ("", *(f"   {line}" for line in prose(comment_of(module.__name__, name)).splitlines()))
        yield "```"


def prose(text: str) -> str:
    """Escape single letters that docutils would take for the number of an item: ``(S) -> (H, S)``, ``:param x: H.``"""
    return _ENUMERATOR.sub(r"\1\\", text)


class Hooks(Written):
    """Reference of the plugin hooks."""

    def lines(self) -> Iterator[str]:
        """Return autodoc directives, in the order of the contract."""
        yield from ("```{eval-rst}", f".. py:currentmodule:: {hookspecs.__name__}", "")
        for name in hook_names():
            yield from (f".. autofunction:: {hookspecs.__name__}.{name}", "")
        yield "```"


def hook_names() -> list[str]:
    """Return the names of the hooks, in the order of the contract."""
    return [name for name, value in vars(hookspecs).items() if name.startswith("zoo_") and callable(value)]


class Commands(Written):
    """Help of every built-in command."""

    def lines(self) -> Iterator[str]:
        """Return a section per command."""
        context = click.Context(cli, info_name="zoo", **cli.context_settings)
        yield from ("## zoo", "", *_help(cli, context))
        yield from _sections(cli, context)


def _sections(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _sections(command, inner)
        else:
            yield from (f"## {inner.command_path}", "", *_help(command, inner))


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    """Return the help of a command, with its last line, the address of its page, as a link."""
    context.max_content_width = context.terminal_width = 100
    text, _, page = command.get_help(context).partition(f"\n\nDocumentation: {DOCUMENTATION}")
    yield from ("```text", *text.splitlines(), "```", "")
    if page:
        yield from (f"Documentation: {{doc}}`/{page.removesuffix('.md')}`", "")


def find_short(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Node) -> nodes.Node | None:
    """Resolve a reference without a module if it is unambiguous: docstrings write names as the module imports them."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    found = domain.find_obj(env, "", "", node["reftarget"], node["reftype"], 1)
    own = [(name, entry) for name, entry in found if not entry.aliased]
    if len(own) != 1:
        return None
    name, entry = own[0]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, [text], name)


def name_directories(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to directories by their path in the repository, as directories have no page."""
    folder = Path(app.env.doc2path(page)).parent

    def name(link: re.Match[str]) -> str:
        place = (folder / link[2]).resolve()
        if not place.is_dir():
            return link[0]
        return f"{link[1]} (`{place.relative_to(Path(app.srcdir).parent)}`)"

    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[\w/.-]+)\)", name, source[0])


class Checks(Written):
    """Explanation of every conformance check."""

    def lines(self) -> Iterator[str]:
        """Return a section per check."""
        from zoo.testing import all_checks

        for check in all_checks():
            subject = "plugin" if check.of_plugin else "model"
            yield from (f"## {check.name}", "", f"Applies to each {subject}.", "", "```{eval-rst}")
            yield from (".. py:currentmodule:: zoo", "", *check.explanation.splitlines(), "```", "")


def read_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Convert ``Args:``, ``Returns:`` and ``Raises:`` to fields. Docstrings of attributes have no sections."""
    if what in ("function", "method", "class", "exception"):
        settings = napoleon.Config(napoleon_use_rtype=False)
        lines[:] = napoleon.GoogleDocstring(lines, settings, app, what, name, value, options).lines()
    lines[:] = [prose(line) for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    for name, directive in {
        "run": Run, "docstring": Docstring, "public": Public, "hooks": Hooks, "commands": Commands, "checks": Checks,
    }.items():  # fmt: skip
        app.add_directive(name, directive)
    app.add_config_value("run_part", "", "env", str)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("missing-reference", find_short)
    app.connect("source-read", name_directories)
    app.connect("builder-inited", lambda _: _places.append(Path(tempfile.mkdtemp(prefix="zoo-docs-")).resolve()))
    app.connect("build-finished", lambda *_: shutil.rmtree(_places.pop(), ignore_errors=True))
    return {"version": zoo.__version__, "parallel_read_safe": True}
