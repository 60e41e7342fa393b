"""The files of a checkpoint: which of them are read, and that they are its own and complete."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zoo.artifact import COMPANIONS
from zoo.errors import ArtifactError

__all__ = [
    "FILES",
    "LEGACY_WEIGHTS",
    "WEIGHTS",
    "processor_file",
    "reading_values",
    "require_announced_digests",
    "require_own_files",
]

FILES = (
    "README.md", "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "added_tokens.json",
    "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json",
    "vocab.txt", "vocab.json", "merges.txt",
    "encoder.json", "vocab.bpe", "*.spm", "spm.model", "spiece.model", "sentencepiece*.model", "tokenizer.model",
    "modules.json",
    "*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors", "*_Dense/pytorch_model.bin",
    "*_Normalize/config.json", "config_sentence_transformers.json", "sentence_*_config.json",
)  # fmt: skip
"""Files on the hub besides the weights."""
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
LEGACY_WEIGHTS = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")

_LOCAL = (*COMPANIONS, "*.model")
"""Further files that are read from a directory."""
_PART = 1 << 20


@contextmanager
def reading_values(file: Path) -> Iterator[None]:
    """Blame a file for exceptions of code that computes with its values: they may have any type."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactError(f"has a value that cannot be read ({type(error).__name__}: {error})", file) from error


def processor_file(folder: Path) -> Path:
    """Return the file of a checkpoint that says how images or sound are prepared; transformers 5 writes the second."""
    first, second = (folder / name for name in ("preprocessor_config.json", "processor_config.json"))
    return second if second.exists() and not first.exists() else first


def require_own_files(folder: Path) -> None:
    """Raise :class:`ArtifactError` for a file besides the weights that is a link out of a checkpoint's directory.

    These files become part of the model, and a link could put any file of the user into it. Links of the hub's cache
    lead to its blobs, and are allowed.
    """
    real = folder.resolve()
    owned = [real]
    if real.parent.name == "snapshots":
        repository = real.parents[1]
        owned += [repository / "blobs", repository.parent / "blobs"]  # of the checkpoint, and shared by several
    for path in _matching(folder, (*FILES, *_LOCAL)):
        if not path.name.endswith((".safetensors", ".bin")):
            target = Path(os.path.realpath(path))  # a loop is not an error here
            if not any(target.is_relative_to(place) for place in owned):
                what = f"{path.name} is a link out of the checkpoint, to {target}"
                raise ArtifactError(what, folder, "replace it with a copy if it belongs to the model")


def require_announced_digests(snapshot: Path, patterns: Sequence[str]) -> None:
    """Raise :class:`ArtifactError` for a file in the hub's cache whose content does not have the hub's digest.

    The cache links each file of a snapshot to a blob, named by the digest that the hub announced before the download:
    the SHA-256 of a large file, or git's SHA-1 of a small one. A cache without links, as on some Windows systems, does
    not keep the digests, and nothing is compared.
    """
    for path in _matching(snapshot, patterns):
        announced = path.readlink().name if path.is_symlink() else ""
        if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", announced) and _digest(path, len(announced)) != announced:
            what = f"{path.name} does not have the digest that the hub announced, {announced}"
            raise ArtifactError(what, path.resolve(), "delete this file and repeat the download")


def _matching(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    yield from dict.fromkeys(path for pattern in patterns for path in sorted(folder.glob(pattern)))


def _digest(path: Path, length: int) -> str:
    """Return the SHA-256, or for 40 digits git's SHA-1 of a file."""
    digest = (
        hashlib.sha256() if length == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    )
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.hexdigest()
