"""Commands import nothing from the working directory, write nowhere else than they should, and look up no host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.footprint import COMMANDS, KEPT, TARGETS, Place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloads a library and reads /proc")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, set[str]]:
    """Run all commands. Returns the place, and the files that they have written."""
    place = Place.make(tmp_path_factory.mktemp("place"))
    place.compile()
    before = place.files()
    place.run(COMMANDS)
    return place, place.files() - before


@pytest.mark.slow
def test_nothing_is_imported_from_the_working_directory(ran: tuple[Place, set[str]]) -> None:
    """Isolated mode ignores it and PYTHONPATH, in processes that zoo starts, too."""
    place, _ = ran
    assert list(place.events("trap")) == []


@pytest.mark.slow
def test_no_host_is_looked_up(ran: tuple[Place, set[str]]) -> None:
    """Neither Python nor a library resolves a name or connects to an address."""
    place, _ = ran
    assert list(place.events("host")) == []


@pytest.mark.slow
def test_only_targets_and_the_cache_are_written(ran: tuple[Place, set[str]]) -> None:
    """The home directory gets caches alone, and temporary files are removed."""
    place, new = ran
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
