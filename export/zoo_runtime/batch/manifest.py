"""The manifest of a batch: JSON lines, the first about the run, then one for each shard that is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zoo.artifact.weights import parse_json
from zoo.errors import ArtifactError, UsageError, argument
from zoo_runtime.batch.folders import MANIFEST, OutputFolder, is_temporary
from zoo_runtime.batch.plan import Done, Plan, Shard
from zoo_runtime.files.run_record import difference

__all__ = ["Manifest"]

_SCHEMA = 1
_FIELDS = {"results": str, "size": int, "changed": str, "rows": int, "failed": int, "bytes": int, "sha256": str}
"""Fields of the line of a shard that are read, and their types."""


class Manifest:
    """The shards that are done, in the manifest of a folder that is locked.

    Raises:
        UsageError: the folder has files and the run is not ``resume``, or it has results of another model, of other
            options or of other versions.
        ArtifactError: the folder has files, but no manifest, or one that is damaged.
    """

    def __init__(self, folder: OutputFolder, plan: Plan, output: str, *, resume: bool) -> None:
        self._folder = folder
        self._plan = plan
        self._digest = plan.digest()
        self._output = f"--output {output}"
        self.entries: dict[str, dict[str, Any]] = {}
        """The line of each shard that is done, by the name of its results."""
        sizes = {name: size for name, size in folder.sizes().items() if not is_temporary(name)}
        if sizes and not resume:
            raise UsageError("already has files", self._output, argument("resume", text="continue it with {}"))
        text = folder.read_manifest()
        lines = text[: text.rfind(b"\n") + 1]
        if sizes.keys() - {MANIFEST} and not text:  # an empty one is left by a run that could not write to it
            raise ArtifactError("has files, but not those of a batch", self._output, "choose another folder")
        self._read(lines)
        folder.write_manifest(lines)
        if not lines:
            folder.append_manifest(_line({"schema": _SCHEMA, **plan.identity()}))

    def _read(self, text: bytes) -> None:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = parse_json(line)
                if number == 1:
                    self._check(entry)
                elif entry["run"] != self._digest:
                    raise ValueError("it belongs to another run")
                elif lacking := [name for name, kind in _FIELDS.items() if type(entry[name]) is not kind]:
                    raise ValueError(f"{lacking[0]} is {entry[lacking[0]]!r}")
                else:
                    self.entries[entry["results"]] = entry
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                problem = f"the manifest is damaged in line {number} ({error})"
                raise ArtifactError(problem, f"{self._output}/{MANIFEST}", "choose another folder") from error

    def _check(self, head: Mapping[str, Any]) -> None:
        """Raise :class:`UsageError` unless the run is the same."""
        if head["schema"] != _SCHEMA:
            raise UsageError("the manifest is of another version of zoo", self._output, "choose another folder")
        identity = self._plan.identity()
        if (different := difference(head, identity)) is None:
            return
        problem = f"its results are of {different}"
        if head["model"] == identity["model"]:
            raise UsageError(problem, self._output, "repeat the options of its first run, or choose another folder")
        if self._plan.draft is not None:
            problem += f", or of a change in {self._plan.draft}"
        raise UsageError(problem, self._output, "run that model, or choose another folder")

    def is_done(self, shard: Shard, sizes: Mapping[str, int]) -> bool:
        """Return whether a shard is done, and neither its inputs nor its results have changed since.

        Raises :class:`ArtifactError` if the results have another size than the manifest says.
        """
        entry = self.entries.get(shard.target)
        if entry is None or shard.target not in sizes:
            return False
        if (entry["size"], entry["changed"]) != (shard.size, shard.changed):
            return False
        if sizes[shard.target] != entry["bytes"]:
            problem = f"was changed after it was written: {sizes[shard.target]} bytes instead of {entry['bytes']}"
            raise ArtifactError(problem, f"{self._output}/{shard.target}", "remove it, to have it written again")
        return True

    def add(self, shard: Shard, done: Done) -> None:
        """Record a shard whose results are in the folder."""
        entry = {
            "input": shard.source.rpartition("/")[2],
            "size": shard.size,
            "changed": shard.changed,
            "results": shard.target,
            "rows": done.rows,
            "failed": done.failed,
            "bytes": done.size,
            "sha256": done.sha256,
            "run": self._digest,
        }
        self._folder.append_manifest(_line(entry))
        self.entries[shard.target] = entry


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"
