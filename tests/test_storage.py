"""Atomic directories: after any failure or crash, exactly the old state or the new one exists."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import full, nth_call
from zoo import ArtifactError, StorageError, UsageError, storage
from zoo.errors import UnreadableError, ZooWarning
from zoo.storage import add_to_directory, new_directory, new_file, recover


def listing(files: dict[str, bytes]) -> bytes:
    """Return a manifest that lists these files."""
    entries = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    return json.dumps({"schema": 1, "files": entries}).encode()


KEPT = {"a.txt": b"old", "config.json": b"old"}
OLD = {**KEPT, "manifest.json": listing(KEPT)}
NEW = {"z.txt": b"new", "manifest.json": listing({**KEPT, "z.txt": b"new"})}
MERGED = {**OLD, **NEW}
TARGET = Path("target")


def owned(folder: Path) -> set[str]:
    """All files that these tests write."""
    return {*MERGED}


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Fill a directory."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read(folder: Path) -> dict[str, bytes | None]:
    """Return a directory's contents, including hidden files."""
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def names() -> list[str]:
    """Return the names in the current directory."""
    return sorted(path.name for path in Path().iterdir())


def make() -> None:
    """Create a new directory."""
    with new_directory(TARGET, force=False, owned=owned) as stage:
        write(stage, NEW)


def replace() -> None:
    """Replace an old directory."""
    with new_directory(TARGET, force=True, owned=owned) as stage:
        write(stage, NEW)


def add() -> None:
    """Add to an old directory."""
    with add_to_directory(TARGET) as stage:
        write(stage, NEW)


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system that cannot swap two directories atomically."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())


def test_new_directory_appears_complete() -> None:
    """Parents are created, and the name does not exist until the block ends."""
    target = Path("deep/er/target")
    with new_directory(target, force=False, owned=lambda path: None) as stage:
        write(stage, NEW)
        assert not target.exists()
    assert read(target) == NEW
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_forced_directory_replaces_all_old_files() -> None:
    """No old file remains."""
    write(TARGET, OLD)
    replace()
    assert read(TARGET) == NEW
    assert names() == ["target"]


def test_addition_keeps_other_files() -> None:
    """Files with the same name are replaced, others kept."""
    write(TARGET, OLD)
    add()
    assert read(TARGET) == MERGED


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("operation", ["make", "replace", "add"])
def test_exception_in_the_block_changes_nothing(operation: str, error: type[BaseException]) -> None:
    """Its exception is propagated."""
    if operation != "make":
        write(TARGET, OLD)
    manager = add_to_directory(TARGET) if operation == "add" else new_directory(
        TARGET, force=True, owned=owned
    )  # fmt: skip
    with pytest.raises(error), manager as stage:
        write(stage, NEW)
        raise error
    assert not TARGET.exists() if operation == "make" else read(TARGET) == OLD
    assert names() == ([] if operation == "make" else ["target"])


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link"])
def test_existing_target_is_rejected_without_force(kind: str) -> None:
    """Rejected before anything is written."""
    if kind == "directory":
        write(TARGET, OLD)
    elif kind == "file":
        TARGET.write_bytes(b"old")
    else:
        if kind == "link":
            write(Path("elsewhere"), OLD)
        TARGET.symlink_to("elsewhere")
    before = names()
    with pytest.raises(UsageError, match=r"^already exists: .*target: use force=True to replace it$"):
        make()
    assert names() == before


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_force_replaces_only_owned_targets(kind: str) -> None:
    """Links are neither followed nor replaced."""
    if kind == "file":
        TARGET.write_bytes(b"old")
    elif kind == "directory":
        write(TARGET, OLD)
    else:
        write(Path("elsewhere"), OLD)
        TARGET.symlink_to("elsewhere")
    with (
        pytest.raises(UsageError, match="exists and is not a model directory"),
        new_directory(TARGET, force=True, owned=lambda path: None),
    ):
        pass
    assert TARGET.read_bytes() == b"old" if kind == "file" else read(TARGET) == OLD
    assert TARGET.is_symlink() == (kind == "link")


@pytest.mark.parametrize("target", [".", "..", "../../target", "link/.."])
@pytest.mark.parametrize("force", [False, True])
def test_current_directory_is_not_replaced(target: str, force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a parent: the shell that calls a command would be left in a deleted directory."""
    inside = TARGET / "inside"
    inside.mkdir(parents=True)
    (inside / "link").symlink_to("../inside", target_is_directory=True)
    write(TARGET, OLD)
    monkeypatch.chdir(inside)
    with (
        pytest.raises(UsageError, match=r"is or contains the current directory: .*: run this from its parent"),
        new_directory(Path(target), force=force, owned=lambda path: {*OLD, "inside/link", "link"}),
    ):
        pass
    assert Path.cwd().exists()
    assert read(Path("..")) == {**OLD, "inside": None}


def test_target_that_appears_meanwhile_is_kept() -> None:
    """Another writer finished first."""
    with pytest.raises(UsageError, match="already exists"):  # noqa: SIM117  (the error leaves the inner block)
        with new_directory(TARGET, force=False, owned=owned) as stage:
            write(stage, NEW)
            write(TARGET, OLD)
    assert read(TARGET) == OLD
    assert names() == ["target"]


@pytest.mark.parametrize("operation", [make, replace, add])
def test_files_are_synced_before_renaming(operation: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and stage are synchronised first, the parent directory last."""
    prepare(operation)
    synchronised: list[int] = []
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synchronised.append(os.fstat(file).st_ino), original(file))[1])
    operation()
    files = {(TARGET / name).stat().st_ino for name in NEW}
    parent = TARGET if operation is add else Path()
    assert set(synchronised[:2]) == files
    assert synchronised[-1] == parent.stat().st_ino
    if operation is not add:
        assert synchronised[2] == TARGET.stat().st_ino


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000])
def test_modes_follow_the_umask(mask: int) -> None:
    """Whatever mode the writer gave the files."""
    previous = os.umask(mask)
    try:
        with new_directory(TARGET, force=False, owned=owned) as stage:
            write(stage, NEW)
            (stage / "z.txt").chmod(0o600)
            (stage / "sub").mkdir(mode=0o700)
            (stage / "sub" / "deep.txt").write_bytes(b"")
            (stage / "sub" / "deep.txt").chmod(0o600)
        with add_to_directory(TARGET) as stage:
            (stage / "c.txt").write_bytes(b"")
            (stage / "c.txt").chmod(0o777)
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (TARGET, *TARGET.rglob("*"))}
    files = dict.fromkeys(("z.txt", "c.txt", "manifest.json", "deep.txt"), 0o666 & ~mask)
    assert modes == {**files, **dict.fromkeys(("target", "sub"), 0o777 & ~mask)}


def attempts(
    operation: Callable[[], None], call: str, action: Callable[[], None]
) -> Iterator[tuple[int, StorageError | None]]:
    """Repeat ``operation`` with the first, second, ... call of a function failing, until none is left."""
    for number in itertools.count(1):
        prepare(operation)
        error = None
        with nth_call(call, number, action) as calls:
            try:
                operation()
            except StorageError as caught:
                error = caught
        if len(calls) < number:
            assert error is None
            assert number > 1, f"{call} is never called"
            return
        yield number, error


def prepare(operation: Callable[[], None]) -> None:
    """Create an empty directory, or one with an old target."""
    for path in Path().iterdir():
        shutil.rmtree(path)
    if operation is not make:
        write(TARGET, OLD)


@pytest.mark.parametrize(
    ("operation", "call", "exchange"),
    [
        *((make, call, True) for call in ("mkdir", "Path.open", "os.open", "fsync", "rename")),
        *((replace, call, True) for call in ("mkdir", "Path.open", "os.open", "fsync")),
        *((replace, call, False) for call in ("fsync", "rename")),
    ],
)
def test_full_disk_leaves_the_old_state(
    operation: Callable[[], None], call: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call fails: a storage error, the old state, and no stage."""
    if not exchange:
        without_exchange(monkeypatch)
    for number, error in attempts(operation, call, full):
        assert error is not None, f"{call} {number} was swallowed"
        assert error.exit_code == 6
        assert str(error).startswith("cannot write (No space left on device): ")
        assert str(error).endswith("target: free some space")
        assert names() == ([] if operation is make else ["target"]), f"{call} {number}"
        assert operation is make or read(TARGET) == OLD, f"{call} {number}"


@pytest.mark.filterwarnings("ignore::zoo.errors.ZooWarning")
@pytest.mark.parametrize("call", ["mkdir", "Path.open", "os.open", "fsync", "rename", "replace"])
def test_full_disk_leaves_an_addition_complete_or_undone(call: str) -> None:
    """After an error the old files remain. After success the next process finds the new ones, and nothing else."""
    for number, error in attempts(add, call, full):
        recover(TARGET)
        assert read(TARGET) == (MERGED if error is None else OLD), f"{call} {number}"


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("replace", 1, r"^target is written, but the next command that opens it must finish moving files \(No space"),
        ("unlink", 1, r"^target/a\.txt is no longer used, but cannot be removed \(No space left on device\)$"),
    ],
)
def test_addition_that_cannot_be_undone_warns(call: str, number: int, message: str) -> None:
    """Its files are committed: an error would be false."""
    write(TARGET, OLD)
    with (
        pytest.warns(ZooWarning, match=message),
        nth_call(call, number, full),
        add_to_directory(TARGET, lambda stage: ["a.txt"]) as stage,
    ):
        write(stage, NEW)
    recover(TARGET)
    assert {**read(TARGET), "a.txt": None} == {**MERGED, "a.txt": None}


def test_file_that_may_not_survive_a_power_failure_warns() -> None:
    """It is complete, and cannot be undone where it replaced another."""
    target = Path("notes.json")
    with (
        pytest.warns(ZooWarning, match=r"notes\.json is written, but a power failure may undo that \(No space"),
        nth_call("fsync", 3, full),
        new_file(target, force=False) as path,
    ):
        path.write_text("new")
    assert names() == ["notes.json"]


@contextlib.contextmanager
def without_privileges(work: Callable[[], None]) -> Iterator[Path]:
    """Run a function in a process that is not root's, in a folder that every user may enter. Yields the folder."""
    with tempfile.TemporaryDirectory() as place:  # others may not enter pytest's own
        Path(place).chmod(0o777)
        process = os.fork()
        if process == 0:
            try:
                os.chdir(place)
                if os.geteuid() == 0:
                    os.setuid(65534)
                work()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        yield Path(place)


def test_read_only_folders_are_replaced() -> None:
    """Their owner, here not root, may remove them after a change of their mode."""

    def replace_twice() -> None:
        for number in range(2):
            with new_directory(TARGET, force=True, owned=lambda folder: {"sub/a.txt"}) as stage:
                write(stage / "sub", {"a.txt": b"%d" % number})
            (TARGET / "sub").chmod(0o555)

    with without_privileges(replace_twice) as place:
        assert [path.name for path in place.iterdir()] == ["target"]
        assert read(place / "target/sub") == {"a.txt": b"1"}


def test_no_stage_is_left_under_a_umask_that_forbids_everything() -> None:
    """The directory itself follows the umask, so that it cannot be filled."""

    def fail() -> None:
        os.umask(0o777)
        with (
            pytest.raises(StorageError, match="Permission denied"),
            new_directory(TARGET, force=True, owned=owned) as stage,
        ):
            write(stage, NEW)
        tempfile.tempdir = str(Path.cwd())
        with storage.scratch_folder() as folder:
            (folder / "file").touch()

    with without_privileges(fail) as place:
        assert list(place.iterdir()) == []


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        *((make, call) for call in ("mkdir", "Path.open", "os.open", "fsync", "rename")),
        *((replace, call) for call in ("mkdir", "Path.open", "os.open", "fsync", "unlink", "rmdir")),
        *((add, call) for call in ("mkdir", "Path.open", "os.open", "fsync", "rename", "replace", "rmdir")),
    ],
)
def test_killed_process_leaves_the_old_state_or_the_new(operation: Callable[[], None], call: str) -> None:
    """Whichever call it dies in; the next process cleans up."""
    for number in itertools.count(1):
        prepare(operation)
        if not dies(operation, call, number):
            assert number > 1, f"{call} is never called"
            break
        if operation is add:
            recover(TARGET)
            assert visible(TARGET) in (OLD, MERGED), f"{call} {number}"
            add()
            assert read(TARGET) == MERGED
        else:
            states = (None, NEW) if operation is make else (OLD, NEW)
            assert (visible(TARGET) if TARGET.exists() else None) in states, f"{call} {number}"
            replace()
            assert read(TARGET) == NEW
            assert names() == ["target"]


def test_killed_process_loses_nothing_without_atomic_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is missing for a moment; the next process restores the old one, even if its own operation fails."""
    without_exchange(monkeypatch)
    for number in itertools.count(1):
        prepare(replace)
        if not dies(replace, "rename", number):
            assert number > 2
            break
        with (
            contextlib.suppress(ZeroDivisionError),
            new_directory(TARGET, force=True, owned=owned),
        ):
            raise ZeroDivisionError
        assert (visible(TARGET) if TARGET.exists() else None) in (OLD, NEW), f"rename {number}"


def dies(operation: Callable[[], None], call: str, number: int) -> bool:
    """Run ``operation`` in a subprocess that exits immediately before the ``number``-th call of a function."""
    process = os.fork()
    if process == 0:
        try:
            with nth_call(call, number, lambda: os._exit(9)):
                operation()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, 9)
    return status == 9


def visible(folder: Path) -> dict[str, bytes | None]:
    """Return a directory's contents, except abandoned stages."""
    return {name: content for name, content in read(folder).items() if not name.startswith(".")}


def write_stage(stage: Path) -> None:
    """Write what a killed writer leaves."""
    write(stage, {".zoo": b""})
    write(stage / "content", NEW)


@pytest.mark.parametrize("target", ["target", "m[1]", "a*b", "a**b", "?"])
def test_only_abandoned_stages_are_removed(target: str) -> None:
    """Only stages of this target, whose name may contain any character."""
    dead, live, other = (
        Path(name) for name in (f".{target}.zoo-stage-0", f".{target}.zoo-stage-1", ".other.zoo-stage-0")
    )
    for path in (dead, live, other):
        write_stage(path)
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with new_directory(Path(target), force=False, owned=owned) as stage:
            write(stage, NEW)
        assert names() == sorted([target, live.name, other.name])
    finally:
        os.close(lock)
    assert read(Path(target)) == NEW


def test_abandoned_stages_inside_a_directory_are_removed() -> None:
    """The next addition removes them."""
    write(TARGET, OLD)
    write_stage(TARGET / ".zoo-stage-0")
    (TARGET / ".zoo-stage-1").mkdir()  # killed before the marker was written
    add()
    assert read(TARGET) == MERGED


def test_folders_named_like_stages_are_kept() -> None:
    """Only zoo's own stages have its marker."""
    for parent, prefix, operation in ((TARGET, "", add), (Path(), ".target", replace)):
        prepare(replace)
        mine = parent / f"{prefix}.zoo-stage-12345678"
        write(mine, {"notes.txt": b"mine"})
        operation()
        assert read(mine) == {"notes.txt": b"mine"}
    write(TARGET / ".zoo-stage-12345678", {"notes.txt": b"mine"})
    with pytest.raises(UsageError, match=r"other than those zoo wrote \(\.zoo-stage-12345678/\)"):
        replace()
    assert read(TARGET / ".zoo-stage-12345678") == {"notes.txt": b"mine"}


def test_new_stage_is_safe_from_other_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of the same target arrives just after a stage was created."""
    original = Path.mkdir
    visitors: list[threading.Thread] = []
    visited: list[bool] = []

    def visit() -> None:
        replace()
        visited.append(True)

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        original(path, *arguments, **options)
        if ".zoo-stage-" in path.name and not visitors:
            visitors.append(threading.Thread(target=visit, daemon=True))
            visitors[0].start()
            visitors[0].join(timeout=0.2)  # finished by now, unless it must wait for us

    monkeypatch.setattr(Path, "mkdir", mkdir)
    replace()
    visitors[0].join(timeout=10)
    assert visited == [True]
    assert read(TARGET) == NEW
    assert names() == ["target"]


def test_link_that_looks_like_a_stage_is_not_followed() -> None:
    """Sweeping does not leave the directory."""
    write(Path("elsewhere"), OLD)
    Path(".target.zoo-stage-0").symlink_to("elsewhere")
    make()
    assert read(Path("elsewhere")) == OLD
    assert read(TARGET) == NEW


def test_link_that_looks_like_a_commit_is_not_followed() -> None:
    """An untrusted directory must not move files from elsewhere."""
    write(Path("elsewhere"), NEW)
    write(TARGET, OLD)
    (TARGET / ".zoo-commit").symlink_to(Path("elsewhere").absolute())
    with pytest.raises(ArtifactError, match=r"by zoo \(not a directory\): target/\.zoo-commit: move it elsewhere$"):
        recover(TARGET)
    assert read(Path("elsewhere")) == NEW
    assert visible(TARGET) == OLD


def test_committed_addition_is_finished() -> None:
    """The manifest moves last: until then the old one does not list the new files."""
    write(TARGET, OLD)
    write(TARGET / ".zoo-commit", NEW)
    moved: list[str] = []
    original = Path.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, to: (moved.append(path.name), original(path, to))[1])
        recover(TARGET)
    assert moved == ["z.txt", "manifest.json"]
    assert read(TARGET) == MERGED
    recover(TARGET)
    assert read(TARGET) == MERGED


@pytest.mark.parametrize(
    ("staged", "reason"),
    [
        ({"z.txt": b"new"}, "missing: target/.zoo-commit/manifest.json"),
        ({**NEW, "manifest.json": b"{}"}, "not a manifest: target/.zoo-commit/manifest.json"),
        ({**NEW, "z.txt": b"NEW"}, "z.txt is not the file that its manifest.json lists"),
        ({**NEW, "y.txt": b"new"}, "y.txt is not the file that its manifest.json lists"),
        ({"manifest.json": NEW["manifest.json"]}, "z.txt is missing"),
        (
            {"notes.txt": b"new", "manifest.json": listing({**KEPT, "notes.txt": b"new"})},
            "notes.txt would replace a file that is not in the manifest",
        ),
    ],
)
def test_files_that_zoo_did_not_stage_are_not_moved(staged: dict[str, bytes], reason: str) -> None:
    """A directory from elsewhere, or a user's own folder, may contain a .zoo-commit."""
    write(TARGET, {**OLD, "notes.txt": b"mine"})
    write(TARGET / ".zoo-commit", staged)
    for operation in (lambda: recover(TARGET), add):
        with pytest.raises(ArtifactError) as caught:
            operation()
        assert str(caught.value).startswith(f"not a complete addition by zoo ({reason}")
        assert str(caught.value).endswith("): target/.zoo-commit: move it elsewhere")
    assert visible(TARGET) == {**OLD, "notes.txt": b"mine"}
    assert read(TARGET / ".zoo-commit") == staged


def test_link_among_committed_files_is_not_moved() -> None:
    """Even if it leads to a file with the listed content."""
    write(TARGET, OLD)
    write(TARGET / ".zoo-commit", NEW)
    write(Path("elsewhere"), NEW)
    (TARGET / ".zoo-commit/z.txt").unlink()
    (TARGET / ".zoo-commit/z.txt").symlink_to(Path("elsewhere/z.txt").absolute())
    with pytest.raises(ArtifactError, match=r"z\.txt is not the file"):
        recover(TARGET)
    assert visible(TARGET) == OLD


UNWRITABLE = [Path("file/target"), Path("file/deeper/target"), Path("/proc/target"), Path("x" * 250), Path("x" * 300)]


@pytest.mark.parametrize("target", UNWRITABLE, ids=["file", "below", "proc", "long stage", "long name"])
def test_unwritable_target_is_a_storage_error(target: Path) -> None:
    """The check needs no permissions, so it works for root, too."""
    Path("file").write_bytes(b"old")
    with (
        pytest.raises(StorageError, match=r"^cannot write \(") as caught,
        new_directory(target, force=True, owned=owned),
    ):
        pass
    assert str(target) in str(caught.value)
    assert names() == ["file"]
    assert Path("file").read_bytes() == b"old"


def test_targets_that_cannot_be_written_are_refused_at_once() -> None:
    """Commands check the target before they compute."""
    Path("file").write_text("old")
    for place in (Path("file/new"), Path("file/folder/new"), Path("file").absolute() / "new"):
        with pytest.raises(StorageError, match=r"^cannot write \(Not a directory\): .*new"):
            storage.check_file_target(place, force=False)
        with pytest.raises(StorageError, match=r"^cannot write \(Not a directory\): .*new"):
            storage.check_target(place, force=False, owned=owned)
    storage.check_file_target(Path("new/folder/file"), force=False)
    assert names() == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root ignores permissions")
def test_targets_in_read_only_directories_are_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    with pytest.raises(StorageError, match="check the permissions"):
        storage.check_file_target(folder / "more/file", force=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root ignores permissions")
def test_forbidden_target_is_a_storage_error(tmp_path: Path) -> None:
    """A directory without write permission, and one without search permission."""
    for mode in (0o555, 0o000):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir(mode=mode)
        try:
            with (
                pytest.raises(StorageError, match="check the permissions"),
                new_directory(folder / "target", force=True, owned=owned),
            ):
                pass
        finally:
            folder.chmod(0o755)
        assert read(folder) == {}


def test_addition_to_a_missing_directory_is_a_storage_error() -> None:
    """The directory is not created."""
    with pytest.raises(StorageError, match="No such file or directory"):
        add()
    assert names() == []


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
@pytest.mark.parametrize("exists", [True, False])
def test_new_file_is_complete_or_absent(call: str, exists: bool, snapshot: Callable[[], object]) -> None:
    """A full disk leaves the old state and no temporary file."""
    target = Path("notes.json")
    if exists:
        target.write_text("old")
    before = snapshot()
    with (
        pytest.raises(StorageError, match="cannot write"),
        nth_call(call, 1, full),
        new_file(target, force=True) as path,
    ):
        path.write_text("new")
    assert snapshot() == before
    with new_file(target, force=True) as path:
        path.write_text("new")
        assert target.exists() == exists
    assert snapshot() == {"notes.json": b"new"}


def test_file_that_appears_meanwhile_is_kept() -> None:
    """The result is the same as if it had existed before."""
    with pytest.raises(UsageError, match="already exists"), new_file(Path("notes.json"), force=False) as path:
        path.write_text("new")
        Path("notes.json").write_text("theirs")
    assert Path("notes.json").read_text() == "theirs"


def place_in(kind: str) -> contextlib.AbstractContextManager[Path]:
    """Begin to write TARGET."""
    if kind == "addition":
        write(TARGET, OLD)
        return add_to_directory(TARGET)
    return new_file(TARGET, force=False) if kind == "file" else new_directory(TARGET, force=False, owned=owned)


@pytest.mark.parametrize("kind", ["directory", "addition", "file"])
def test_errors_name_the_target(kind: str) -> None:
    """Errors name the directory that the user gave, not the stage beside it."""
    with pytest.raises(ArtifactError) as caught, place_in(kind) as place:
        raise ArtifactError("is wrong", place, f"correct {place}")
    assert str(caught.value) == "is wrong: target: correct target"


@pytest.mark.parametrize("kind", ["directory", "addition", "file"])
def test_staged_file_that_cannot_be_read_again_is_a_storage_error(kind: str) -> None:
    with pytest.raises(StorageError, match=r"^cannot read \(Permission denied\): target$"), place_in(kind) as place:
        raise UnreadableError("cannot read (Permission denied)", place)


def test_other_file_that_cannot_be_read_is_no_storage_error() -> None:
    with pytest.raises(UnreadableError, match=r"^cannot read \(Permission denied\): other$"), place_in("directory"):
        raise UnreadableError("cannot read (Permission denied)", "other")
