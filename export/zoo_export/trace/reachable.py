"""The code that a model can reach outside of zoo, the standard library and versioned distributions.

Modules are found by their import statements, those inside functions too, without running them, and by the functions
that loaded modules hold, so that replaced ones count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from types import FunctionType
from typing import Any

__all__ = ["code_digest"]

_KNOWN = {"zoo", "zoo_export", "zoo_runtime"}
"""Packages whose code is part of every key."""
_LISTINGS = ("RECORD", "installed-files.txt", "SOURCES.txt")
"""Files that list what a distribution has installed: wheels have the first, older installations one of the others."""
_SELF_CONTAINED = {
    "__future__", "abc", "base64", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "logging", "math", "numbers",
    "operator", "pathlib", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "unicodedata",
    "warnings", "weakref",
}  # fmt: skip
"""Modules of the standard library whose results depend on their arguments alone, apart from the names below.

Others give access to files, processes, the machine, the time or loaded modules.
"""
_BUILT_IN = {"exec", "eval", "compile", "open", "__import__"}
_READERS = {
    "cwd", "environ", "environb", "exec_module", "exists", "expanduser", "from_file", "from_pretrained", "fromfile",
    "genfromtxt", "get_data", "getenv", "glob", "home", "imread", "import_module", "is_dir", "is_file",
    "iterdir", "load", "load_file", "load_library", "loadtxt", "lstat", "memmap", "open_code", "owner", "readlink",
    "rglob", "run_module", "run_path", "safe_open", "samefile", "spec_from_file_location", "stat", "urlopen", "walk",
}  # fmt: skip
"""Names whose use makes a model depend on files, the environment or code that no import statement names.

So do names that begin with ``read_``.
"""


def code_digest(modules: Iterable[str]) -> str | None:
    """Return the digest of the code that modules can reach.

    None if it cannot be known: the code runs generated code, reads files or the environment, or was replaced by code of
    the main script.
    """
    waiting = [*dict.fromkeys(modules)]
    digests: dict[str, str] = {}
    for name in waiting:
        if name == "__main__" or name.partition(".")[0] in sys.stdlib_module_names - _SELF_CONTAINED:
            return None
        if name in digests or _is_versioned(name.partition(".")[0]):
            continue
        spec = _spec(name)
        if spec is None:
            if name in sys.modules:  # made by code
                return None
            continue
        digests[name] = ""
        waiting += [name.rpartition(".")[0]] if "." in name else []
        if spec.origin is None or not spec.has_location:
            continue  # a folder without code of its own
        content = Path(spec.origin).read_bytes()
        digests[name] = hashlib.sha256(content).hexdigest()
        if spec.origin.endswith(tuple(EXTENSION_SUFFIXES)):
            continue
        tree = ast.parse(content)
        if _reads_more(tree):
            return None
        waiting += _imports(tree, name if spec.submodule_search_locations is not None else name.rpartition(".")[0])
        for function in _functions(name):
            if function.__code__.co_filename.startswith("<"):
                return None
            waiting.append(function.__module__ or name)
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


@cache
def _is_versioned(package: str) -> bool:
    """Whether the version of an installed distribution, or of Python, stands for a top-level package."""
    if package in _KNOWN or package in sys.stdlib_module_names:
        return True
    spec = _spec(package)
    # As text: transformers has a path instead.
    places = [str(place) for place in (*(spec.submodule_search_locations or ()), spec.origin or "")] if spec else []
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    if not any(place.startswith(f"{folder}/") for place in places for folder in installed):
        return False  # a folder or a file on the path, or an editable distribution
    try:
        installed_as = distribution(package)
        # Not .files, which is a path for each of the 15,000 files of PyTorch.
        return any(installed_as.read_text(listing) for listing in _LISTINGS)
    except PackageNotFoundError:  # the distribution has another name, or there is none
        return package in packages_distributions()


def _spec(name: str) -> ModuleSpec | None:
    """Find a module without importing its parents."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a specification
        return None
    for end in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        places = map(str, spec.submodule_search_locations)
        spec = PathFinder.find_spec(".".join([top, *rest[: end + 1]]), list(places))
    return spec


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the modules that code of a package may import; some are names of other things."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) + 1 - node.level], *filter(None, [node.module])])
            base = base if node.level else node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _reads_more(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in _BUILT_IN or _is_reader(node.id)):
            return True
        if isinstance(node, ast.Attribute) and (node.attr in {"open", "__import__"} or _is_reader(node.attr)):
            return True
        if isinstance(node, ast.ImportFrom) and any(_is_reader(alias.name) for alias in node.names):
            return True
    return False


def _is_reader(name: str) -> bool:
    return name in _READERS or name.startswith("read_")


def _functions(name: str) -> Iterator[FunctionType]:
    """Yield the functions of a loaded module and the methods of its classes, apart from those that decorators make."""
    values: list[Any] = [*vars(sys.modules[name]).values()] if name in sys.modules else []
    for value in values:
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type) and value.__module__ == name:
            for method in vars(value).values():
                if isinstance(method, FunctionType) and not method.__code__.co_filename.startswith("<"):
                    yield method
