"""The files of inputs of a batch: on this machine, or wherever fsspec reaches."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError, UsageError
from zoo.storage import scratch_folder
from zoo.tables import JSON, LINES, PARQUET, TABLES
from zoo_runtime.batch.plan import Shard
from zoo_runtime.batch.urls import base_name, file_system, is_url, local, remote_errors

__all__ = ["fetched", "find_shards", "is_batch"]

_WRITTEN = (*LINES, PARQUET)
_READ = (*_WRITTEN, JSON, *TABLES, ".txt")


def is_batch(text: str) -> bool:
    """Return whether inputs are a pattern, a folder or a URL, and not one file of this machine."""
    if text.startswith("file://") or is_url(text) or text.endswith("/"):
        return True
    return Path(text).is_dir() or (glob.has_magic(text) and not Path(text).exists())


def target_name(name: str) -> str:
    """Return the name of the results of a file of inputs."""
    path = Path(name)
    return name if path.suffix.lower() in _WRITTEN else f"{path.stem}.jsonl"


def find_shards(inputs: str, output: str) -> list[Shard]:
    """Return the files of inputs, sorted by name.

    Args:
        inputs: a file, a folder, or a pattern such as ``corpus/*.parquet``; a path or a URL. In a folder, names that
            begin with a dot or an underscore are skipped.
        output: the folder of results.

    Raises:
        ArtifactError: there are no such files, or one is not a file of inputs, or not a regular file.
        UsageError: two files have the same name, or results would be written among the inputs.
    """
    option = f"--input {inputs}"
    files, folder = _remote_files(inputs) if is_url(inputs) else _local_files(local(inputs))
    if not files:
        raise ArtifactError("no files", option)
    shards: dict[str, Shard] = {}
    for source, size, changed in sorted(files):
        name = source.rpartition("/")[2]
        if size is None:
            raise ArtifactError(f"not a regular file ({name})", option, "remove it, or match other files")
        if Path(name).suffix.lower() not in _READ:
            remedy = f"give a pattern such as '{inputs.rstrip('/')}/*.jsonl'" if folder else "match other files"
            raise ArtifactError(f"not a file of inputs ({name})", option, f"{remedy}; known: {', '.join(_READ)}")
        target = target_name(name)
        if target in shards:
            problem = f"{shards[target].source} and {source} would both become {target}"
            raise UsageError(problem, option, "run them into different folders")
        shards[target] = Shard(source=source, target=target, size=size, changed=changed)
    if folder and _is_inside(output, inputs):
        raise UsageError("results would be written into the folder of inputs", f"--output {output}", "choose another")
    if any(_is_inside(output, shard.source.rpartition("/")[0] or "/", same=True) for shard in shards.values()):
        raise UsageError("results would be written among the inputs", f"--output {output}", "choose another folder")
    return list(shards.values())


def _is_inside(output: str, folder: str, *, same: bool = False) -> bool:
    """Return whether a folder is another one or, unless ``same``, in it."""
    if is_url(output) != is_url(folder):
        return False
    if is_url(output):
        one, other = (fs.unstrip_protocol(place).rstrip("/") + "/" for fs, place in map(file_system, (output, folder)))
        return one == other or (not same and one.startswith(other))
    one_path, other_path = Path(local(output)).resolve(), Path(local(folder)).resolve()
    return one_path == other_path or (not same and one_path.is_relative_to(other_path))


def _local_files(inputs: str) -> tuple[list[tuple[str, int | None, str]], bool]:
    """Return the path, size and time of each file, and whether the inputs are a folder.

    The size is None for folders, pipes and others that are not regular files.
    """
    place = Path(inputs)
    try:
        if place.is_dir():
            paths = [path for path in place.iterdir() if not path.name.startswith((".", "_"))]
        elif place.exists():
            paths = [place]
        else:
            paths = [Path(name) for name in glob.glob(inputs, recursive=True)]  # noqa: PTH207  (takes absolute patterns)
            paths = [path for path in paths if not path.is_dir()]
        stats = [(os.path.abspath(path), path.stat()) for path in paths]  # noqa: PTH100  (resolve() follows links)
    except OSError as error:
        raise ArtifactError(f"cannot read {error.filename} ({error.strerror})", f"--input {inputs}") from error
    files = [
        (Path(path).as_posix(), info.st_size if stat.S_ISREG(info.st_mode) else None, str(info.st_mtime_ns))
        for path, info in stats
    ]
    return files, place.is_dir()


def _remote_files(inputs: str) -> tuple[list[tuple[str, int | None, str]], bool]:
    fs, place = file_system(inputs)
    with remote_errors(inputs, ArtifactError):
        folder = fs.isdir(place)
        if folder:
            infos: list[Mapping[str, Any]] = [
                info for info in fs.ls(place, detail=True) if not base_name(info["name"]).startswith((".", "_"))
            ]
        elif glob.has_magic(place):
            infos = [info for info in fs.glob(place, detail=True).values() if info["type"] != "directory"]
        else:
            infos = [fs.info(place)] if fs.exists(place) else []
        return [(fs.unstrip_protocol(info["name"]), _size(fs, info), _changed(info)) for info in infos], folder


def _size(fs: Any, info: Mapping[str, Any]) -> int | None:
    """Return the size of a file; None for folders, pipes and others that are not regular files."""
    if info["type"] == "other":  # a listing may not follow links
        info = fs.info(info["name"])
    return None if info["type"] in ("directory", "other") else int(info["size"] or 0)


def _changed(info: Mapping[str, Any]) -> str:
    names = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "updated", "created")
    return str(next((info[name] for name in names if info.get(name) is not None), ""))


@contextmanager
def fetched(source: str) -> Iterator[Path]:
    """Yield the path of a file of inputs, which is copied to this machine if it is elsewhere."""
    if not is_url(source):
        yield Path(local(source))
        return
    fs, place = file_system(source)
    with scratch_folder() as folder:
        path = folder / base_name(place)
        with remote_errors(source, ArtifactError):
            fs.get_file(place, str(path))
        yield path
