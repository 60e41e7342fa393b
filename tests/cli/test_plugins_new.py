"""``zoo plugins new``: writes a complete distribution or nothing, with consistent names and clean code."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import CALLS, ROOT, full, nth_call
from zoo import __version__, plugins
from zoo.plugins import scaffold

LEFT_BY_TOOLS = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
WRITTEN = [
    ".github/workflows/ci.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "tests/test_conformance.py",
    "zoo_rwkv_ish/__init__.py",
    "zoo_rwkv_ish/config.py",
    "zoo_rwkv_ish/model.py",
    "zoo_rwkv_ish/presets.toml",
]


def held(folder: Path) -> list[str]:
    """Return the files below a directory."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and LEFT_BY_TOOLS.isdisjoint(path.parts)
    )


def modules(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the Python files of a new plugin with their syntax trees."""
    for path in sorted(folder.glob("zoo_*/*.py")):
        yield path, ast.parse(path.read_text())


def is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is only a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_written_files_are_reported(zoo) -> None:
    """As text and as JSON."""
    done = zoo("plugins", "new", "rwkv-ish")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        "rwkv-ish: zoo-rwkv-ish, 10 files. Next:",
        "pip install -e './rwkv-ish[test]'",
        "zoo plugins check rwkv-ish",
        "zoo export rwkv-ish-tiny --onnx",
    ]
    assert held(Path("rwkv-ish")) == WRITTEN
    assert zoo("plugins", "new", "rwkv-ish", "-o", "deep er/place", "--json").json == {
        "schema": "zoo.plugins.new/1",
        "directory": "deep er/place",
        "files": WRITTEN,
        "distribution": "zoo-rwkv-ish",
        "module": "zoo_rwkv_ish",
        "architecture": "rwkv-ish",
        "preset": "rwkv-ish-tiny",
    }
    assert held(Path("deep er/place")) == WRITTEN
    here = Path("there").absolute()
    assert f"pip install -e '{here}[test]'" in zoo("plugins", "new", "rwkv-ish", "-o", here).out


def test_metadata_is_complete(zoo) -> None:
    """The fields that pip and zoo read, and the licence."""
    zoo("plugins", "new", "rwkv-ish")
    metadata = tomllib.loads(Path("rwkv-ish/pyproject.toml").read_text())
    project = metadata["project"]
    assert (project["name"], project["version"]) == ("zoo-rwkv-ish", "0.1.0")
    assert project["entry-points"] == {"zoo.plugins": {"rwkv-ish": "zoo_rwkv_ish"}}
    (needed,) = map(Requirement, project["dependencies"])
    assert (needed.name, str(needed.specifier)) == ("attention-zoo", f">={__version__}")
    assert [Requirement(text).name for text in project["optional-dependencies"]["test"]] == ["pytest"]
    assert metadata["build-system"]["build-backend"] == "hatchling.build"
    presets = tomllib.loads(Path("rwkv-ish/zoo_rwkv_ish/presets.toml").read_text())
    assert presets["models"]["rwkv-ish-tiny"].items() >= {"arch": "rwkv-ish", "tokenizer": "bytes"}.items()
    assert Path("rwkv-ish/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    for command in ("pip install", "pytest", "zoo plugins check rwkv-ish"):
        for file in ("README.md", ".github/workflows/ci.yml"):
            assert command in Path("rwkv-ish", file).read_text()


def test_every_file_of_the_template_is_written() -> None:
    """The list of files equals the contents of the template directory."""
    assert held(scaffold.TEMPLATE) == sorted(scaffold.FILES)


@pytest.mark.parametrize(
    ("name", "module", "model_class"),
    [
        ("x", "zoo_x", "X"),
        ("rwkv7", "zoo_rwkv7", "Rwkv7"),
        ("RWKV", "zoo_rwkv", "RWKV"),
        ("state_space-2", "zoo_state_space_2", "StateSpace2"),
        ("my-arch", "zoo_my_arch", "MyArch"),
        ("my-arch_MyArch", "zoo_my_arch_myarch", "MyArchMyArch"),
        ("a-transformer-of-many-words", "zoo_a_transformer_of_many_words", "ATransformerOfManyWords"),
    ],
)
def test_names_are_consistent_and_code_is_clean(zoo, name: str, module: str, model_class: str) -> None:
    """For any name, all references resolve, and lines stay formatted whatever its length."""
    assert zoo("plugins", "new", name).status == 0
    folder = Path(name)
    if "arch" not in name:
        assert not any(re.search("my.?arch", text, re.IGNORECASE) for text in texts(folder))
    classes = {
        f"{module}.{path.stem}:{node.name}"
        for path, tree in modules(folder)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert classes >= {f"{module}.config:{model_class}Config", f"{module}.model:{model_class}"}
    entry = (folder / module / "__init__.py").read_text()
    for text in (f'name="{name}"', f'"{module}.config:{model_class}Config"', f'"{module}.model:{model_class}"'):
        assert text in entry
    assert f"from {module}.config import {model_class}Config\n" in (folder / module / "model.py").read_text()
    assert f'@parametrize_with_checks(["{name}"])' in (folder / "tests/test_conformance.py").read_text()
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, "--no-cache", "."], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def texts(folder: Path) -> Iterator[str]:
    """Return every path with its content, except the licence."""
    for file in held(folder):
        if file != "LICENSE":
            yield file
            yield (folder / file).read_text()


@pytest.mark.slow
def test_types_are_checked(zoo) -> None:
    """With the plugin's own type-checker settings."""
    zoo("plugins", "new", "rwkv-ish")
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "export", "plugins"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd="rwkv-ish", env={**os.environ, "MYPYPATH": paths}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_template_has_at_most_sixty_lines_of_code(zoo) -> None:
    """Blank lines, comments and docstrings do not count."""
    zoo("plugins", "new", "rwkv-ish")
    lines = []
    for path, tree in modules(Path("rwkv-ish")):
        said = {
            line
            for node in ast.walk(tree)
            if is_docstring(node)
            for line in range(node.lineno, node.end_lineno + 1)
        }  # fmt: skip
        lines += [
            line
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if number not in said and line.strip() and not line.strip().startswith("#")
        ]
    assert 30 < len(lines) <= 60


def test_everything_is_documented(zoo) -> None:
    """Modules, classes, public functions, and each field of the configuration."""
    zoo("plugins", "new", "rwkv-ish")
    fields = 0
    for path, tree in modules(Path("rwkv-ish")):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", path.name)
                assert ast.get_docstring(node) or name.endswith("__"), name
            if isinstance(node, ast.ClassDef):
                for statement, after in itertools.pairwise([*node.body, ast.Pass()]):
                    if isinstance(statement, ast.Assign | ast.AnnAssign):
                        assert is_docstring(after), ast.unparse(statement)
                        fields += 1
    assert fields >= 6


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("", ("bad plugin name ''", "use letters, digits, '-' and '_'")),
        ("My Arch!", ("bad plugin name 'My Arch!'", "did you mean 'My-Arch'?")),
        ("../x", ("bad plugin name '../x'", "did you mean 'x'?")),
        ("3d", ("bad plugin name '3d'", "begin with a letter")),
        ("café", ("bad plugin name 'café'", "use letters")),
        ("x\n", ("bad plugin name", "did you mean 'x'?")),
        ("x-", ("did you mean 'x'?",)),
        ("zoo-mine", ("'zoo-mine'", "write 'mine'")),
        ("none", ("class None",)),
        ("cache", ("class Cache of 'cache' would shadow another name",)),
        ("multi-head-attention", ("class MultiHeadAttention",)),
        ("block", ("class Block",)),
        ("gpt", ("'gpt' is taken by plugin 'gpt' (attention-zoo",)),
        ("GPT", ("'GPT' is taken by plugin 'gpt'",)),
        ("onnx", ("taken by plugin 'onnx'",)),
        ("export", ("the module zoo_export already exists",)),
        ("plugins", ("the module zoo_plugins already exists",)),
        ("x" * 300, ("cannot write (File name too long)",)),
    ],
)
def test_invalid_names_are_rejected(zoo, snapshot, name: str, fragments: tuple[str, ...]) -> None:
    """One line has the reason, and nothing is written."""
    zoo("plugins", "new", name).failed(6 if len(name) > 200 else 2, *fragments)
    assert snapshot() == {}


def test_names_of_third_parties_are_rejected(zoo, install, snapshot) -> None:
    """Names are compared as package indices do, including those of broken and disabled plugins."""
    code = """
import zoo
ZOO_API = 1
@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="ret_net", tasks=(), config="a:B", model="a:C", reference="none")]
"""
    install("third-party", code, plugin="far-away")
    install("wreck", "raise ValueError")
    owner = "taken by plugin 'far-away' (third-party 1.0)"
    assert owner in zoo("plugins", "new", "ret-net").err
    assert owner in zoo("plugins", "new", "far_away").err
    plugins.select(plugins.Selection())
    assert "'wreck' is taken by plugin 'wreck' (wreck 1.0)" in zoo("plugins", "new", "wreck").err
    zoo("--disable-plugin", "far-away", "plugins", "new", "Far-Away")
    assert owner in zoo("plugins", "new", "Far-Away").err
    assert snapshot() == {}


def test_preset_name_of_the_project_is_rejected(zoo) -> None:
    """The project's preset would change the new one."""
    Path("zoo.toml").write_text('schema = 1\n[models.mine-tiny]\nbase = "gpt-tiny"\n')
    zoo("plugins", "new", "mine").failed(2, "the preset 'mine-tiny' already exists")
    assert not Path("mine").exists()


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_existing_target_is_kept_without_force(zoo, snapshot, kind: str) -> None:
    """For any kind of file."""
    if kind == "file":
        Path("mine").write_text("a day's work")
    elif kind == "directory":
        Path("mine").mkdir()
    else:
        Path("mine").symlink_to("nowhere")
    before = snapshot()
    zoo("plugins", "new", "mine").failed(2, "already exists", "mine", "--force")
    assert snapshot() == before


def test_force_replaces_only_generated_files(zoo, snapshot) -> None:
    """Incomplete plugins are replaced; plugins with additional files, and other directories, are kept."""
    zoo("plugins", "new", "mine")
    before = snapshot()
    Path("mine/README.md").unlink()
    Path("mine/tests/__pycache__").mkdir()
    Path("mine/tests/__pycache__/x.pyc").write_bytes(b"")
    assert zoo("plugins", "new", "mine", "--force").status == 0
    assert snapshot() == before
    for added in ("mine/zoo_mine/attention.py", "mine/.git"):
        Path(added).write_text("a day's work")
        before = snapshot()
        message = f"contains files other than those zoo wrote ({added.removeprefix('mine/')})"
        zoo("plugins", "new", "mine", "--force").failed(2, message, "choose another place")
        zoo("plugins", "new", "yours", "-o", "mine", "--force").failed(2, "is not the plugin 'yours'")
        assert snapshot() == before
        Path(added).unlink()
    Path("file").write_text("a day's work")
    Path("link").symlink_to("mine")
    for target in ("file", "link"):
        zoo("plugins", "new", "mine", "-o", target, "--force").failed(2, "exists and is not the plugin 'mine'")
    assert (Path("file").read_text(), Path("link").is_symlink()) == ("a day's work", True)


@pytest.mark.parametrize("file", ["README.md", "zoo_mine/model.py"])
def test_force_keeps_edited_files(zoo, snapshot, file: str) -> None:
    """A file that differs from the template, by its content or as a link, is the user's work."""
    zoo("plugins", "new", "mine")
    path = Path("mine", file)
    original = path.read_bytes()
    path.write_bytes(original + b"# my work\n")
    before = snapshot()
    message = f"contains files other than those zoo wrote ({file})"
    zoo("plugins", "new", "mine", "--force").failed(2, message, "choose another place")
    assert snapshot() == before
    path.unlink()
    Path("elsewhere").write_bytes(original)
    path.symlink_to(Path("elsewhere").absolute())
    zoo("plugins", "new", "mine", "--force").failed(2, message)
    assert path.is_symlink()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("call", sorted(set(CALLS) - {"unlink", "rmdir"}))  # leftovers are removed by the next writer
@pytest.mark.parametrize("force", [False, True])
def test_full_disk_leaves_the_old_state(zoo, snapshot, call: str, force: bool) -> None:
    """Whichever call fails, the old directory or none remains, never a partial one."""
    if force:
        zoo("plugins", "new", "mine")
        Path("mine/README.md").unlink()
    before = snapshot()
    for number in itertools.count(1):
        with nth_call(call, number, full) as calls:
            done = zoo("plugins", "new", "mine", *(["--force"] if force else []))
        if len(calls) < number:
            break
        done.failed(6, "cannot write (No space left on device)", "mine", "free some space")
        assert snapshot() == before
    assert done.status == 0
    assert held(Path("mine"))
