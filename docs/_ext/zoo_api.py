"""The public names, and docs/reference/api.md, a page of all of them that can be read without a build.

    python docs/_ext/zoo_api.py     # write the page again

A name belongs to the page of docs/reference whose directive ``{public} MODULE`` documents it. The option ``:from:``
narrows it to the names that these submodules define.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "comment_of", "public_names", "written"]

REFERENCE = Path(__file__).parents[1] / "reference"
PAGE = REFERENCE / "api.md"
_DIRECTIVE = re.compile(r"^# (.+)\n(?:.*\n)*?```\{public\} (\S+)\n(?::from: (.+)\n)?```$", re.MULTILINE)
_SENTENCE = re.compile(r".+?[.!?](?=\s+[A-Z`:*]|$)")
_ROLE = re.compile(r":\w+:`~?(?:[^`<]+<)?([\w. ]+)>?`")
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_HEAD = """\
# All public names

Each with the arguments that it requires (`name=` must be named), `...` for optional ones, and the first sentence of its
docstring. Links lead to the pages with types and defaults. `python docs/_ext/zoo_api.py` writes this page again.
"""


def public_names(module: str, submodules: str = "") -> list[str]:
    """Return the names in a module's ``__all__``, classes first, optionally those that these submodules define."""
    public = import_module(module)
    origins = _origins(module)
    wanted = {f"{module}.{name}" for name in submodules.split()}
    if unknown := wanted - set(origins.values()):
        raise ValueError(f"{module} has no public names from {', '.join(sorted(unknown))}")
    names = [name for name in public.__all__ if not inspect.ismodule(getattr(public, name))]
    chosen = [name for name in names if not wanted or origins.get(name) in wanted]
    return sorted(chosen, key=lambda name: (not isinstance(getattr(public, name), type), name))


@cache
def _source(module: str) -> ast.Module:
    """Parse a module without importing it: some need packages that are not installed."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _origins(module: str) -> Mapping[str, str]:
    """Return the modules that a module imports its names from."""
    imports = [node for node in ast.walk(_source(module)) if isinstance(node, ast.ImportFrom)]
    return {item.name: str(node.module) for node in imports for item in node.names if not item.asname}


def comment_of(module: str, name: str) -> str:
    """Return the docstring of a constant, or an empty text, from the module that defines it."""
    for statement, text in pairwise(_source(module).body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return inspect.cleandoc(ast.get_docstring(ast.Module([text], [])) or "")
    origin = _origins(module).get(name, "")
    return comment_of(origin, name) if origin.startswith("zoo") else ""


def _call(name: str, value: Any) -> str:
    """Return how a function or class is called: its required arguments, and ``...`` for optional ones."""
    if not _is_documented(value) or (isinstance(value, type) and issubclass(value, dict | BaseException)):
        return name
    parameters = inspect.signature(value).parameters.values()
    required = [item for item in parameters if item.default is item.empty and item.kind not in _MANY]
    parts = [f"{item.name}=" if item.kind is item.KEYWORD_ONLY else item.name for item in required]
    return f"{name}({', '.join(parts if len(required) == len(parameters) else [*parts, '...'])})"


def _is_documented(value: object) -> bool:
    """Whether it has a docstring of its own: constants and types of arguments have that of their class."""
    return isinstance(value, type) or inspect.isroutine(value)


def _summary(text: str) -> str:
    """Return the first sentence of a docstring as Markdown for a cell of a table."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = found[0] if (found := _SENTENCE.match(paragraph)) else paragraph
    return _ROLE.sub(r"`\1`", sentence).replace("``", "`").replace("|", "\\|")


def _rows(module: str, submodules: str, page: str) -> Iterator[str]:
    public = import_module(module)
    yield from ("| name | summary |", "| --- | --- |")
    for name in public_names(module, submodules):
        value = getattr(public, name)
        text = (inspect.getdoc(value) or "") if _is_documented(value) else comment_of(module, name)
        yield f"| [`{_call(name, value)}`]({page}) | {_summary(text)} |"


def written() -> str:
    """Return the text of the page."""
    lines = [_HEAD]
    for module, sections in groupby(sorted(_sections()), key=itemgetter(0)):
        lines += [f"<!-- {module} -->", ""]
        for _, page, title, submodules in sections:
            lines += [f"## [{title}]({page})", ""]
            if title == module:
                lines += [_summary(inspect.getdoc(import_module(module)) or ""), ""]
            lines += [*_rows(module, submodules, page), ""]
        lines += [f"<!-- end of {module} -->", ""]
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, str, str, str]]:
    """Yield the module, page, title and submodules of each directive."""
    for path in REFERENCE.rglob("*.md"):
        for title, module, submodules in _DIRECTIVE.findall(path.read_text(encoding="utf-8")):
            yield module, path.relative_to(REFERENCE).as_posix(), title, submodules


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
