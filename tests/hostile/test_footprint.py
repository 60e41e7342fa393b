"""Commands import nothing from the working directory, write nowhere else than they should, and look up no host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.footprint import COMMANDS, KEPT, SHORT, TARGETS, Place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloads a library and reads /proc")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, set[str]]:
    """Run the first commands."""
    return _ran(Place.make(tmp_path_factory.mktemp("short")), SHORT)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, set[str]]:
    """Run all commands."""
    return _ran(Place.make(tmp_path_factory.mktemp("complete")), len(COMMANDS))


def _ran(place: Place, count: int) -> tuple[Place, set[str]]:
    place.compile()
    before = place.files()
    place.run(COMMANDS[:count])
    return place, place.files() - before


both = pytest.mark.parametrize("ran", ["short", pytest.param("complete", marks=pytest.mark.slow)])


@both
def test_nothing_is_imported_from_the_working_directory(ran: str, request: pytest.FixtureRequest) -> None:
    """Isolated mode ignores it and PYTHONPATH, in processes that zoo starts, too."""
    place, _ = request.getfixturevalue(ran)
    assert list(place.events("trap")) == []


@both
def test_no_host_is_looked_up(ran: str, request: pytest.FixtureRequest) -> None:
    """Neither Python nor a library resolves a name or connects to an address."""
    place, _ = request.getfixturevalue(ran)
    assert list(place.events("host")) == []


@both
def test_only_targets_and_the_cache_are_written(ran: str, request: pytest.FixtureRequest) -> None:
    """The home directory gets caches alone, and temporary files are removed."""
    place, new = request.getfixturevalue(ran)
    allowed = (*KEPT, *(f"work/{name}" for name in TARGETS))
    assert [path for path in sorted(new) if not path.startswith(allowed)] == []
    inside = (str(place.root), "/dev/", "/proc/self/")
    assert [path for path in place.events("write") if not path.startswith(inside) and "__pycache__" not in path] == []


def test_traps_and_the_audit_bite(tmp_path: Path) -> None:
    """Without isolated mode, the modules are imported; look-ups by Python and by a library are recorded."""
    place = Place.make(tmp_path)
    place.compile()
    place.python("-c", "import socket; socket.getaddrinfo('127.0.0.1', 80)")
    place.python("-c", f"open({str(tmp_path / 'elsewhere')!r}, 'w')")
    subprocess.run(
        [tmp_path / "env/bin/python", "-c", "import json"], cwd=place.work, env=place.environment, check=True
    )
    assert sum("getaddrinfo" in event for event in place.events("host")) == 1 + place.shim.exists()
    assert str(tmp_path / "elsewhere") in place.events("write")
    assert "json" in place.events("trap")
