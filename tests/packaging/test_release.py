"""The files of a release: the same bytes from every build, a list of what they are tested with, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def checkout(folder: Path, *, mode: int, time: int) -> Path:
    """Copy the tracked files, with one mode and time of change."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, path)
        path.chmod(mode | ((ROOT / name).stat().st_mode & 0o100))
        os.utime(path, (time, time))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_builds_have_the_same_bytes(tmp_path: Path) -> None:
    """Folder, date, umask and modes of a checkout leave no trace in the wheel and the source distribution."""
    made = []
    for name, mode, time, umask in (("one", 0o644, 1_500_000_000, 0o022), ("deeper/two", 0o600, 1_700_000_000, 0o077)):
        place = checkout(tmp_path / name, mode=mode, time=time)
        build = [sys.executable, "-m", "hatchling", "build", "-d", str(place / "dist")]
        subprocess.run(build, cwd=place, check=True, capture_output=True, umask=umask)
        made.append(files(place / "dist"))
    assert len(made[0]) == 2
    assert made[0] == made[1]


@pytest.mark.skipif(shutil.which("cyclonedx-py") is None, reason="cyclonedx-bom is not installed")
def test_release_lists_packages_and_hashes(tmp_path: Path) -> None:
    """The SBOM names zoo and every version of constraints.txt; SHA256SUMS has the hash of each file."""
    made = []
    here = {key: value for key, value in os.environ.items() if key != "GITHUB_REPOSITORY"}  # a fork may run the tests
    for name in ("one", "two"):
        place = checkout(tmp_path / name, mode=0o644, time=1_600_000_000)
        subprocess.run([place / ".ci/release", place / "dist"], env=here, check=True, capture_output=True)
        made.append(files(place / "dist"))
    assert made[0] == made[1]
    sums = dict(reversed(line.split("  ")) for line in made[0].pop("SHA256SUMS").decode().splitlines())
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in made[0].items()}
    listed = json.loads(made[0]["sbom.cdx.json"])
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == ("CycloneDX", "attention-zoo")
    pins = re.findall(r"^([\w.-]+)(?:\[\w+\])?==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {(part["name"], part["version"]) for part in listed["components"]} == set(pins)
    assert ("numpy", version("numpy")) in pins


def test_release_of_another_repository_is_refused(tmp_path: Path) -> None:
    """The addresses of the wheel must be those of the repository that builds it."""
    place = checkout(tmp_path / "clone", mode=0o644, time=1_600_000_000)
    address = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "someone/else"}
    done = subprocess.run(
        [place / ".ci/release", place / "dist"], env=os.environ | address, check=False, capture_output=True, text=True
    )
    assert (done.returncode, list((place / "dist").iterdir())) == (1, [])
    assert done.stderr == "[project.urls] of pyproject.toml is not https://github.com/someone/else\n"
