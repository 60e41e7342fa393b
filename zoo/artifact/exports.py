"""The exports of a model directory and the evidence for them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zoo import storage
from zoo.artifact.directory import ModelDirectory, check_model_target, listed_files
from zoo.artifact.layout import CARD, EVIDENCE_NAME, RECORDED, export_file, is_reserved, write_json
from zoo.artifact.manifest import entries_of, write_manifest
from zoo.artifact.measured import digests_of
from zoo.artifact.variants import ATTENTION_INPUTS, LOOP, PREFILL, Variant, variant_of
from zoo.artifact.verdict import change_since, changed_companion, contradiction_in, doubt_about, replaced_file
from zoo.artifact.verification import remove_section
from zoo.artifact.weights import load_json
from zoo.contract import AttentionInputs, Graph
from zoo.errors import ArtifactError, ParityError, UsageError, Wording, ZooError
from zoo.registry import ModelSpec

__all__ = [
    "EVIDENCE_KEY",
    "Export",
    "Record",
    "copy_model",
    "declared_graphs",
    "evidence_digest",
    "find_exports",
    "find_records",
]

EVIDENCE_KEY = "zoo.evidence_sha256"
"""Metadata of a graph: :func:`evidence_digest` of the evidence for it."""


SOURCE_PREFIX = "source_"
"""Precedes the fields of published evidence with digests of files that stayed in the model directory."""
_OF_THE_DIRECTORY = ("files", "config", "weights", "companions")


def of_the_directory(key: str) -> bool:
    """Return whether a field of evidence has digests of files of the model directory."""
    return key in _OF_THE_DIRECTORY


def evidence_digest(evidence: Mapping[str, Any]) -> str:
    """Return the SHA-256 of evidence without the digests of graphs, as the graph files contain this digest.

    It covers the digests of the files beside the graphs, such as quantised weights.
    """
    beside = {name: digest for name, digest in digests_of(evidence).items() if not name.endswith(".onnx")}
    rest = {key: value for key, value in evidence.items() if key != "files"}
    return hashlib.sha256(json.dumps([rest, dict(sorted(beside.items()))]).encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """An export and the file of evidence for it."""

    stored: ModelDirectory
    variant: str = ""
    """Distinguishes several exports to one format; empty for the default export."""
    stem: str = "parity"
    """First part of the evidence file's name."""

    @property
    def evidence_file(self) -> str:
        """The name of the evidence file: parity.json or parity.VARIANT.json."""
        return export_file(self.stem, self.variant, "json")

    @property
    def exists(self) -> bool:
        """Whether the evidence file exists."""
        return self.evidence_file in self.stored.files

    @cached_property
    def evidence(self) -> Mapping[str, Any]:
        """The content of the evidence file."""
        return load_json(self.stored.file(self.evidence_file))

    @property
    def files(self) -> list[str]:
        """The exported files that the evidence lists; none if there is no export."""
        return [name for name in self.digests if name in self.stored.files and not is_reserved(name)]

    @property
    def digests(self) -> Mapping[str, Any]:
        """The SHA-256 of each file as listed in the evidence."""
        return digests_of(self.evidence) if self.exists else {}

    def replaced_file(self) -> str | None:
        """Return the first file whose digest differs from the evidence, or None."""
        return replaced_file(self.evidence, self.stored.files) if self.exists else None

    def check_files(self) -> None:
        """Raise :class:`ParityError` unless every file has the digest listed in the evidence."""
        name = self.replaced_file()
        if name is not None:
            what = f"{name} is not the file that {self.evidence_file} describes"
            raise ParityError(what, self.stored.path, "restore it, or export again with --force")

    def doubt(self) -> str | None:
        """Return why the export is not verified, or None if these files were verified with the current weights.

        Evidence whose numbers contradict its verdict, which is not what an export writes, or which was changed after
        the graphs had been written, verifies nothing. Answers to texts are compared with the tokenizer that is there,
        so that another one is not verified either.
        """
        return (
            doubt_about(self.evidence, self.evidence_file)
            or self.change()
            or changed_companion(self.evidence, self.stored.companion_digests())
            or self._contradiction
            or self._other_evidence()
        )

    @cached_property
    def _contradiction(self) -> str | None:
        """What contradicts the verdict of the evidence, or None."""
        return contradiction_in(self.evidence, self.evidence_file)

    def _other_evidence(self) -> str | None:
        """Return which graph has another digest of evidence in its metadata than that of this evidence, or None."""
        if not self.evidence_file.startswith("parity."):
            return None
        digest = evidence_digest(self.evidence).encode()
        for name in self.files:
            path = self.stored.file(name)
            if path.suffix == ".onnx" and path.exists() and digest not in path.read_bytes():
                return f"{self.evidence_file} was changed after {name} had been written"
        return None

    def change(self) -> str | None:
        """Return what has changed since the export was compared, or None."""
        stored = self.stored
        config, weights = stored.config_digest(), stored.weight_digests()
        return change_since(self.evidence, self.evidence_file, config, weights, self.replaced_file())

    def revoked(
        self, error: ParityError, write: Callable[[Mapping[str, Any]], None] | None = None, **facts: Any
    ) -> ParityError:
        """Mark the evidence as failed after a comparison that failed, so that the export counts as unverified.

        Args:
            error: the failure.
            write: replaces the evidence, if more depends on it than the manifest.
            facts: more entries for the evidence.

        Returns:
            The error to raise. Evidence that says so already, or is for other files, is left as it is.
        """
        if not self.is_verified():
            return error
        failed = {**self.evidence, "verified": False, "reason": f"zoo verify failed: {error.what}", **facts}
        try:
            (write or self._replace_evidence)(failed)
        except (ZooError, OSError) as problem:
            still = f"{self.evidence_file} still says that it is verified, and cannot be changed ({problem})"
            return ParityError(f"{error}; {still}")
        return error

    def _replace_evidence(self, evidence: Mapping[str, Any]) -> None:
        with self.stored.adding(action="verified") as stage:
            write_json(stage / self.evidence_file, evidence)

    def is_verified(self) -> bool:
        """Return whether these files were shown equal to the model with its current weights."""
        return self.doubt() is None


class Export(Record):
    """One variant of a model's ONNX graphs."""

    @property
    def traits(self) -> Variant:
        """What is known of the variant: how its graphs are called, and where they run."""
        return variant_of(self.variant)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs, with the outputs of this variant, and with windows if it was exported with them."""
        options = self.evidence.get("options") if self.exists else None
        windows = isinstance(options, dict) and options.get("windows") is True
        computed = self.evidence.get(ATTENTION_INPUTS) if self.exists else None
        try:
            return declared_graphs(self.stored.spec, self.variant, windows=windows, attention_inputs=computed)
        except (AttributeError, TypeError) as error:
            what = f"{ATTENTION_INPUTS} is malformed ({error})"
            raise ArtifactError(what, self.stored.path / self.evidence_file, "export again with --force") from error

    @property
    def graph_files(self) -> dict[str, str]:
        """The ONNX file of each declared graph, in the order in which the graphs run, then those of further ones."""
        if self.traits.interface == "loop":
            return {LOOP: f"{LOOP}.onnx"}
        names = [graph.name for graph in self.stored.spec.graphs]
        if self.traits.interface == "rows":
            names.append(PREFILL)
        return {name: export_file(name, self.variant, "onnx") for name in names}

    @property
    def recorded_file(self) -> str:
        """The name of the file with a sample of the comparison: ``recorded.safetensors.gz`` or with the variant."""
        return export_file(RECORDED, self.variant, "safetensors.gz")

    @property
    def dtype(self) -> str:
        """The dtype of the graphs' floating-point inputs and outputs: float32, float16 or bfloat16."""
        return self.traits.dtype or self.stored.dtype

    def check(self) -> None:
        """Raise :class:`ArtifactError` unless every graph and its evidence exist."""
        command = self.traits.command(self.stored.path)
        if not self.exists:
            what = f"not exported for {self.variant}" if self.variant else "not exported yet"
            raise ArtifactError(what, self.stored.path, command)
        for name in self.graph_files.values():
            if name not in self.stored.files:
                raise ArtifactError("not in the manifest", self.stored.path / name, f"{command} --force")

    def read(self) -> dict[str, bytes]:
        """Return the content of every graph file, by graph name."""
        return {graph: self.stored.file(name).read_bytes() for graph, name in self.graph_files.items()}

    def replaced_file(self) -> str | None:
        """See :meth:`Record.replaced_file`; graphs missing from the evidence count too."""
        unknown = (name for name in self.graph_files.values() if name not in self.digests)
        return next(unknown, None) or super().replaced_file()

    def check_verified(self) -> None:
        """Raise :class:`ParityError` unless the graphs are verified."""
        reason = self.doubt()
        if reason is not None:
            verify = f"zoo verify {self.stored.path}" + (f" --variant {self.variant}" if self.variant else "")
            if reason == self._other_evidence():
                verify = f"{self.traits.command(self.stored.path)} --force"
            remedy = Wording(
                f"{verify}, or open it with unverified=True", f"{verify}, or run it with --unverified", otherwise=verify
            )
            raise ParityError(f"the export is not verified ({reason})", self.stored.path, remedy)

    def check_digests(self, recorded: Mapping[str, str | None]) -> None:
        """Raise :class:`ArtifactError` unless each graph, by name, records the digest of the stored evidence."""
        digest = evidence_digest(self.evidence)
        for name, found in recorded.items():
            if found != digest:
                problem = f"{self.evidence_file} is not the evidence for this graph"
                raise ArtifactError(problem, self.stored.path / self.graph_files[name], "export again")


def find_exports(stored: ModelDirectory) -> list[Export]:
    """Return the ONNX exports of a model directory, the default export first."""
    names = (re.fullmatch(r"parity(?:\.([\w-]+))?\.json", name) for name in sorted(stored.files, key=len))
    return [Export(stored, match[1] or "") for match in names if match]


def find_records(stored: ModelDirectory) -> list[Record]:
    """Return the record of every export, in any format."""
    return [
        Record(stored, stem=name.removesuffix(".json"))
        for name in sorted(stored.files)
        if EVIDENCE_NAME.fullmatch(name)
    ]


def declared_graphs(
    spec: ModelSpec,
    variant: str = "",
    *,
    windows: bool = False,
    attention_inputs: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> tuple[Graph, ...]:
    """Return the graphs of a model with the outputs of a variant. With ``windows``, the declared ones limit its past.

    ``attention_inputs`` holds the fields of :class:`zoo.contract.AttentionInputs` for attention weights, by graph and
    name. What these weights are computed from is then an output, too.

    Raises :class:`UsageError` for the attention weights of a model that declares none.
    """
    interface = variant_of(variant).interface
    if interface == "int8 cache":
        return tuple(graph.with_int8_cache() for graph in spec.graphs)
    if interface != "attentions":
        return spec.windowed_graphs if windows else spec.graphs
    if not any(graph.attentions for graph in spec.graphs):
        what = f"{spec.plugin}: {spec.architecture.name} declares no attention weights"
        raise UsageError(what, spec.name, "declare them as attentions of its zoo.Graph")
    inputs_by_graph = attention_inputs or {}
    return tuple(
        graph.with_attentions(
            [
                AttentionInputs(weights=tensor, **inputs_by_graph[graph.name][tensor.name])
                for tensor in graph.attentions
                if tensor.name in inputs_by_graph.get(graph.name, {})
            ]
        )
        for graph in spec.graphs
    )


def copy_model(source: Path, target: Path, *, force: bool) -> None:
    """Check a model and copy it to a new directory, without its exports."""
    check_model_target(target, force=force)
    stored = ModelDirectory.open(source, rehash=True)
    exported = {name for record in find_records(stored) for name in (record.evidence_file, *record.files)}
    with storage.new_directory(target, force=force, owned=listed_files) as stage:
        for name in stored.files:
            if name not in exported:
                shutil.copyfile(source / name, stage / name)
        remove_section(stage / CARD)
        write_manifest(stage, entries_of(stage))
