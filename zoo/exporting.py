"""Exports, to whatever format: what zoo does around an exporter, so that each has only its format to know.

A plugin declares exporters with the hook ``zoo_exporters``. ONNX is one of them. An exporter's function gets a
:class:`Job`, writes plain files into its folder and returns the evidence for them: a mapping that JSON can hold, in
which ``verified`` says whether the files were shown equal to the model, and ``reason`` why not::

    def export(job: Job) -> Mapping[str, Any]:
        write(zoo.load(job.model.path), job.folder / "model.xyz")
        return compare_runtime(job.model, partial(open_files, job.folder)).evidence  # of zoo_export

Before it runs, the model's digests are checked. What it prints goes to stderr, and what it raises is a
:class:`PluginError` with its name. Files that are not equal to the model, or not its own, are not written; the others
are, together with the evidence and a new manifest, all or none. This module never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo import plugins
from zoo.artifact import MANIFEST, ModelDirectory, Record, is_reserved, write_json
from zoo.config import Settings
from zoo.contract import Exporter
from zoo.errors import ArtifactError, ParityError, PluginError, StorageError, UsageError, storage_errors
from zoo.plugins import Plugin
from zoo.registry import load_reference
from zoo.weights import load_json, plain_name

__all__ = ["Job", "Progress", "export_to", "read_options", "verify_export"]

Progress = Callable[[int, int], None]
"""Called with the number of what comes next and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an exporter is asked to do."""

    model: ModelDirectory
    """The model, sound. ``.path`` is for :func:`zoo.load`, ``.spec.graphs`` are its graphs, ``.dtype`` its numbers."""
    folder: Path
    """Where the format's files lie: an empty folder to write them to, or, to verify them, the model's directory."""
    options: Any = None
    """What was chosen, of the class that the exporter declares; None where it declares none."""
    variant: str = ""
    """The ``.variant`` of the options: exports to one format that differ in it lie beside each other."""
    progress: Progress | None = None
    """To be called, where it is not None, by what takes long."""


def read_options(format: str, texts: Sequence[str]) -> Settings | None:
    """The options of an exporter from ``KEY=VALUE``. An unknown key or a wrong value is a :class:`UsageError`."""
    plugin, exporter = plugins.active().exporter(format)
    if exporter.options is None:
        if texts:
            raise UsageError(f"{format} has no options", f"--option {texts[0]}")
        return None
    cls = _options_class(plugin, exporter.options)
    with plugins.blame(plugin, f"cannot read options for {format}"):
        return cls.from_dict(cls.parse_settings(texts), "--option")


def export_to(
    directory: Path, format: str, *, options: Any = None, force: bool = False, progress: Progress | None = None
) -> Record:
    """Export a model directory to a format that some plugin provides.

    Args:
        directory: a model directory.
        format: the name of an exporter.
        options: what it lets people choose; its defaults where None.
        force: replace an earlier export to the same format. Its files vanish.
        progress: called with what is compared.

    Returns:
        The files and the evidence for them, as written.

    Raises:
        UsageError: there is no such exporter, or an export already.
        ArtifactError: the directory is not a sound model.
        PluginError: the exporter fails, or does not keep to its contract.
        ParityError: what it wrote is not equal to the model. Then, as in every failure, nothing is written.
    """
    plugin, exporter = plugins.active().exporter(format)
    stored = ModelDirectory.open(directory)
    options = read_options(format, ()) if options is None else options
    record = _record(stored, exporter, getattr(options, "variant", ""))
    old = record.files
    if record.exists and not force:
        place = directory / (old or [record.evidence_file])[0]
        raise UsageError("already exported", place, "use --force to export again")
    function = load_reference(exporter.export, plugin)
    before = _listing(stored.path)
    kept = {name: entry for name, entry in stored.files.items() if name not in (record.evidence_file, *old)}
    with stored.adding(kept) as stage:
        job = Job(model=stored, folder=stage, options=options, variant=record.variant, progress=progress)
        evidence = _run(plugin, exporter, function, job)
        _check_changes(plugin, stored, before)
        own = exporter.evidence is not None
        files = _check_stage(plugin, record, stage, own=own, old=old)
        if exporter.verifies and not evidence["verified"]:
            raise ParityError(_unequal(plugin, evidence), directory, "nothing was written")
        if not exporter.verifies and evidence["verified"]:
            raise PluginError(f"{plugin} declares that it does not verify, and says that it did", directory)
        if own:
            written = load_json(stage / record.evidence_file)
            if (written.get("verified"), written.get("files")) != (evidence["verified"], files):
                raise PluginError(f"{plugin} wrote {record.evidence_file} about other files than these", directory)
        else:
            write_json(stage / record.evidence_file, _complete(plugin, record, options, evidence, files))
    with storage_errors(directory):
        for name in set(old) - set(files):
            (stored.path / name).unlink(missing_ok=True)
    return _record(ModelDirectory.open(directory, weights=False), exporter, record.variant)


def verify_export(directory: Path, format: str, *, variant: str = "", progress: Progress | None = None) -> Record:
    """Check every digest of an export, and let its exporter compare it with the model again.

    Nothing is written when the export was verified before; else the evidence is, once there is some.

    Raises:
        UsageError: there is no such exporter, or it declares no ``verify``.
        ArtifactError: anything is altered or missing.
        PluginError: the exporter fails, or does not keep to its contract.
        ParityError: the export is not equal to the model, on this machine.
    """
    plugin, exporter = plugins.active().exporter(format)
    if exporter.verify is None:
        raise UsageError(f"{plugin} does not verify an earlier export", f"--format {format}", "export it again")
    stored = ModelDirectory.open(directory)
    record = _record(stored, exporter, variant)
    if not record.exists:
        raise ArtifactError(f"not exported to {format}", directory, f"zoo export {directory} --format {format}")
    if sorted(record.files) != record.evidence.get("files"):
        raise ArtifactError("lists files that are not in the manifest", directory / record.evidence_file)
    options = None
    if exporter.options is not None:
        with plugins.blame(plugin, f"cannot read options for {format}"):
            values = record.evidence.get("options") or {}
            options = _options_class(plugin, exporter.options).from_dict(values, directory / record.evidence_file)
    function = load_reference(exporter.verify, plugin)
    job = Job(model=stored, folder=stored.path, options=options, variant=variant, progress=progress)
    evidence = _run(plugin, exporter, function, job)
    if evidence["verified"] is not True:
        raise ParityError(_unequal(plugin, evidence), directory)
    if exporter.evidence is None and not record.is_verified():
        with stored.adding() as stage:
            write_json(stage / record.evidence_file, _complete(plugin, record, options, evidence, record.files))
    return _record(ModelDirectory.open(directory, weights=False), exporter, variant)


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
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):  # not the plugin's fault
                raise StorageError(f"cannot write ({error.strerror})", job.model.path) from error
            raise
        if not isinstance(evidence, Mapping) or type(evidence.get("verified")) is not bool:
            raise TypeError(f"evidence is a mapping with a 'verified' that is True or False, got {evidence!r:.200}")
        refused = exporter.verifies and not evidence["verified"]  # then it is not written
        plain: dict[str, Any] = json.loads(json.dumps(dict(evidence), allow_nan=refused))
    return plain


def _listing(directory: Path) -> dict[str, tuple[int, int, int]]:
    """What tells whether an entry of a directory was replaced or changed, without reading it."""
    entries = ((path.name, path.lstat()) for path in directory.iterdir() if not path.name.startswith(".zoo-"))
    return {name: (entry.st_ino, entry.st_size, entry.st_mtime_ns) for name, entry in entries}


def _check_changes(plugin: Plugin, stored: ModelDirectory, before: Mapping[str, tuple[int, int, int]]) -> None:
    """Raise unless the directory is as it was: the manifest to be written describes it so."""
    after = _listing(stored.path)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if MANIFEST in changed:
        raise ArtifactError("was changed while it was exported", stored.path, "export again")
    if changed:
        raise PluginError(f"{plugin} changed {', '.join(changed)} outside of its folder", stored.path)


def _check_stage(plugin: Plugin, record: Record, stage: Path, *, own: bool, old: Sequence[str]) -> list[str]:
    """The names of the files in the stage, each of which must be the exporter's to write."""
    files = []
    for path in sorted(stage.iterdir()) if stage.is_dir() else ():
        if path.is_symlink() or not path.is_file() or not plain_name(path.name) or path.name.startswith("."):
            raise PluginError(f"{plugin} wrote {path.name!r}, which is not a plain file", record.stored.path)
        if own and path.name == record.evidence_file:
            continue
        taken = path.name not in old and (record.stored.path / path.name).exists()
        if taken or is_reserved(path.name):
            what = f"{plugin} wrote {path.name}, which is there already" if taken else f"{plugin} wrote {path.name}"
            raise PluginError(what, record.stored.path, "it belongs to the model, to another export or to you")
        files.append(path.name)
    if not files:
        raise PluginError(f"{plugin} wrote no file", record.stored.path)
    if own and not (stage / record.evidence_file).is_file():
        raise PluginError(f"{plugin} wrote no {record.evidence_file}", record.stored.path)
    return files


def _unequal(plugin: Plugin, evidence: Mapping[str, Any]) -> str:
    return f"{plugin} could not show its export equal to the model ({evidence.get('reason', 'it gives no reason')})"


def _complete(
    plugin: Plugin, record: Record, options: Settings | None, evidence: Mapping[str, Any], files: Sequence[str]
) -> dict[str, Any]:
    """The evidence with what zoo knows itself, whatever the exporter says of that."""
    facts = {
        "schema": 1,
        "verified": evidence["verified"],
        "exporter": {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version},
        "options": options.to_dict() if options is not None else {},
        "files": list(files),
        "weights": record.stored.weight_digests(),
    }
    return {**facts, **evidence, **facts}
