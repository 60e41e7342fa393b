"""Checkpoints by their name on a model hub, downloaded by huggingface_hub into its own cache."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from zoo.errors import ArtifactError, UsageError

__all__ = ["fetch", "is_hub_name"]

_FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "*.spm",
    "spiece.model", "sentencepiece*.model", "tokenizer.model", "modules.json", "1_Pooling/config.json",
)  # fmt: skip
_SAFE = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_LEGACY = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")


def is_hub_name(source: str) -> bool:
    """Whether a text that is no path here could name a checkpoint: ``NAME`` or ``OWNER/NAME``."""
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source)) and not Path(source).exists()


def fetch(name: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """The directory of a checkpoint, after what is missing of it has been downloaded.

    A connection that breaks is taken up again, and the files that an interrupted download completed are kept. Pickled
    weights are fetched only where there are no others.

    Args:
        name: ``OWNER/NAME``.
        revision: branch, tag or commit; ``main`` by default.
        offline: look in the cache alone, as with ``HF_HUB_OFFLINE=1``.

    Raises:
        UsageError: huggingface_hub is not installed.
        ArtifactError: there is no such checkpoint, it may not be read, or cannot be reached and is not in the cache.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        what = "no such directory, and names on the hub need huggingface_hub"
        raise UsageError(what, name, "pip install attention-zoo[hub]") from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = offline or constants.HF_HUB_OFFLINE

    def snapshot(weights: tuple[str, ...]) -> Path:
        wanted = [*_FILES, *weights]
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=offline))

    try:
        if offline:
            found = snapshot(_SAFE)
            return found if any((found / file).exists() for file in _SAFE) else snapshot(_LEGACY)
        listed = hub.HfApi().list_repo_files(name, revision=revision)
        return snapshot(_SAFE if any(file in listed for file in _SAFE) else _LEGACY)
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = "may not be read" if isinstance(error, errors.GatedRepoError) else "no such checkpoint on the hub"
        raise ArtifactError(what, name, "check the name, or log in with `hf auth login`") from error
    except Exception as error:  # its own errors, and those of the library below it that connects
        if offline:
            what = "no such file or directory, nor a name in the hub's cache, and downloads are switched off"
            raise ArtifactError(what, name, "go online once") from error
        reason = " ".join(str(error).split())[:200]
        remedy = "check the connection, and repeat: what is there already is kept"
        raise ArtifactError(f"cannot be downloaded ({type(error).__name__}: {reason})", name, remedy) from error
