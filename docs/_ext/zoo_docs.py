"""What the pages take from the program itself when they are built: commands and their output, and references.

``{run} COMMAND`` runs a command and shows what it prints. The others write a page's reference: ``{public} MODULE`` of
its ``__all__``, ``{hooks}`` of the plugin contract, ``{commands}`` of the command line, ``{checks}`` of the conformance
kit, and ``{models}`` one section an architecture, whichever are installed.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
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
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import zoo
from zoo import hookspecs
from zoo.cli.entry import cli

__all__ = ["setup"]

_SECONDS = 300
_places: list[Path] = []
"""Where the pages that run commands have a directory each, whichever process reads them."""


class Run(SphinxDirective):
    """Runs a command of the shell in a directory of the page's own, and shows it with what it prints.

    A command that ends with another status than ``:status:`` is an error of the build. ``:hide:`` runs it and shows
    nothing.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {"status": directives.nonnegative_int, "hide": directives.flag}

    def run(self) -> list[nodes.Node]:
        """A console block."""
        self.env.note_reread()  # what a command prints depends on more than on the page
        command = " ".join(self.arguments[0].split())
        status, printed = run_command(command, page_folder(self.env.docname))
        if status != self.options.get("status", 0):
            raise self.error(f"{command}: status {status}\n{printed}")
        if "hide" in self.options:
            return []
        block = nodes.literal_block(text := f"$ {command}\n{printed}".rstrip(), text, language="console")
        self.set_source_info(block)
        return [block]


def page_folder(page: str) -> Path:
    """The directory that the commands of a page share. It is empty at first."""
    folder = _places[-1] / page.replace("/", "-")
    (folder / "work").mkdir(parents=True, exist_ok=True)
    return folder


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """The exit status of a command and what it prints on both streams, without the names of this machine's places."""
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
    """Base of directives that write Markdown, which is then read as if it stood in the page."""

    def run(self) -> list[nodes.Node]:
        """What the Markdown says."""
        self.env.note_reread()
        return self.parse_text_to_nodes("\n".join(self.lines()), allow_section_headings=True)

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The Markdown."""


class Models(Written):
    """For each architecture its smallest preset: a section with what ``zoo show`` says."""

    def lines(self) -> Iterator[str]:
        """Sections, by the architectures' names."""
        status, printed = run_command("zoo list --json", page_folder(self.env.docname))
        if status:
            raise self.error(printed)
        smallest: dict[str, Mapping[str, Any]] = {}
        for model in sorted(json.loads(printed)["models"], key=lambda model: model.get("parameters") or 0):
            if model["available"]:
                smallest.setdefault(model["architecture"], model)
        for architecture, model in sorted(smallest.items()):
            yield from (f"## {architecture}", "", f"```{{run}} zoo show {model['name']}", "```", "")


class Public(Written):
    """All that a module says is public, each by its public name."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """Autodoc's directives, classes first."""
        module = import_module(self.arguments[0])
        yield from ("```{eval-rst}", f".. py:module:: {module.__name__}", "")
        yield from inspect.cleandoc(module.__doc__ or "").splitlines()
        for name in sorted(module.__all__, key=lambda name: (not isinstance(getattr(module, name), type), name)):
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            yield ""
            if isinstance(value, type):
                yield from (f".. autoclass:: {module.__name__}.{name}", "   :members:")
                if value.__bases__ != (object,):
                    yield "   :show-inheritance:"
            elif inspect.isroutine(value):
                yield f".. autofunction:: {module.__name__}.{name}"
            else:
                yield f".. py:data:: {module.__name__}.{name}"
                yield from ("", *(f"   {line}" for line in comment_of(module.__name__, name).splitlines()))
        yield "```"


@cache
def comments(package: str) -> Mapping[str, str]:
    """What the modules of a package say about their constants, by the constants' names."""
    found: dict[str, str] = {}
    root = import_module(package.partition(".")[0])
    for module in [root.__name__, *(item.name for item in pkgutil.walk_packages(root.__path__, f"{root.__name__}."))]:
        source = ModuleAnalyzer.for_module(module)
        for (owner, name), text in source.find_attr_docs().items():
            if not owner:
                found.setdefault(name, "\n".join(text).strip())
    return found


def comment_of(package: str, name: str) -> str:
    """What is said about a constant, wherever it is defined."""
    return comments(package).get(name, "")


class Hooks(Written):
    """The hooks of the plugin contract."""

    def lines(self) -> Iterator[str]:
        """Autodoc's directives, in the order of the contract."""
        yield from ("```{eval-rst}", f".. py:currentmodule:: {hookspecs.__name__}", "")
        for name in hook_names():
            yield from (f".. autofunction:: {hookspecs.__name__}.{name}", "")
        yield "```"


def hook_names() -> list[str]:
    """The hooks' names, in the order of the contract."""
    return [name for name, value in vars(hookspecs).items() if name.startswith("zoo_") and callable(value)]


class Commands(Written):
    """Every command of zoo's own with its help."""

    def lines(self) -> Iterator[str]:
        """A section a command."""
        context = click.Context(cli, info_name="zoo")
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


def _help(command: click.Command, context: click.Context) -> list[str]:
    context.max_content_width = context.terminal_width = 100
    return ["```text", *command.get_help(context).splitlines(), "```", ""]


def find_short(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Node) -> nodes.Node | None:
    """The one object that a name without its module can mean: docstrings write names as their module imports them."""
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
    """Say where a directory lies in the repository instead of linking to it: there is no page to show for one."""
    folder = Path(app.env.doc2path(page)).parent

    def name(link: re.Match[str]) -> str:
        place = (folder / link[2]).resolve()
        if not place.is_dir():
            return link[0]
        return f"{link[1]} (`{place.relative_to(Path(app.srcdir).parent)}`)"

    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[\w/.-]+)\)", name, source[0])


class Checks(Written):
    """Every check of the conformance kit with its explanation."""

    def lines(self) -> Iterator[str]:
        """A section a check."""
        from zoo.testing import all_checks

        for check in all_checks():
            subject = "plugin" if check.of_plugin else "model"
            yield from (f"## {check.name}", "", f"Of each {subject}.", "", "```{eval-rst}")
            yield from (".. py:currentmodule:: zoo", "", *check.explanation.splitlines(), "```", "")


def read_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Make fields of a docstring's ``Args:``, ``Returns:`` and ``Raises:``. Those of attributes are sentences alone."""
    if what in ("function", "method", "class", "exception"):
        settings = napoleon.Config(napoleon_use_rtype=False)
        lines[:] = napoleon.GoogleDocstring(lines, settings, app, what, name, value, options).lines()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    for name, directive in {
        "run": Run, "models": Models, "public": Public, "hooks": Hooks, "commands": Commands, "checks": Checks,
    }.items():  # fmt: skip
        app.add_directive(name, directive)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("missing-reference", find_short)
    app.connect("source-read", name_directories)
    app.connect("builder-inited", lambda _: _places.append(Path(tempfile.mkdtemp(prefix="zoo-docs-")).resolve()))
    app.connect("build-finished", lambda *_: shutil.rmtree(_places.pop(), ignore_errors=True))
    return {"version": zoo.__version__, "parallel_read_safe": True}
