"""The model directory: config.json, weights, manifest, model card, and the export beside them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zoo import plugins, storage
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, PluginError, UsageError
from zoo.registry import ModelSpec, config_class
from zoo.weights import DTYPES, INDEX, SINGLE, StoredTensor, load_json, plain_name, read_layout

__all__ = [
    "ATTENTIONS",
    "CARD",
    "COMPANIONS",
    "CONFIG",
    "GENERATION",
    "HALVES",
    "LOOP",
    "MANIFEST",
    "PRECISIONS",
    "PROFILES",
    "TOKENIZER",
    "Export",
    "ModelDirectory",
    "Record",
    "declared_graphs",
    "describe",
    "digest_file",
    "entry_of",
    "export_file",
    "is_reserved",
    "is_weights",
    "new_model",
    "write_json",
]

CONFIG = "config.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CARD = "README.md"
GENERATION = "generation_config.json"
COMPANIONS = (
    GENERATION,
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
"""Files of the hub's layout that travel with a model as they are."""
LOOP = "generate"
"""The variant whose one graph does all of generation, and the name of that graph."""
ATTENTIONS = "attentions"
"""The variant whose graphs also return their attention weights."""
PROFILES = ("cpu", "cuda")
"""The variants rewritten for one provider."""
HALVES = {"fp16": "float16", "bf16": "bfloat16"}
"""The variants that are the model in another dtype, and which."""
PRECISIONS = (*HALVES, "int8", "int4")
"""The variants with weights of their own: model.int8.safetensors."""
SCHEMA = 1


def digest_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, data: object) -> None:
    """Write JSON for people and for diffs."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ModelDirectory:
    """A model on disk whose every listed file has been checked against the manifest."""

    path: Path
    files: Mapping[str, Mapping[str, Any]]
    """Name to ``{"sha256", "size"}``, as the manifest says."""
    description: Mapping[str, Any]
    """config.json."""

    @classmethod
    def open(cls, path: Path | str, *, weights: bool = True) -> ModelDirectory:
        """Open a model directory and check every digest. Anything amiss is an :class:`ArtifactError`.

        A directory that is replaced or added to meanwhile is read again. Without ``weights`` theirs are left out: they
        may have changed, or be missing.
        """
        path = Path(path)
        while True:
            before = _generation(path)
            try:
                return cls._open(path, weights)
            except ArtifactError:
                if before == _generation(path):
                    raise

    @classmethod
    def _open(cls, path: Path, weights: bool) -> ModelDirectory:
        if not path.is_dir():
            raise ArtifactError("not a directory" if path.exists() else "no such directory", path)
        storage.recover(path)
        if not (path / MANIFEST).is_file():
            raise ArtifactError(f"not a model directory (no {MANIFEST})", path, "make one with zoo build")
        files = _read_manifest(path / MANIFEST)
        for name, entry in files.items():
            if weights or not is_weights(name):
                _check_file(path / name, entry)
        return cls(path, files, _read_description(path / CONFIG))

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's description, from the plugin that is installed now."""
        stored, where = self.description, self.path / CONFIG
        owner = stored["plugin"]
        try:
            plugin, architecture = plugins.active().architecture(
                f"{owner['distribution']}:{stored['architecture']}", where
            )
        except PluginError as error:
            made_by = f"{owner['distribution']} {owner['version']}"
            raise PluginError(
                f"{error} (the model was made by {made_by})", None, f"pip install {owner['distribution']}"
            ) from error
        try:
            with plugins.blame(plugin, f"cannot configure {stored['name']}"):
                config = config_class(plugin, architecture).from_dict(stored["config"], where)
        except UsageError as error:
            raise ArtifactError(str(error)) from error
        return ModelSpec(stored["name"], plugin, architecture, config, tokenizer=stored.get("tokenizer"))

    @cached_property
    def layout(self) -> Mapping[str, StoredTensor]:
        """Where each tensor lies."""
        if not any((self.path / name).exists() for name in (SINGLE, INDEX)):
            what = "no weights in this model directory"
            raise ArtifactError(what, self.path, f"put them there, then zoo relink {self.path}")
        layout = read_layout(self.path)
        for tensor in layout.values():
            if tensor.file not in self.files:
                raise ArtifactError(f"{tensor.file} is not in the manifest", self.path / MANIFEST)
        return layout

    def weight_files(self) -> list[str]:
        """The files that hold the model's tensors; none where only graphs were exported."""
        return sorted(name for name in self.files if is_weights(name) and name != INDEX)

    def weight_digests(self) -> dict[str, str]:
        """The SHA-256 of every file of weights."""
        return {name: self.files[name]["sha256"] for name in self.weight_files()}

    def export(self, variant: str = "") -> Export:
        """The files of one export. There may be several: the plain one, whose variant has no name, and others."""
        return Export(self, variant)

    def exports(self) -> list[Export]:
        """The exports that are here, the plain one first."""
        names = (re.fullmatch(r"parity(?:\.([\w-]+))?\.json", name) for name in sorted(self.files, key=len))
        return [Export(self, match[1] or "") for match in names if match]

    @property
    def dtype(self) -> str:
        """float32, float16 or bfloat16."""
        return str(self.description["dtype"])

    @contextmanager
    def adding(self, known: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Path]:
        """Yield a stage whose files join the directory, with a new manifest, when the block ends.

        ``known`` is what the manifest says of the other files, as now by default.
        """
        with storage.add_to_directory(self.path) as stage:
            yield stage
            _write_manifest(stage, self.files if known is None else known)


@dataclass(frozen=True)
class Record:
    """What is known of one export: the evidence for it, a file beside the weights."""

    stored: ModelDirectory
    variant: str = ""
    """Tells exports to one format apart; the plain one has none."""
    stem: str = "parity"
    """What the file's name begins with."""

    @property
    def evidence_file(self) -> str:
        """parity.json, or parity.VARIANT.json."""
        return export_file(self.stem, self.variant, "json")

    @property
    def exists(self) -> bool:
        """Whether it is here."""
        return self.evidence_file in self.stored.files

    @cached_property
    def evidence(self) -> Mapping[str, Any]:
        """What vouches for the files."""
        return load_json(self.stored.path / self.evidence_file)

    @property
    def files(self) -> list[str]:
        """The files that the evidence is for; none where there is no export."""
        listed = self.evidence.get("files") if self.exists else []
        names = listed if isinstance(listed, list) else []
        return [name for name in names if name in self.stored.files and not is_reserved(name)]

    def is_verified(self) -> bool:
        """Whether the export was shown equal to the model, with the weights that are there now."""
        return bool(self.evidence.get("verified")) and self.evidence.get("weights") == self.stored.weight_digests()


class Export(Record):
    """One variant of a model's ONNX graphs."""

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs, with the outputs that those of this variant have."""
        return declared_graphs(self.stored.spec, self.variant)

    @property
    def graph_files(self) -> dict[str, str]:
        """For each declared graph, in the order in which they run, its ONNX file."""
        if self.variant == LOOP:
            return {LOOP: f"{LOOP}.onnx"}
        return {graph.name: export_file(graph.name, self.variant, "onnx") for graph in self.stored.spec.graphs}

    @property
    def dtype(self) -> str:
        """Of the graphs' real inputs and outputs: float32, float16 or bfloat16."""
        return HALVES.get(self.variant, self.stored.dtype)

    def check(self) -> None:
        """Raise :class:`ArtifactError` unless every graph, and the evidence for it, is here."""
        options = {"": "", LOOP: "--loop", ATTENTIONS: "--attentions"}
        options |= {name: f"--profile {name}" for name in PROFILES} | {name: f"--dtype {name}" for name in HALVES}
        option = options.get(self.variant, f"--quantize {self.variant}")
        command = f"zoo export {self.stored.path} --onnx {option}".rstrip()
        if not self.exists:
            what = f"not exported for {self.variant}" if self.variant else "not exported yet"
            raise ArtifactError(what, self.stored.path, command)
        for name in self.graph_files.values():
            if name not in self.stored.files:
                raise ArtifactError("not in the manifest", self.stored.path / name, f"{command} --force")

    def read(self) -> dict[str, bytes]:
        """Every graph by its name."""
        return {graph: (self.stored.path / name).read_bytes() for graph, name in self.graph_files.items()}

    def check_verified(self) -> None:
        """Raise :class:`ParityError` for graphs that nothing vouches for."""
        if not self.is_verified():
            reason = self.evidence.get("reason", "the weights have changed since")
            remedy = f"zoo verify {self.stored.path}, or run it with --unverified"
            raise ParityError(f"the export is not verified ({reason})", self.stored.path, remedy)


def declared_graphs(spec: ModelSpec, variant: str = "") -> tuple[Graph, ...]:
    """The graphs of a model as a variant has them.

    Raises :class:`UsageError` for attention weights of a model that has none.
    """
    if variant != ATTENTIONS:
        return spec.graphs
    if not any(graph.attentions for graph in spec.graphs):
        what = f"{spec.plugin}: {spec.architecture.name} declares no attention weights"
        raise UsageError(what, spec.name, "see attentions of zoo.Graph")
    return tuple(graph.with_attentions() for graph in spec.graphs)


def export_file(stem: str, variant: str, suffix: str) -> str:
    """The name of one file of an export: ``STEM.SUFFIX`` or ``STEM.VARIANT.SUFFIX``."""
    return ".".join(filter(None, (stem, variant, suffix)))


def _generation(path: Path) -> tuple[int, int] | None:
    """What changes when a directory is exchanged, or its manifest is replaced."""
    try:
        return path.stat().st_ino, (path / MANIFEST).stat().st_ino
    except OSError:
        return None


@contextmanager
def new_model(target: Path, description: Mapping[str, Any], *, force: bool) -> Iterator[Path]:
    """Yield a stage that becomes a model directory: the caller writes weights and card, the rest is written here."""
    with storage.new_directory(target, force=force, replaceable=is_model) as stage:
        yield stage
        write_json(stage / CONFIG, {"schema": SCHEMA, **description})
        _write_manifest(stage, {})


def copy_model(source: Path, target: Path, *, force: bool) -> None:
    """Copy a sound model to a new directory, without what was exported from it."""
    stored = ModelDirectory.open(source)
    evidence = {name for name in stored.files if _EVIDENCE.fullmatch(name)}
    exported = evidence.union(*(Record(stored, stem=name.removesuffix(".json")).files for name in evidence))
    with storage.new_directory(target, force=force, replaceable=is_model) as stage:
        for name in stored.files:
            if name not in exported:
                shutil.copyfile(source / name, stage / name)
        _write_manifest(stage, {})


def describe(spec: ModelSpec, *, dtype: str, seed: int | None) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "name": spec.name,
        "architecture": spec.architecture.name,
        "task": spec.task,
        "plugin": {
            "name": spec.plugin.name,
            "distribution": spec.plugin.distribution,
            "version": spec.plugin.version,
        },
        "dtype": dtype,
        "seed": seed,
        "tokenizer": spec.tokenizer,
        "config": spec.config.to_dict(),
    }


def is_model(path: Path) -> bool:
    """Whether a directory may be replaced: it is empty, or has a manifest of ours, however its files are."""
    try:
        return not any(path.iterdir()) or bool(_read_manifest(path / MANIFEST))
    except (ArtifactError, OSError):
        return False


def is_weights(name: str) -> bool:
    """Whether a file holds tensors of the model, or the index of those that do."""
    return name in (SINGLE, INDEX) or bool(re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name))


_EVIDENCE = re.compile(r"parity(\.[\w-]+)?\.json|evidence(\.[\w-]+)+\.json")


def is_reserved(name: str) -> bool:
    """Whether a file of this name is the model's own, or the evidence for an export of it."""
    return (
        name in (CONFIG, MANIFEST, TOKENIZER, CARD, *COMPANIONS) or is_weights(name) or bool(_EVIDENCE.fullmatch(name))
    )


def entry_of(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"sha256": digest_file(path), "size": path.stat().st_size}


def _write_manifest(stage: Path, kept: Mapping[str, Mapping[str, Any]]) -> None:
    new = {path.name: entry_of(path) for path in stage.iterdir() if path.is_file()}
    write_json(stage / MANIFEST, {"schema": SCHEMA, "files": dict(sorted({**kept, **new}.items()))})


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    if path.is_symlink():
        raise ArtifactError("a link, not a file", path)
    data = load_json(path)
    files = data.get("files")
    known = type(data.get("schema")) is int and data["schema"] == SCHEMA
    if not known or set(data) != {"schema", "files"} or not isinstance(files, dict):
        raise ArtifactError("not a manifest of this zoo", path)
    for name, entry in files.items():
        if not plain_name(name) or name == MANIFEST or not isinstance(entry, dict) or set(entry) != {"sha256", "size"}:
            raise ArtifactError(f"bad entry {name!r}", path)
    if CONFIG not in files:
        raise ArtifactError(f"{CONFIG} is not listed", path)
    return files


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    if path.is_symlink() or not path.is_file():
        raise ArtifactError("missing", path, "rebuild the model or restore the file")
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise ArtifactError(f"has {size} bytes, the manifest says {entry['size']}", path, "restore the file")
        if digest_file(path) != entry["sha256"]:
            raise ArtifactError("altered: its SHA-256 differs from the manifest's", path, "restore the file")
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error


_DESCRIPTION = {
    "schema": int,
    "name": str,
    "architecture": str,
    "task": str,
    "plugin": dict,
    "dtype": str,
    "config": dict,
}


def _read_description(path: Path) -> dict[str, Any]:
    data = load_json(path)
    for key, kind in _DESCRIPTION.items():
        if not isinstance(data.get(key), kind):
            raise ArtifactError(f"{key} is missing or not a {kind.__name__}", path)
    if data["schema"] != SCHEMA:
        raise ArtifactError(f"schema {data['schema']}, this zoo reads {SCHEMA}", path)
    if data["dtype"] not in DTYPES:
        raise ArtifactError(f"unknown dtype {data['dtype']!r}", path)
    if not all(isinstance(data["plugin"].get(key), str) for key in ("name", "distribution", "version")):
        raise ArtifactError("plugin must name its distribution and version", path)
    return data
