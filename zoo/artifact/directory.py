"""The model directory: config.json, weights, manifest, model card and exports."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zoo import plugins, storage
from zoo.artifact.description import read_description, read_origin
from zoo.artifact.digests import Digests
from zoo.artifact.layout import (
    ADAPTER,
    CARD,
    COMPANIONS,
    CONFIG,
    EVIDENCE_NAME,
    MANIFEST,
    SCHEMA,
    SIGNATURE,
    TOKENIZER,
    is_own,
    is_weights,
    write_json,
)
from zoo.artifact.manifest import check_file, entries_of, entry_of, read_manifest, write_manifest
from zoo.artifact.provenance import Origin
from zoo.artifact.verdict import change_since, changed_companion, contradiction_in, doubt_about, replaced_file
from zoo.artifact.verification import Verdict, replace_section, verification_section
from zoo.artifact.weights import INDEX, SINGLE, StoredTensor, load_json, read_header, read_if_valid, read_shards
from zoo.errors import DISK, ArtifactError, PluginError, UnreadableError, UsageError, ZooError, ZooWarning
from zoo.registry import ModelSpec, config_class
from zoo.registry.nearby import no_directory

__all__ = ["ModelDirectory", "check_model_target", "listed_files", "new_model", "new_model_with_export"]


@dataclass(frozen=True)
class ModelDirectory:
    """A model on disk whose every listed file has been checked against the manifest."""

    path: Path
    files: Mapping[str, Mapping[str, Any]]
    """``{"sha256", "size"}`` by file name, from the manifest."""
    description: Mapping[str, Any]
    """The content of config.json."""

    @classmethod
    def open(cls, path: Path | str, *, weights: bool = True, rehash: bool = False) -> ModelDirectory:
        """Open a model directory and check every file, raising :class:`ArtifactError` for any defect.

        Digests of large files are cached until the file changes; ``rehash`` computes them again. A directory that is
        replaced or added to meanwhile is read again. Without ``weights``, weight files are not checked: they may be
        altered or missing.
        """
        path = Path(path)
        while True:
            before = _generation(path)
            try:
                return cls._open(path, weights, rehash)
            except OSError as error:
                if error.errno in DISK:
                    raise
                raise UnreadableError(f"cannot read ({error.strerror})", error.filename or path) from error
            except ArtifactError:
                storage.recover(path)  # waits for a writer that has moved its files but not yet its manifest
                if before == _generation(path):
                    raise

    @classmethod
    def _open(cls, path: Path, weights: bool, rehash: bool) -> ModelDirectory:
        storage.recover(path)
        if not path.is_dir():
            raise no_directory(path)
        if not (path / MANIFEST).is_file():
            raise ArtifactError(f"not a model directory (no {MANIFEST})", path, "make one with zoo build")
        files = read_manifest(path / MANIFEST)
        digests = Digests(rehash=rehash)
        try:
            for name, entry in files.items():
                if weights or not is_weights(name):
                    check_file(path / name, entry, digests)
        finally:
            digests.keep()
        return cls(path, files, read_description(path / CONFIG))

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's description, from the currently installed plugin."""
        stored, where = self.description, self.path / CONFIG
        owner = stored["plugin"]
        try:
            plugin, architecture = plugins.active().architecture(
                f"{owner['distribution']}:{stored['architecture']}", where
            )
        except PluginError as error:
            named = f"{owner['distribution']!r}, version {owner['version']!r}"
            what = f"{error} (the directory names the distribution {named}, which zoo has not checked)"
            raise PluginError(what, None, "install it only if you know its publisher") from error
        try:
            with plugins.blame(plugin, f"cannot configure {stored['name']}", fault=UsageError):
                config = config_class(plugin, architecture).from_dict(stored["config"], where)
        except UsageError as error:
            raise ArtifactError(str(error)) from error
        described, tokenizer = stored.get("description", ""), stored.get("tokenizer")
        return ModelSpec(stored["name"], plugin, architecture, config, described, tokenizer)

    @cached_property
    def origin(self) -> Origin:
        """The provenance of the weights; unknown if config.json does not record it."""
        return read_origin(self.description, self.path / CONFIG)

    @cached_property
    def layout(self) -> Mapping[str, StoredTensor]:
        """The file, offset and length of each tensor."""
        if INDEX in self.files:
            return read_shards(self.path / INDEX, lambda path: read_header(self.file(path.name)))
        if SINGLE in self.files or (self.path / SINGLE).exists():
            return read_header(self.file(SINGLE))
        if ADAPTER in self.files:
            remedy = f"merge it: zoo adapt BASE --merge {self.path} -o DIR"
            raise ArtifactError("holds an adapter, not the weights of a model", self.path, remedy)
        what = "no weights in this model directory"
        raise ArtifactError(what, self.path, f"copy them there, then run zoo relink {self.path}")

    def file(self, name: str) -> Path:
        """Return the path of a file that the manifest lists. No other file of the directory is ever read."""
        if name not in self.files:
            raise ArtifactError(f"{name} is not in the manifest", self.path / MANIFEST)
        return self.path / name

    def weight_files(self) -> list[str]:
        """Return the files that hold the model's tensors; none if only graphs were exported."""
        return sorted(name for name in self.files if is_weights(name) and name != INDEX)

    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of every weight file."""
        return {name: self.files[name]["sha256"] for name in self.weight_files()}

    def companion_digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file that says how inputs are read and answers written, such as tokenizer.json."""
        return {name: self.files[name]["sha256"] for name in (TOKENIZER, *COMPANIONS) if name in self.files}

    def config_digest(self) -> str:
        """Return the SHA-256 of architecture, task, dtype and configuration, as in config.json."""
        computed = {key: self.description[key] for key in ("architecture", "task", "dtype", "config")}
        return hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()

    @property
    def dtype(self) -> str:
        """The dtype of the weights: float32, float16 or bfloat16."""
        return str(self.description["dtype"])

    @contextmanager
    def adding(
        self,
        *,
        listed: Mapping[str, Mapping[str, Any] | None] | None = None,
        removed: Collection[str] = (),
        action: str = "exported",
    ) -> Iterator[Path]:
        """Yield a stage whose files are moved into the directory, with a new manifest, when the block ends.

        The new manifest extends the one present when the files are moved, so it keeps the files that other commands
        have added since the directory was opened. A signature of the old files is removed, with a warning.

        Args:
            listed: manifest entries of files that are already in the directory; None drops an entry.
            removed: files to delete with their entries, unless the stage has new files of the same names.
            action: past participle of the operation, for errors.

        Raises:
            ArtifactError: the model itself, or one of these files, has been changed since the directory was opened.
            UsageError: a staged file would replace a file that the manifest does not list, perhaps the user's own.
        """
        new = dict(listed or {})
        signature = self.path / SIGNATURE
        was_signed = False

        def finish(stage: Path) -> Collection[str]:
            nonlocal was_signed
            touched = {*new, *removed}
            now = self.current(touched, action)
            for name in touched - now.keys():
                if (stage / name).exists() and os.path.lexists(self.path / name):
                    raise UsageError("exists and is not in the manifest", self.path / name, "move it elsewhere first")
            gone = set(removed) - new.keys()
            merged = {**now, **dict.fromkeys(gone), **new}
            present = {name: entry for name, entry in merged.items() if entry is not None}
            write_manifest(stage, {**present, **self._update_card(stage, present)})
            was_signed = os.path.lexists(signature)
            return {*gone, SIGNATURE} if was_signed else gone

        before = _identity(self.path)
        try:
            with storage.add_to_directory(self.path, finish) as stage:
                yield stage
                new |= entries_of(stage)
        except Exception as error:
            if _identity(self.path) != before:  # the stage was in the old directory
                raise self._changed(action) from error
            raise
        if was_signed:
            what = f"{signature} is removed, since the model was {action}: sign it again (zoo sign {self.path})"
            warnings.warn(what, ZooWarning, stacklevel=3)

    def current(self, touched: Collection[str], action: str = "exported") -> Mapping[str, Mapping[str, Any]]:
        """Return the current manifest, to which other commands may have added files.

        Raises :class:`ArtifactError` if the model's own files except the card, or those in ``touched``, have changed
        since the directory was opened. If ``touched`` includes weights, no file may have changed: every graph points
        into them.
        """
        try:
            now = read_manifest(self.path / MANIFEST)
        except UnreadableError:
            raise
        except ArtifactError as error:
            raise self._changed(action) from error
        changed = {name for name in now.keys() | self.files.keys() if now.get(name) != self.files.get(name)}
        relinked = any(is_weights(name) for name in touched)
        if any(relinked or name in touched or (is_own(name) and name != CARD) for name in changed):
            raise self._changed(action)
        return now

    def _update_card(self, stage: Path, files: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Say on the card what is verified once the stage is moved into the directory.

        Args:
            stage: new files, to which the card is added if it changes.
            files: the manifest of the directory with these files.

        Returns:
            The entry of a new card for the manifest.
        """
        if CARD not in files:
            return {}
        there = {name: stage / name if (stage / name).exists() else self.path / name for name in files}
        evidence = sorted((name for name in files if EVIDENCE_NAME.fullmatch(name)), key=lambda name: (len(name), name))
        try:
            card = there[CARD].read_bytes().decode()
            after = ModelDirectory(self.path, files, read_description(there[CONFIG]))
            section = verification_section({name: after._verdict(there[name]) for name in evidence})
        except UnreadableError:
            raise
        except (FileNotFoundError, UnicodeDecodeError, ArtifactError):
            return {}  # the card is for readers: nothing depends on it
        except OSError as error:
            raise UnreadableError(f"cannot read ({error.strerror})", there[CARD]) from error
        if (updated := replace_section(card, section)) == card:
            return {}
        (stage / CARD).write_bytes(updated.encode())
        return {CARD: entry_of(stage / CARD)}

    def _verdict(self, evidence: Path) -> Verdict:
        """Return the content of a file of evidence, and why it does not hold for this directory, or None."""
        try:
            found = load_json(evidence)
        except UnreadableError:
            raise
        except ArtifactError as error:
            return {}, error.what
        name, replaced = evidence.name, replaced_file(found, self.files)
        doubt = (
            doubt_about(found, name)
            or change_since(found, name, self.config_digest(), self.weight_digests(), replaced)
            or changed_companion(found, self.companion_digests())
            or contradiction_in(found, name)
        )
        return found, doubt

    def _changed(self, action: str) -> ArtifactError:
        return ArtifactError(f"the model was changed while it was {action}", self.path, "run the command again")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the directory is replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _generation(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the directory or its manifest is replaced.

    The inode alone does not: after two replacements in quick succession, it may be that of the first file again.
    """
    try:
        manifest = (path / MANIFEST).stat()
        return path.stat().st_ino, manifest.st_ino, manifest.st_mtime_ns, manifest.st_ctime_ns
    except OSError:
        return None


@contextmanager
def new_model(target: Path, description: Mapping[str, Any], *, force: bool) -> Iterator[Path]:
    """Yield a stage that becomes a model directory. The caller writes the weights and the card into it.

    config.json and the manifest are written when the block ends, so the block may still add to ``description``.
    """
    with storage.new_directory(target, force=force, owned=listed_files) as stage:
        yield stage
        write_json(stage / CONFIG, {"schema": SCHEMA, **description})
        write_manifest(stage, entries_of(stage))


@contextmanager
def new_model_with_export(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield the place for a model directory, which replaces ``target`` with all that the block writes when it ends."""
    with storage.new_directory(target, force=force, owned=listed_files) as stage:
        work = stage / ".new"  # holds the stages of what is made, which may stay behind if they cannot be removed
        place = work / "model"
        try:
            yield place
        except ZooError as error:
            error.rename(place, target)
            raise
        for path in list(place.iterdir()):
            path.rename(stage / path.name)
        shutil.rmtree(work)


def check_model_target(target: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless a model directory can be written to ``target``.

    With ``force``, an existing model directory may be replaced if it holds only files that its manifest lists, intact
    or not.
    """
    storage.check_target(target, force=force, owned=listed_files)


def listed_files(path: Path) -> Collection[str] | None:
    """Return the files of a model directory and its signature, or None if it has no valid manifest.

    Raises :class:`zoo.errors.UnreadableError` if the manifest cannot be read.
    """
    files = read_if_valid(path / MANIFEST, read_manifest)
    return None if files is None else {MANIFEST, SIGNATURE, *files}
