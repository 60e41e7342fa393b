"""Checkpoints on a model hub, downloaded by huggingface_hub into its cache."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zoo.checkpoints.files import FILES, LEGACY_WEIGHTS, WEIGHTS, require_announced_digests
from zoo.errors import ArtifactError, UsageError

__all__ = ["fetch", "is_hub_name"]

SECONDS = 5.0
"""Time limit for the first answer of the hub."""
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_TAG = re.compile(r'(?:W/)?"?[\w+=-][\w.+=-]{0,127}"?', re.ASCII)


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
        from huggingface_hub import constants
        from huggingface_hub.utils import logging as hub_logging
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        what = "no such directory, and downloads from the hub need huggingface_hub"
        raise UsageError(what, name, "pip install attention-zoo[hub]") from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = offline or constants.HF_HUB_OFFLINE

    def cached(weights: tuple[str, ...]) -> Path:
        patterns = [*FILES, *weights]
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
        require_announced_digests(folder, patterns)
        return folder

    def download(listed: Collection[str], commit: str, weights: tuple[str, ...]) -> Path:
        # One file after another in this thread, since the library's own threads cannot be interrupted.
        patterns = [*FILES, *weights]
        files = sorted(file for file in listed if any(fnmatchcase(file, pattern) for pattern in patterns))
        if not files:
            raise ArtifactError("has no files that zoo reads", name, "check the name")
        folders = {Path(hub.hf_hub_download(name, file, revision=revision)).parents[file.count("/")] for file in files}
        folder = folders.pop()
        if folders or folder.name != commit:
            raise ArtifactError("has changed while it was downloaded", name, "retry")
        require_announced_digests(folder, patterns)
        return folder

    with _quiet(hub_logging), _reported(name, offline=offline):
        if offline:
            folder = cached(WEIGHTS)
            return folder if any((folder / file).exists() for file in WEIGHTS) else cached(LEGACY_WEIGHTS)
        with _checked_headers(hub.get_session(), name):
            info = hub.HfApi().model_info(name, revision=revision, timeout=SECONDS)  # one attempt, unlike downloads
            commit = info.sha or ""
            _check(_COMMIT, commit, name)
            listed = {file.rfilename for file in info.siblings or ()}
            return download(listed, commit, WEIGHTS if listed.intersection(WEIGHTS) else LEGACY_WEIGHTS)


@contextmanager
def _quiet(hub_logging: Any) -> Iterator[None]:
    """Silence the logger of huggingface_hub, which would print two lines for each retry."""
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)


@contextmanager
def _reported(name: str, *, offline: bool) -> Iterator[None]:
    """Convert the errors of huggingface_hub and of its HTTP library to :class:`ArtifactError`."""
    from huggingface_hub import constants, errors

    try:
        yield
    except ArtifactError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = "access denied" if isinstance(error, errors.GatedRepoError) else "no such checkpoint on the hub"
        raise ArtifactError(what, name, "check the name, or log in with `hf auth login`") from error
    except Exception as error:
        if offline:
            what = "no such file or directory, not in the hub's cache, and downloads are disabled"
            raise ArtifactError(what, name, "go online once") from error
        reason = " ".join(str(error).split())[:200]
        remedy = f"check the connection to {constants.ENDPOINT} and retry; completed files are kept"
        raise ArtifactError(f"cannot be downloaded ({type(error).__name__}: {reason})", name, remedy) from error


@contextmanager
def _checked_headers(session: Any, name: str) -> Iterator[None]:
    """Check what huggingface_hub makes file names of, in every answer: the commit, and the tags of files."""

    def check(response: Any) -> None:
        headers = response.headers
        if (commit := headers.get("X-Repo-Commit")) is not None:
            _check(_COMMIT, commit, name)
        if response.request.method == "HEAD":
            for key in ("ETag", "X-Linked-Etag"):
                _check(_TAG, headers.get(key, "none"), name)

    before = session.event_hooks
    session.event_hooks = {**before, "response": [*before.get("response", ()), check]}
    try:
        yield
    finally:
        session.event_hooks = before


def _check(pattern: re.Pattern[str], text: str, name: str) -> None:
    if not pattern.fullmatch(text):
        kind = "commit" if pattern is _COMMIT else "ETag"
        raise ArtifactError(f"the hub announced {text!r:.80}, which is no {kind}", name, "do not use this hub")
