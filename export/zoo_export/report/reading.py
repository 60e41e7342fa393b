"""Read model directories without trust: files that differ from the manifest are listed, not refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo import plugins
from zoo.artifact import (
    CONFIG,
    MANIFEST,
    SIGNATURE,
    Export,
    ModelDirectory,
    Record,
    find_records,
    variant_of,
)
from zoo.artifact.description import read_description
from zoo.artifact.digests import Digests
from zoo.artifact.manifest import check_file, read_manifest
from zoo.artifact.measured import digests_of
from zoo.artifact.verdict import covered_files
from zoo.errors import ArtifactError, ParityError, UnreadableError, ZooError

__all__ = ["Directory", "Reviewed", "read_directory"]


@dataclass(frozen=True)
class Reviewed:
    """An export with the verdict on it."""

    record: Record
    doubt: str | None
    """Why it is not verified, or None."""
    evidence: Mapping[str, Any]
    """The content of its evidence; empty if the file is altered or malformed."""
    replayed: str | None = None
    """The outcome of the replay of its recorded comparison, if one was asked for."""

    @property
    def name(self) -> str:
        """The variant, or the format of another exporter."""
        stem = self.record.evidence_file.removesuffix(".json")
        return "plain" if stem == "parity" else stem.partition(".")[2]

    @property
    def digests(self) -> Mapping[str, Any]:
        """The SHA-256 of each exported file as the evidence lists them."""
        return digests_of(self.evidence)

    @property
    def files(self) -> list[str]:
        """The exported files that the evidence lists."""
        return list(self.digests)

    @property
    def covered(self) -> Mapping[str, Any]:
        """The SHA-256 of every file that the evidence names, those of the model included."""
        return covered_files(self.evidence)

    @property
    def is_of_other_weights(self) -> bool:
        """Whether the numbers of the evidence are of other weights than lie in the directory."""
        return "weights" in self.evidence and self.evidence["weights"] != self.record.stored.weight_digests()

    @property
    def is_onnx(self) -> bool:
        """Whether it is a variant of the ONNX export."""
        return self.record.evidence_file.startswith("parity.")

    @property
    def interface(self) -> str:
        """How the graphs of the variant are called: see :class:`zoo.artifact.Variant`."""
        return variant_of(self.name if self.is_onnx else "").interface


@dataclass
class Directory:
    """A model directory as it lies there."""

    stored: ModelDirectory
    defects: Mapping[str, str]
    """Defects of listed files that are missing or altered, by name."""
    unlisted: list[str]
    """Files that the manifest does not list."""
    exports: list[Reviewed] = field(default_factory=list)
    signature: str = ""
    """State of the signature, in words."""
    model_class: str | None = None
    """``module:Class`` of the architecture, or the factory of the user's own module."""
    reference: str | None = None
    """The citation of the architecture."""

    @property
    def problems(self) -> list[str]:
        """Why the directory as a whole is not verified, the worst first."""
        lines = [f"{name}: {defect}" for name, defect in self.defects.items()]
        if not self.exports:
            lines.append("the directory has no export: nothing was compared")
        doubtful = ((item.record.evidence_file, item.doubt) for item in self.exports if item.doubt is not None)
        return lines + [f"{name}: {doubt}" for name, doubt in doubtful if name not in self.defects]

    def failure(self) -> ZooError | None:
        """Return the error with which a command ends, or None if every file and every export is as verified."""
        path = self.stored.path
        if self.defects:
            name, defect = next(iter(self.defects.items()))
            more = f" (and {len(self.defects) - 1} more)" if len(self.defects) > 1 else ""
            return ArtifactError(f"{defect}{more}", path / name, "get a fresh copy")
        if not self.exports:
            return ArtifactError("not exported yet: nothing was compared", path, f"zoo export {path} --onnx")
        doubtful = next((item for item in self.exports if item.doubt is not None), None)
        if doubtful is None:
            return None
        return ParityError(f"{doubtful.record.evidence_file}: not verified ({doubtful.doubt})", path, "zoo verify")


def read_directory(path: Path, *, signed_by: Path | None = None, check: bool = False) -> Directory:
    """Read a model directory with all its evidence. Every listed file is read in full and compared with the manifest.

    Args:
        path: the directory.
        signed_by: a public key or certificates; the signature must be by them.
        check: replay the recorded comparison of each verified export on ONNX Runtime.

    Raises:
        ArtifactError: it is no model directory, its manifest or config.json cannot be read, or it is not signed by
            ``signed_by``.
    """
    if signed_by is not None:
        from zoo.artifact.signature import check_signature

        path = check_signature(path, signed_by)
    try:
        stored, defects = ModelDirectory.open(path, rehash=True), dict[str, str]()
    except UnreadableError:
        raise
    except ArtifactError:
        if not (path / MANIFEST).is_file():
            raise
        stored, defects = _salvage(path)
    there = {item.name for item in path.iterdir()} - {MANIFEST, SIGNATURE}
    directory = Directory(stored, defects, sorted(there - stored.files.keys()))
    directory.signature = _signature(path, signed_by)
    _describe_class(directory)
    directory.exports = [_review(record, defects, check) for record in _in_order(find_records(stored))]
    return directory


def _salvage(path: Path) -> tuple[ModelDirectory, dict[str, str]]:
    """Return a directory some of whose files are missing or altered, and what is wrong with them."""
    files = read_manifest(path / MANIFEST)
    defects, digests = dict[str, str](), Digests(rehash=True)
    for name, entry in files.items():
        try:
            check_file(path / name, entry, digests)
        except ArtifactError as error:
            defects[name] = error.what
    if CONFIG in defects:
        raise ArtifactError(defects[CONFIG], path / CONFIG, "restore the file: without it, no evidence can be read")
    return ModelDirectory(path, files, read_description(path / CONFIG)), defects


def _in_order(records: list[Record]) -> list[Record]:
    """Return the plain export first, then the variants, then exports to other formats."""
    return sorted(records, key=lambda record: (not record.stem.startswith("parity"), len(record.stem), record.stem))


def _signature(path: Path, signed_by: Path | None) -> str:
    if signed_by is not None:
        return f"valid: all files are those that the owner of {signed_by.name} signed"
    if (path / SIGNATURE).exists():
        return f"{SIGNATURE} is there, and was not checked: no key was given"
    return f"none: there is no {SIGNATURE}"


def _describe_class(directory: Directory) -> None:
    """Find the class of the model. A missing plugin is no failure: nothing is run."""
    description = directory.stored.description
    try:
        name = f"{description['plugin']['distribution']}:{description['architecture']}"
        _, architecture = plugins.active().architecture(name)
    except ZooError:
        return
    directory.model_class, directory.reference = architecture.model, architecture.reference
    factory = description["config"].get("factory")
    if isinstance(factory, str):
        directory.model_class = factory


def _review(record: Record, defects: Mapping[str, str], check: bool) -> Reviewed:
    """Return the verdict on an export. The files of its evidence must be there, and its numbers must agree with it."""
    record = _as_export(record)
    if record.evidence_file in defects:
        return Reviewed(record, f"{record.evidence_file} {defects[record.evidence_file]}", {})
    try:
        evidence = record.evidence
        doubt = record.doubt() or _altered(record, defects)
    except ZooError as error:
        return Reviewed(record, error.what, {})
    if doubt is not None or not check:
        return Reviewed(record, doubt, evidence)
    doubt, replayed = _replay(record)
    return Reviewed(record, doubt, evidence, replayed)


def _as_export(record: Record) -> Record:
    """Return a record of ONNX graphs as an export, whose graphs are known, unless the plugin is missing."""
    first, _, variant = record.stem.partition(".")
    if first != "parity":
        return record
    export = Export(record.stored, variant)
    try:
        export.graph_files  # noqa: B018  (needs the plugin)
    except ZooError:
        return record
    return export


def _altered(record: Record, defects: Mapping[str, str]) -> str | None:
    """Return what is wrong with a file that the evidence covers, or None."""
    return next((f"{name}: {defects[name]}" for name in covered_files(record.evidence) if name in defects), None)


def _replay(record: Record) -> tuple[str | None, str]:
    """Replay a recorded comparison. Returns why the export is not verified after all, or None, and the outcome."""
    from zoo_runtime.recorded.replay import check_recorded, replay_on

    if not isinstance(record, Export):
        return None, "not repeated: only ONNX exports keep a recorded comparison"
    try:
        check_recorded(record)
    except ArtifactError as error:
        return f"it cannot be repeated: {error.what}", error.what
    try:
        return None, str(replay_on(record, record.traits.provider or "cpu"))
    except ZooError as error:
        return f"the recorded comparison, repeated here, fails: {error.what}", error.what
