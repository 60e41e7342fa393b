"""Checkpoints on a model hub, downloaded by huggingface_hub into its cache."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from zoo.checkpoints.files import FILES, LEGACY_WEIGHTS, WEIGHTS, require_announced_digests
from zoo.errors import ArtifactError, UsageError

__all__ = ["fetch", "is_hub_name"]

SECONDS = 5.0
"""Time limit for the first answer of the hub."""


def is_hub_name(source: str) -> bool:
    """Return whether a text is not an existing path and could be a hub name: ``OWNER/NAME``."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source)) and not Path(source).exists()


def fetch(name: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """Download the missing files of a checkpoint and return its directory.

    Broken connections are retried, and completed files of an interrupted download are kept. Pickled weights are
    downloaded only if there are no others. Every file is compared with the digest that the hub announced for it.

    Args:
        name: ``OWNER/NAME``.
        revision: branch, tag or commit; ``main`` by default.
        offline: use the cache only, as with ``HF_HUB_OFFLINE=1``.

    Raises:
        UsageError: huggingface_hub is not installed.
        ArtifactError: the checkpoint does not exist, access is denied, it is neither reachable nor in the cache, or a
            file does not have the announced digest.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import logging as hub_logging
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        what = "no such directory, and downloads from the hub need huggingface_hub"
        raise UsageError(what, name, "pip install attention-zoo[hub]") from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = offline or constants.HF_HUB_OFFLINE

    def snapshot(weights: tuple[str, ...]) -> Path:
        wanted = [*FILES, *weights]
        found = Path(hub.snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=offline))
        require_announced_digests(found, wanted)
        return found

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)  # each retry would print two lines
    try:
        if offline:
            found = snapshot(WEIGHTS)
            return found if any((found / file).exists() for file in WEIGHTS) else snapshot(LEGACY_WEIGHTS)
        known = hub.HfApi().model_info(name, revision=revision, timeout=SECONDS)  # one attempt, unlike downloads
        listed = {file.rfilename for file in known.siblings or ()}
        return snapshot(WEIGHTS if listed.intersection(WEIGHTS) else LEGACY_WEIGHTS)
    except ArtifactError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = "access denied" if isinstance(error, errors.GatedRepoError) else "no such checkpoint on the hub"
        raise ArtifactError(what, name, "check the name, or log in with `hf auth login`") from error
    except Exception as error:  # errors of huggingface_hub and of its HTTP library
        if offline:
            what = "no such file or directory, not in the hub's cache, and downloads are disabled"
            raise ArtifactError(what, name, "go online once") from error
        reason = " ".join(str(error).split())[:200]
        remedy = f"check the connection to {constants.ENDPOINT} and retry; completed files are kept"
        raise ArtifactError(f"cannot be downloaded ({type(error).__name__}: {reason})", name, remedy) from error
    finally:
        hub_logging.set_verbosity(verbosity)
