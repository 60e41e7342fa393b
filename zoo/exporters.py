"""Export to any format: the steps that are common to all exporters.

A plugin declares exporters with the hook ``zoo_exporters``; ONNX is one of them. An exporter's function receives a
:class:`Job`, writes plain files into its folder and returns the evidence for them: a JSON-serialisable mapping with
``verified``, whether the files were shown equal to the model, and ``reason`` if they were not::

    def export(job: Job) -> Mapping[str, Any]:
        write(zoo.load(job.model.path), job.folder / "model.xyz")
        return compare_runtime(job.model, partial(open_files, job.folder)).evidence  # from zoo_export

The model's digests are checked before the exporter runs. Its output goes to stderr, and its exceptions become a
:class:`PluginError` with its name. If the files do not equal the model, or their names are taken, nothing is written;
otherwise the files, the evidence and a new manifest are written together. This module never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo import plugins, storage
from zoo.artifact import MANIFEST, ModelDirectory, Record, entry_of, is_reserved, write_json
from zoo.artifact.digests import digest_file
from zoo.artifact.verdict import contradiction_in
from zoo.artifact.weights import load_json, plain_name
from zoo.config import Settings
from zoo.contract import Exporter
from zoo.errors import (
    DISK,
    EXPORT_AGAIN,
    ArtifactError,
    IncomparableError,
    ParityError,
    PluginError,
    UsageError,
    argument,
    storage_errors,
    values_of,
)
from zoo.plugins import Plugin
from zoo.registry import load_reference

__all__ = ["Job", "Progress", "export_to", "read_options", "verify_export"]

Progress = Callable[[int, int], None]
"""Called with the number of the next step and the number of steps."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The argument of an exporter's functions."""

    model: ModelDirectory
    """The model, already checked: ``.path`` for :func:`zoo.load`, ``.spec.graphs`` its graphs, ``.dtype`` its dtype."""
    folder: Path
    """An empty folder for the format's files or, when verifying, the model directory that contains them."""
    options: Any = None
    """An instance of the options class that the exporter declares; None if it declares none."""
    variant: str = ""
    """The ``.variant`` of the options. A model may have several variants of one format side by side."""
    progress: Progress | None = None
    """Called by slow steps unless None."""


def read_options(
    format: str, texts: Sequence[str], values: Mapping[str, Any] = MappingProxyType({})
) -> Settings | None:
    """Return an exporter's options from ``values``, overridden by ``KEY=VALUE`` texts.

    Raises :class:`UsageError` for an unknown key or a wrong value.
    """
    plugin, exporter = plugins.active().exporter(format)
    if exporter.options is None:
        if texts:
            raise UsageError(f"{format} has no options", f"--option {texts[0]}")
        return None
    cls = _options_class(plugin, exporter.options)
    with plugins.blame(plugin, f"cannot read options for {format}"):
        return cls.from_dict({**values, **cls.parse_settings(texts)}, "--option")


def export_to(
    directory: str | os.PathLike[str],
    format: str,
    *,
    options: Any = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Export a model directory to a format provided by a plugin.

    Args:
        directory: a model directory.
        format: the name of an exporter.
        options: the exporter's options; None for the defaults.
        force: replace an existing export to the same format; its files are deleted.
        progress: called before each comparison.

    Returns:
        The files and the evidence for them, as written.

    Raises:
        UsageError: the exporter is unknown, or the export or a file of another origin already exists.
        ArtifactError: the directory is not a valid model.
        PluginError: the exporter fails or violates its contract.
        ParityError: the export does not equal the model. Nothing is written after any failure.
    """
    directory = Path(directory)
    plugin, exporter = plugins.active().exporter(format)
    stored = ModelDirectory.open(directory)
    options = read_options(format, ()) if options is None else options
    record = _record(stored, exporter, getattr(options, "variant", ""))
    old = record.files
    if record.exists and not force:
        place = directory / (old or [record.evidence_file])[0]
        raise UsageError("already exported", place, EXPORT_AGAIN)
    function = load_reference(exporter.export, plugin)
    before = _listing(stored.path)
    with stored.adding(removed=old) as stage:
        job = Job(model=stored, folder=stage, options=options, variant=record.variant, progress=progress)
        evidence = _run(plugin, exporter, function, job)
        _check_changes(plugin, record, before)
        writes_evidence = exporter.evidence is not None
        if evidence["verified"] and (problem := contradiction_in(evidence, record.evidence_file)) is not None:
            raise PluginError(f"{plugin} returned evidence that contradicts itself ({problem})", directory)
        files = {
            name: digest_file(stage / name)
            for name in _check_stage(plugin, record, stage, own=writes_evidence, old=old)
        }
        if exporter.verifies and not evidence["verified"]:
            raise ParityError(_unequal(plugin, evidence), directory, "nothing was written")
        if not exporter.verifies and evidence["verified"]:
            raise PluginError(f"{plugin} declares verifies=False but returned verified=True", directory)
        if writes_evidence:
            written = load_json(stage / record.evidence_file)
            if (written.get("verified"), written.get("files")) != (evidence["verified"], files):
                raise PluginError(f"{plugin} wrote {record.evidence_file} that does not match its files", directory)
        else:
            write_json(stage / record.evidence_file, _complete(plugin, record, options, evidence, files))
    return _record(ModelDirectory.open(directory, weights=False), exporter, record.variant)


def verify_export(
    directory: str | os.PathLike[str], format: str, *, variant: str = "", progress: Progress | None = None
) -> Record:
    """Check every digest of an export, and have its exporter compare it with the model again.

    If the export was not verified before and now is, the new evidence is written. If it was and now is not, the
    evidence is marked as failed. Otherwise nothing is written.

    Raises:
        UsageError: the exporter is unknown or declares no ``verify``.
        ArtifactError: a file is altered or missing.
        PluginError: the exporter fails or violates its contract.
        ParityError: the export does not equal the model on this machine.
    """
    directory = Path(directory)
    plugin, exporter = plugins.active().exporter(format)
    if exporter.verify is None:
        raise UsageError(f"{plugin} does not verify an earlier export", argument("format", format), "export it again")
    stored = ModelDirectory.open(directory, rehash=True)
    record = _record(stored, exporter, variant)
    if not record.exists:
        raise ArtifactError(f"not exported to {format}", directory, f"zoo export {directory} --format {format}")
    if not record.files or set(record.files) != record.digests.keys():
        raise ArtifactError("lists files that are not in the manifest", directory / record.evidence_file)
    options = None
    if exporter.options is not None:
        values, place = record.evidence.get("options") or {}, directory / record.evidence_file
        if not isinstance(values, dict):
            raise ArtifactError(f"options must be an object, got {values!r:.80}", place)
        with plugins.blame(plugin, f"cannot read options for {format}"), values_of(place):
            options = _options_class(plugin, exporter.options).from_dict(values)
    function = load_reference(exporter.verify, plugin)
    job = Job(model=stored, folder=stored.path, options=options, variant=variant, progress=progress)
    try:
        evidence = _run(plugin, exporter, function, job)
        if evidence["verified"] is not True:
            raise ParityError(_unequal(plugin, evidence), directory)
    except IncomparableError:
        raise
    except ParityError as error:
        if exporter.evidence is not None:
            raise  # the exporter has marked its own evidence
        raise record.revoked(error) from error
    if exporter.evidence is None and not record.is_verified():
        with stored.adding(action="verified") as stage:
            files = {name: stored.files[name]["sha256"] for name in record.files}
            write_json(stage / record.evidence_file, _complete(plugin, record, options, evidence, files))
    record = _record(ModelDirectory.open(directory, weights=False), exporter, variant)
    record.check_files()
    return record


def _record(stored: ModelDirectory, exporter: Exporter, variant: str) -> Record:
    return Record(stored, variant, exporter.evidence or f"evidence.{exporter.name}")


def _options_class(plugin: Plugin, reference: str) -> type[Settings]:
    cls = load_reference(reference, plugin)
    if not (isinstance(cls, type) and issubclass(cls, Settings)):
        raise PluginError(f"{plugin}: {reference} is not a subclass of zoo.Settings")
    return cls


def _run(plugin: Plugin, exporter: Exporter, function: Callable[[Job], object], job: Job) -> Mapping[str, Any]:
    """Call a plugin's function and check that what it returns is evidence."""
    with plugins.blame(plugin, f"fails to export {job.model.path} to {exporter.name}"), contextlib.chdir("."):
        try:
            evidence = function(job)
        except OSError as error:
            if error.errno not in DISK:
                raise
            place = error.filename2 or error.filename  # of both, the one that is written
            ours = not isinstance(place, str) or Path(place).is_relative_to(job.folder)
            with storage_errors(job.model.path if ours else place):
                raise
        if not isinstance(evidence, Mapping) or type(evidence.get("verified")) is not bool:
            raise TypeError(f"evidence must be a mapping with a boolean 'verified', got {evidence!r:.200}")
        refused = exporter.verifies and not evidence["verified"]  # evidence that is not written may hold NaN
        plain: dict[str, Any] = json.loads(json.dumps(dict(evidence), allow_nan=refused))
    return plain


def _listing(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return each entry's inode, size and mtime, which show changes without reading the files."""
    entries = ((path.name, path.lstat()) for path in directory.iterdir() if not path.name.startswith(".zoo-"))
    return {name: (entry.st_ino, entry.st_size, entry.st_mtime_ns) for name, entry in entries}


def _check_changes(plugin: Plugin, record: Record, before: Mapping[str, tuple[int, int, int]]) -> None:
    """Raise if the directory has changed, except for files that other commands have added or replaced meanwhile."""
    stored = record.stored
    with storage.settled(stored.path):
        now = stored.current((record.evidence_file, *record.files))
        after = _listing(stored.path)
        stray = []
        for name in sorted({*before, *after} - {MANIFEST}):
            path, listed = stored.path / name, name in now or name in stored.files
            same = before.get(name) == after.get(name)
            if not same and not (listed and now.get(name) == (entry_of(path) if path.is_file() else None)):
                stray.append(name)
    if stray:
        raise PluginError(f"{plugin} changed {', '.join(stray)} outside of its folder", stored.path)


def _check_stage(plugin: Plugin, record: Record, stage: Path, *, own: bool, old: Sequence[str]) -> list[str]:
    """Return the names of the staged files. Raise if the exporter may not write one of them."""
    files = []
    for path in sorted(stage.iterdir()) if stage.is_dir() else ():
        if path.is_symlink() or not path.is_file() or not plain_name(path.name) or path.name.startswith("."):
            raise PluginError(f"{plugin} wrote {path.name!r}, which is not a plain file", record.stored.path)
        if own and path.name == record.evidence_file:
            continue
        place = record.stored.path / path.name
        taken = path.name not in old and os.path.lexists(place)
        if taken and path.name not in record.stored.files and not is_reserved(path.name):
            raise UsageError("exists and is not in the manifest", place, "move it elsewhere first")
        if taken or is_reserved(path.name):
            why = "which already exists" if taken else "which is a reserved name"
            raise PluginError(f"{plugin} wrote {path.name}, {why}", record.stored.path, "use another file name")
        files.append(path.name)
    if not files:
        raise PluginError(f"{plugin} wrote no file", record.stored.path)
    if own and not (stage / record.evidence_file).is_file():
        raise PluginError(f"{plugin} wrote no {record.evidence_file}", record.stored.path)
    return files


def _unequal(plugin: Plugin, evidence: Mapping[str, Any]) -> str:
    return f"{plugin} could not verify its export ({evidence.get('reason', 'no reason given')})"


def _complete(
    plugin: Plugin, record: Record, options: Settings | None, evidence: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """Add the facts that zoo records itself, which override the exporter's."""
    facts = {
        "schema": 1,
        "verified": evidence["verified"],
        "exporter": {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version},
        "options": options.to_dict() if options is not None else {},
        "files": dict(files),
        "config": record.stored.config_digest(),
        "weights": record.stored.weight_digests(),
    }
    return {**facts, **evidence, **facts}
