"""Whether evidence holds for the files of a directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.artifact.contradictions import contradictions
from zoo.artifact.layout import SCHEMA
from zoo.artifact.measured import digests_of
from zoo.errors import ArtifactError

__all__ = ["change_since", "changed_companion", "contradiction_in", "covered_files", "doubt_about", "replaced_file"]

Files = Mapping[str, Mapping[str, Any]]


def replaced_file(evidence: Mapping[str, Any], files: Files) -> str | None:
    """Return the first file whose digest in the manifest differs from the evidence, or None."""
    for name, digest in digests_of(evidence).items():
        if files.get(name, {}).get("sha256") != digest:
            return name
    return None


def doubt_about(evidence: Mapping[str, Any], name: str) -> str | None:
    """Return why the evidence in the file ``name`` does not say that an export is verified, or None."""
    if evidence.get("schema") != SCHEMA:
        return f"{name} has an unknown schema"
    stem, _, variant = name.removesuffix(".json").partition(".")
    if stem == "parity" and evidence.get("variant", variant) != variant:
        return f"{name} is the evidence of another variant"
    if evidence.get("verified") is not True:
        return str(evidence.get("reason", "it was not compared"))
    return None


def changed_companion(evidence: Mapping[str, Any], companions: Mapping[str, str]) -> str | None:
    """Return which file beside the weights, such as the tokenizer, is not that of the comparison, or None.

    Args:
        evidence: the content of a file of evidence. That of earlier versions does not say, and is not doubted.
        companions: the digests of the present files.
    """
    compared = evidence.get("companions")
    if compared is None:
        return None
    if not isinstance(compared, dict):
        return "companions is not a list of digests"
    for name in sorted(compared.keys() | companions.keys()):
        if compared.get(name) != companions.get(name):
            what = "is missing" if name not in companions else "was added" if name not in compared else "has changed"
            return f"{name} {what} since verification"
    return None


def covered_files(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SHA-256 of every file that evidence names: weights, files beside them, and exported files."""
    listed = (evidence.get(key) for key in ("weights", "companions", "files"))
    return {name: digest for part in listed if isinstance(part, dict) for name, digest in part.items()}


def contradiction_in(evidence: Mapping[str, Any], name: str) -> str | None:
    """Return what contradicts the verdict of evidence in the file ``name`` that says verified, or None."""
    try:
        return next(contradictions(evidence, name), None)
    except ArtifactError as error:
        return str(error)


def change_since(
    evidence: Mapping[str, Any], name: str, config: str, weights: Mapping[str, str], replaced: str | None
) -> str | None:
    """Return what has changed since an export was compared, or None.

    Args:
        evidence: the content of the file ``name``.
        name: the file.
        config: the digest of the present configuration.
        weights: the digests of the present weights.
        replaced: a file that is not the one that was compared.
    """
    if evidence.get("config") != config:
        return "config.json has changed since verification"
    if evidence.get("weights") != weights:
        return "the weights have changed since verification"
    if replaced is not None:
        return f"{replaced} is not the file that was compared"
    return None if digests_of(evidence) else f"{name} lists no files"
