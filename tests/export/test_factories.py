"""Consent: no command imports a factory that a model directory names, unless the user names it, too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo as library
from tests.conftest import ROOT, Result
from tests.export import own_modules
from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo.models import create
from zoo_export import export_module, verify_model

Zoo = Callable[..., Result]

GRAPH = library.Graph(
    inputs=(library.token_ids("input_ids", 40), library.mask("mask")), outputs=(library.floats("score", "batch"),)
)
TRAP = "from pathlib import Path\nPath('IMPORTED').touch()\n"
MESSAGE = "mine was made by my_models:make_ranker, whose code runs on this machine"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a module made which is not there any more."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(own_modules.__file__, folder / "my_models.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        export_module("my_models:make_ranker", {"hidden": 8}, path=folder / "mine", graphs=GRAPH)
        del sys.modules["my_models"]
    return folder / "mine"


@pytest.fixture
def mine(exported: Path, tmp_path: Path) -> Path:
    """A copy of the model. A module of the factory's name can be imported from the current directory."""
    Path("my_models.py").write_text(TRAP)
    shutil.copytree(exported, "mine")
    return Path("mine")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())


def run(*arguments: object, **environment: str) -> Result:
    """Run ``zoo`` in a process of its own, as its console script does: the current directory is not on the path."""
    code = "import sys; sys.path.remove(''); from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "export", ROOT / "plugins")))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


NEEDS_NONE = [
    ["show", "mine"],
    ["why", "mine"],
    ["run", "mine", '{"input_ids": [5, 3]}'],
    ["publish", "mine", "out", "--layout", "standalone"],
    ["publish", "mine", "out", "--layout", "triton"],
    ["relink", "mine"],
]
NEEDS_IT = [
    ["verify", "mine"],
    ["verify", "mine", "--retrace"],
    ["verify", "mine", "--factory", "my_models:Ranker"],
    ["export", "mine", "--onnx", "--force"],
    ["export", "mine", "--onnx", "--profile", "cpu"],
    ["export", "mine", "--onnx", "--force", "--graph-only"],
    ["quantize", "mine", "--dtype", "int8"],
    ["diff", "mine"],
    ["bench", "mine"],
    ["adapt", "mine", "--set", "task=tensors", "-o", "other"],
    ["show", "mine", "--figure", "modules.svg"],
    ["publish", "mine", "out", "--layout", "hub"],
]


@pytest.mark.parametrize("arguments", NEEDS_NONE, ids=" ".join)
def test_commands_without_the_module(arguments: list[str], mine: Path, importable: None, zoo: Zoo) -> None:
    assert zoo(*arguments).status == 0
    assert not Path("IMPORTED").exists()


@pytest.mark.parametrize("arguments", NEEDS_IT, ids=" ".join)
def test_commands_that_refuse(
    arguments: list[str], mine: Path, importable: None, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    before = snapshot()
    consent = "set ZOO_FACTORIES to" if arguments[0] in ("adapt", "bench", "publish", "show") else "add --factory"
    zoo(*arguments).failed(2, MESSAGE, f"{consent} my_models:make_ranker")
    assert snapshot() == before


def test_python(mine: Path, importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r'use zoo.allow_factories\("my_models:make_ranker"\)'):
        library.load(mine)
    assert not Path("IMPORTED").exists()
    shutil.copy(own_modules.__file__, "my_models.py")
    with library.allow_factories("my_models:make_ranker"):
        assert verify_model(mine).passed
    with pytest.raises(UsageError, match=MESSAGE):
        library.load(mine)
    monkeypatch.setenv("ZOO_FACTORIES", "os:system,my_models:make_ranker")
    assert library.load(mine).config.factory == "my_models:make_ranker"
    with pytest.raises(UsageError, match="bad factory"), library.allow_factories("my_models"):
        pass
    del sys.modules["my_models"]


EXPORTER = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_exporters():
    return [zoo.Exporter(name="names", export="zoo_names_export:export", verifies=False)]
"""
EXPORT = """
import zoo

def export(job):
    (job.folder / "names.txt").write_text(" ".join(zoo.load(job.model.path).state_dict()))
    return {"verified": False, "reason": "names are not compared"}
"""


def test_other_formats(mine: Path, importable: None, install: Callable[..., Path], zoo: Zoo) -> None:
    install("zoo-names", EXPORTER, files={"{module}_export.py": EXPORT})
    zoo("export", mine, "--format", "names").failed(2, MESSAGE)
    shutil.copy(own_modules.__file__, "my_models.py")
    assert zoo("export", mine, "--format", "names", "--factory", "my_models:make_ranker").status == 0
    assert "embedding.weight" in (mine / "names.txt").read_text()
    del sys.modules["my_models"]


@pytest.mark.slow
def test_another_process(mine: Path) -> None:
    """The console script finds a module in the current directory, once it is allowed."""
    shutil.copy(own_modules.__file__, "my_models.py")
    assert run("verify", "mine").failed(2) == f"error: {MESSAGE}: add --factory my_models:make_ranker\n"
    assert "verified" in run("verify", "mine", "--factory", "my_models:make_ranker").out


@pytest.mark.slow
def test_another_process_with_other_code(mine: Path) -> None:
    shutil.copy(own_modules.__file__, "my_models.py")
    assert "identical" in run("verify", "mine", "--retrace", ZOO_FACTORIES="my_models:make_ranker").out
    text = Path("my_models.py").read_text()
    Path("my_models.py").write_text(text.replace("nn.GELU()", "nn.ReLU()"))
    run("verify", "mine", "--factory", "my_models:make_ranker").failed(4)
    Path("my_models.py").write_text(text.replace("self.head =", "self.tail ="))
    run("verify", "mine", "--factory", "my_models:make_ranker").failed(3, "missing tail.weight")
    Path("my_models.py").unlink()
    run("verify", "mine", "--factory", "my_models:make_ranker").failed(2, "No module named 'my_models'")


def test_code_in_a_model_directory_is_not_found(mine: Path, monkeypatch: pytest.MonkeyPatch, zoo: Zoo) -> None:
    """A downloaded directory may hold a file of the name that the user has allowed."""
    Path("my_models.py").rename(mine / "my_models.py")
    monkeypatch.chdir(mine)
    zoo("verify", ".", "--factory", "my_models:make_ranker").failed(2, "No module named 'my_models'")
    monkeypatch.syspath_prepend(Path.cwd())
    zoo("verify", ".", "--factory", "my_models:make_ranker").failed(2, "code in a model directory is not run")
    assert not Path("IMPORTED").exists()


@pytest.mark.parametrize("package", [True, False])
def test_a_model_directory_is_no_package(
    package: bool, mine: Path, importable: None, seal: Callable[[Path], None]
) -> None:
    """Its name, with that of a file in it, is the name of a module for Python."""
    reference = "mine.inner.code:make" if package else "mine.code:make"
    content = json.loads((mine / "config.json").read_text())
    content["config"]["factory"] = reference
    (mine / "config.json").write_text(json.dumps(content))
    seal(mine)
    (mine / "inner").mkdir()
    for file in ("__init__.py", "code.py", "inner/__init__.py", "inner/code.py")[0 if package else 1 :]:
        (mine / file).write_text(TRAP)
    with library.allow_factories(reference), pytest.raises(UsageError, match="code in a model directory is not run"):
        create.build_on_meta(ModelDirectory.open(mine, weights=False).spec)
    assert not Path("IMPORTED").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factory", "my_models"),
        ("factory", "../my_models:make"),
        ("factory", 3),
        ("arguments", [1]),
        ("declared", [3]),
        ("declared", [{}]),
        ("declared", [{"inputs": [{"name": "x", "dims": ["batch"]}], "outputs": [], "method": "__init__"}]),
        ("declared", [{"inputs": [{"name": "x", "dims": "batch"}], "outputs": []}]),
        ("declared", [{"inputs": [{"name": "x", "dims": ["batch", "+".join(["a"] * 10_000)]}], "outputs": []}]),
        ("declared", [{"inputs": [{"name": "x", "num_layers": 10**9, "num_heads": 1, "head_dim": 1}], "outputs": []}]),
        ("num_parameters", -1),
    ],
)
def test_damaged_configurations(
    field: str, value: Any, mine: Path, importable: None, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    content = json.loads((mine / "config.json").read_text())
    content["config"][field] = value
    (mine / "config.json").write_text(json.dumps(content))
    seal(mine)
    zoo("show", mine).failed(3, "config.json")
    assert not Path("IMPORTED").exists()
