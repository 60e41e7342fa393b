"""Parity evidence of exported graphs, and the digests that bind the two."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zoo.artifact import EVIDENCE_KEY, TOKENIZER, Export, ModelDirectory, evidence_digest, write_json
from zoo.artifact.digests import digest_file
from zoo.errors import ArtifactError, ParityError
from zoo.version import __version__
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.metadata import TOKENIZER_KEY, WEIGHTS_KEY, annotate, metadata
from zoo_export.graph.standard import fault
from zoo_export.parity.rule import RULE
from zoo_export.trace.make import Options

if TYPE_CHECKING:
    from zoo_export.parity.sweep import Sweep

__all__ = [
    "check_evidence",
    "check_graphs",
    "evidence_of",
    "metadata_of",
    "stage_export",
    "stage_graphs",
    "unverified",
    "versions",
    "write_export",
]


def versions(engine: str = "onnxruntime") -> dict[str, str]:
    """Return the versions of the packages that a comparison on a runtime depends on."""
    tools = (engine, "torch", "onnx", "onnx-ir", "onnxscript")
    numbers = {"zoo": __version__, "python": platform.python_version()}
    for name in tools:
        for distribution in (name, f"{name}-gpu"):
            with suppress(PackageNotFoundError):
                numbers[name] = version(distribution)
    return numbers


def evidence_of(sweep: Sweep, *, verified: bool) -> dict[str, Any]:
    """The content of parity.json, but for the digests of the files."""
    subject, findings = sweep.subject, sweep.findings
    return {
        "schema": 1,
        "verified": verified,
        "model": subject.stored.description["name"],
        "rule": RULE,
        **({"discontinuous": reason} if (reason := subject.stored.spec.architecture.discontinuous) else {}),
        **subject.facts(),
        "graphs": {
            graph.name: {**sweep.graph_facts[graph.name], "outputs": findings.outputs(graph)}
            for graph in subject.graphs
        },
        "logits": {level: item.to_dict() for (level, _, _), item in findings.distributions.items()},
        "greedy_decoding": findings.greedy,
        "grid": sweep.facts(),
        "config": subject.stored.config_digest(),
        "weights": subject.stored.weight_digests(),
        "companions": subject.stored.companion_digests(),
        "versions": versions(subject.engine),
    }


def unverified(reason: str, options: Options) -> dict[str, Any]:
    """Return the evidence of graphs that were not compared with the model."""
    versions = {"zoo": __version__}
    return {"schema": 1, "verified": False, "reason": reason, "options": options.facts(), "versions": versions}


def check_evidence(export: Export, graphs: Mapping[str, bytes]) -> None:
    """Raise :class:`ArtifactError` unless each graph's metadata contains the digest of the stored evidence."""
    export.check_digests({name: metadata(graph).get(EVIDENCE_KEY) for name, graph in graphs.items()})


def write_export(
    export: Export,
    graphs: Mapping[str, bytes],
    evidence: Mapping[str, Any],
    recorded: bytes | None = None,
    *,
    action: str = "exported",
) -> None:
    """Add graphs (by name) and their evidence to a model directory, atomically.

    An earlier sample of the comparison is removed, unless the evidence lists it.

    Raises :class:`ArtifactError` if the model or its export of this variant has changed since it was opened.
    ``action`` names the operation in the error message.
    """
    stale = {export.recorded_file} & export.stored.files.keys() - evidence.get("files", {}).keys()
    with export.stored.adding(removed=stale, action=action) as stage:
        stage_export(export, stage, graphs, evidence, recorded)


def stage_export(
    export: Export,
    stage: Path,
    graphs: Mapping[str, bytes],
    evidence: Mapping[str, Any],
    recorded: bytes | None = None,
) -> None:
    """Write graphs, their evidence and the sample of their comparison, if one is kept, to a staged model directory.

    The evidence covers files staged earlier, and those that it lists already.
    """
    if recorded is not None:
        (stage / export.recorded_file).write_bytes(recorded)
    others = dict(evidence.get("files", {})) | {path.name: digest_file(path) for path in stage.iterdir()}
    files = {export.graph_files[name]: graph for name, graph in graphs.items()}
    stage_graphs(stage, files, export.evidence_file, {**evidence, "files": others}, metadata_of(export.stored))


def check_graphs(export: Export, graphs: Mapping[str, bytes]) -> None:
    """Raise :class:`ArtifactError`, naming the file, if a stored graph violates the ONNX standard."""
    for name, graph in graphs.items():
        try:
            problem = fault(parse(graph))
        except ArtifactError as error:
            problem = str(error)
        if problem is not None:
            path = export.stored.path / export.graph_files[name]
            raise ArtifactError(f"not a valid ONNX graph ({problem})", path, "export again with zoo export --force")


def stage_graphs(
    stage: Path,
    graphs: Mapping[str, bytes],
    evidence_file: str,
    evidence: Mapping[str, Any],
    entries: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write graphs (by file name) and their evidence, each containing the digest of the other.

    ``entries`` are added to the metadata of the graphs.

    Raises :class:`ParityError`, and writes nothing, if a graph violates the ONNX standard.
    """
    models = {name: parse(graph) for name, graph in graphs.items()}
    for name, model in models.items():
        problem = fault(model)
        if problem is not None:
            raise ParityError(f"{name} is not a valid ONNX graph ({problem})", None, "nothing was written")
    files = dict(evidence.get("files", {}))
    evidence = {**evidence, "variant": evidence_file.removesuffix(".json").partition(".")[2]}
    for name, model in models.items():
        annotate(model, {**entries, EVIDENCE_KEY: evidence_digest(evidence)})
        (stage / name).write_bytes(serialize(model))
        files[name] = digest_file(stage / name)
    write_json(stage / evidence_file, {**evidence, "files": dict(sorted(files.items()))})


def metadata_of(stored: ModelDirectory) -> dict[str, str]:
    """Return the graph metadata that identifies its weights and tokenizer."""
    digests = list(stored.weight_digests().values())
    entries = {}
    if digests:
        joined = hashlib.sha256("".join(digests).encode()).hexdigest()
        entries[WEIGHTS_KEY] = digests[0] if len(digests) == 1 else joined
    if TOKENIZER in stored.files:
        entries[TOKENIZER_KEY] = stored.files[TOKENIZER]["sha256"]
    return entries
