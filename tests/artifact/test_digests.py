"""Cached digests: files are hashed once, and every change is noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zoo import adapt, load, memo
from zoo.artifact import ModelDirectory, copy_model, digests
from zoo.errors import ArtifactError

Build = Callable[..., Path]
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("digests")
    monkeypatch.setenv(memo.VARIABLE, str(folder))
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the names of hashed files. All files but the smallest count as large, and as unchanged for long enough."""
    names: list[str] = []
    compute = digests.digest_file

    def count(path: Path) -> str:
        names.append(path.name)
        return compute(path)

    monkeypatch.setattr(digests, "digest_file", count)
    monkeypatch.setattr(digests, "LARGE", 100_000)
    monkeypatch.setattr(digests, "SETTLED", 0)
    yield names


def flip(path: Path) -> None:
    """Flip the last byte in place."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def test_second_load_uses_cached_digests(copy_of: Build, read: list[str]) -> None:
    model = copy_of("gpt-tiny")
    load(model)
    assert WEIGHTS in read
    read.clear()
    load(model)
    assert WEIGHTS not in read
    assert "config.json" in read


def test_copy_is_read_once(copy_of: Build, read: list[str]) -> None:
    model = copy_of("gpt-tiny")
    ModelDirectory.open(model)
    shutil.copytree(model, "copy")
    for expected in (True, False):
        read.clear()
        ModelDirectory.open("copy")
        assert (WEIGHTS in read) is expected


@pytest.mark.parametrize("hidden", [False, True], ids=["changed", "with its time put back"])
def test_changed_byte_is_detected(copy_of: Build, read: list[str], hidden: bool) -> None:
    model = copy_of("gpt-tiny")
    ModelDirectory.open(model)
    before = (model / WEIGHTS).stat()
    flip(model / WEIGHTS)
    if hidden:
        os.utime(model / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (model / WEIGHTS).stat().st_mtime_ns == before.st_mtime_ns
    for _ in range(2):
        with pytest.raises(ArtifactError, match="altered"):
            ModelDirectory.open(model)


def test_replaced_file_is_detected(copy_of: Build, read: list[str]) -> None:
    model = copy_of("gpt-tiny")
    ModelDirectory.open(model)
    shutil.copy2(model / WEIGHTS, "other")
    flip(Path("other"))
    os.utime("other", ns=((model / WEIGHTS).stat().st_atime_ns, (model / WEIGHTS).stat().st_mtime_ns))
    Path("other").replace(model / WEIGHTS)
    with pytest.raises(ArtifactError, match="altered"):
        ModelDirectory.open(model)


def test_truncated_file_is_detected(copy_of: Build, read: list[str]) -> None:
    """A process that maps it would be killed when reading past the end."""
    model = copy_of("gpt-tiny")
    ModelDirectory.open(model)
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 1)
    with pytest.raises(ArtifactError, match="the manifest says"):
        ModelDirectory.open(model)


def test_rehashing_detects_changes_without_new_metadata(
    copy_of: Build, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk changes bytes in this way. The finding is remembered."""
    model = copy_of("gpt-tiny")
    stay: Any = lambda path, status: [str(path)]  # noqa: E731
    monkeypatch.setattr(digests, "_facts", stay)
    ModelDirectory.open(model)
    flip(model / WEIGHTS)
    ModelDirectory.open(model)
    for rehash in (True, False):
        with pytest.raises(ArtifactError, match="altered"):
            ModelDirectory.open(model, rehash=rehash)


@pytest.mark.parametrize("copy", [partial(copy_model, force=False), adapt], ids=["copy_model", "adapt"])
def test_weights_are_read_in_full_before_they_are_copied(
    copy_of: Build, read: list[str], copy: Callable[[Path, Path], object]
) -> None:
    """Otherwise the new manifest would list the digest of damaged weights."""
    model = copy_of("gpt-tiny")
    ModelDirectory.open(model)
    read.clear()
    copy(model, Path("new"))
    assert WEIGHTS in read


def test_recently_changed_file_is_read_again(copy_of: Build, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A further write might not change its modification time."""
    monkeypatch.setattr(digests, "SETTLED", 3_600_000_000_000)
    model = copy_of("gpt-tiny")
    for _ in range(2):
        read.clear()
        ModelDirectory.open(model)
        assert WEIGHTS in read


def test_file_changed_during_reading_is_read_again(
    copy_of: Build, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy_of("gpt-tiny")
    compute = digests.digest_file

    def touched(path: Path) -> str:
        digest = compute(path)
        os.utime(path)
        return digest

    monkeypatch.setattr(digests, "digest_file", touched)
    ModelDirectory.open(model)
    read.clear()
    ModelDirectory.open(model)
    assert WEIGHTS in read


@pytest.mark.parametrize("where", ["off", "a file"])
def test_without_a_cache_weights_are_read_each_time(
    copy_of: Build, read: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    Path("a file").touch()
    monkeypatch.setenv(memo.VARIABLE, where)
    model = copy_of("gpt-tiny")
    for _ in range(2):
        read.clear()
        load(model)
        assert WEIGHTS in read
