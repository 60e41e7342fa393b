"""A fresh environment outside the checkout, with zoo's wheel and, on demand, third-party plugins."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, THIRD_PARTY


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*pip, str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment with only the wheel installed; dependencies come from the current environment."""
    return make_environment(tmp_path_factory.mktemp("environment"), wheel)


def make_environment(folder: Path, wheel: Path) -> Path:
    """Create such an environment in a folder."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    own = Path(next((folder / "lib").glob("python*"))) / "site-packages"
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture(scope="module")
def sliding(environment: Path) -> None:
    """Install a third-party architecture with pip."""
    install(environment, "zoo-sliding")


@pytest.fixture(scope="module")
def pt2(environment: Path) -> None:
    """Install a third-party exporter with pip."""
    install(environment, "zoo-pt2")


@pytest.fixture(scope="module", params=["aft", "decoding", "mixer", "scores"])
def described(environment: Path, request: pytest.FixtureRequest) -> str:
    """Install each third-party distribution that has its own tests with pip."""
    install(environment, f"zoo-{request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def scores(environment: Path) -> None:
    """Install a task and a command without an architecture with pip."""
    install(environment, "zoo-scores")


@pytest.fixture(scope="module")
def g2p(environment: Path) -> None:
    """Install an architecture with an importer and a task with pip."""
    install(environment, "zoo-g2p")


def install(environment: Path, distribution: str) -> None:
    pip = [environment / "bin" / "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, THIRD_PARTY / distribution], check=True)


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of the fresh environment in an empty directory."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ZOO"))}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    variables["XDG_CONFIG_HOME"] = str(tmp_path / "config")

    def call(*command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done

    return call
