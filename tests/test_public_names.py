"""Third-party distributions and built-in architectures use public names only."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import zoo_plugins
from tests.conftest import THIRD_PARTY
from tests.rows import each_row

PUBLIC = (
    "zoo", "zoo.audio", "zoo.checkpoints", "zoo.complexity", "zoo.cost", "zoo.exporters", "zoo.modules", "zoo.nn",
    "zoo.plots", "zoo.spectrogram", "zoo.testing", "zoo.training", "zoo_export", "zoo_runtime", "zoo_runtime.batch",
    "zoo_runtime.formula",
)  # fmt: skip
"""Modules for plugins, whose names in ``__all__`` are public."""
OURS = ("zoo", "zoo_export", "zoo_plugins", "zoo_runtime")
BUILT_IN = Path(zoo_plugins.__file__).parent
MODULE = re.compile(rf"(?:{'|'.join(OURS)})\.[\w.]+(?::\w+)?")
DISTRIBUTIONS = sorted(path.parent.name for path in THIRD_PARTY.glob("*/pyproject.toml"))


def is_public(module: str, name: str) -> bool:
    """Whether ``from module import name`` is public API."""
    return f"{module}.{name}" in PUBLIC or (module in PUBLIC and name in importlib.import_module(module).__all__)


def private_names(trees: list[ast.AST]) -> Iterator[str]:
    """Return the private names of zoo that a distribution uses."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for tree in trees:
        yield from _private_names(tree, own)


def _private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {item.asname or item.name.partition(".")[0]: item.name for item in node.names}
            yield from (item.name for item in node.names if _top(item.name) in OURS and item.name not in PUBLIC)
        elif isinstance(node, ast.ImportFrom) and not node.level and _top(str(node.module)) in OURS:
            module = str(node.module)
            modules |= {item.asname or item.name: f"{module}.{item.name}" for item in node.names}
            yield from (f"{module}.{item.name}" for item in node.names if not is_public(module, item.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = modules.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            if re.match(r"_(?!_)", node.attr):
                if node.attr not in own:
                    yield node.attr
            elif module in PUBLIC and not is_public(module, node.attr):
                yield f"{module}.{node.attr}"


def _top(module: str) -> str:
    return module.partition(".")[0]


@each_row("distribution", DISTRIBUTIONS)
def test_a_third_party_uses_public_names(distribution: str) -> None:
    paths = sorted((THIRD_PARTY / distribution).rglob("*.py"))
    assert paths
    trees: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths]
    assert list(private_names(trees)) == []


@each_row("architecture", sorted(path.name for path in BUILT_IN.iterdir() if path.is_dir()))
def test_a_built_in_architecture_uses_public_names(architecture: str) -> None:
    """They are written like third-party plugins. Other built-in architectures count as their own code."""
    trees: list[ast.AST] = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (BUILT_IN / architecture).rglob("*.py")
    ]
    assert [name for name in private_names(trees) if not name.startswith("zoo_plugins.")] == []


def test_every_distribution_is_checked() -> None:
    assert len(DISTRIBUTIONS) == len([path for path in THIRD_PARTY.iterdir() if path.is_dir()])
    assert {"zoo-aft", "zoo-mixer", "zoo-scores"} <= set(DISTRIBUTIONS)


@each_row(
    ("code", "found"),
    [
        ("from zoo.errors import UsageError", ["zoo.errors.UsageError"]),
        ("import zoo.plugins", ["zoo.plugins"]),
        ("import zoo as z\nz.plugins.active()", ["zoo.plugins"]),
        ("from zoo import plugins", ["zoo.plugins"]),
        ("from zoo.nn import attention", ["zoo.nn.attention"]),
        ("from zoo_runtime.tasks.classification import softmax", ["zoo_runtime.tasks.classification.softmax"]),
        ("from zoo_plugins.gpt.model import GPT", ["zoo_plugins.gpt.model.GPT"]),
        ("from zoo import nn\nnn.masks", ["zoo.nn.masks"]),
        ("def run(session):\n    return session._sessions", ["_sessions"]),
        ("import importlib\nimportlib.import_module('zoo.registry')", ["zoo.registry"]),
        ("class A:\n    def f(self):\n        self._a = self._b()", ["_b"]),
        ("import zoo\nfrom zoo import cost\nzoo.Graph, zoo.cost.linear, cost.linear, __name__", []),
        ("import zoo.nn\nfrom zoo_runtime import Runner\nclass A(Runner):\n    def _b(self):\n        self._b()", []),
    ],
)
def test_private_names_are_found(code: str, found: list[str]) -> None:
    assert list(private_names([ast.parse(code)])) == found


def test_public_modules_declare_their_names() -> None:
    for name in PUBLIC:
        module = importlib.import_module(name)
        assert [item for item in module.__all__ if not hasattr(module, item)] == []
