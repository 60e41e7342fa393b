"""The prompt of a speech recogniser: tokens for the language, the task and the absence of timestamps.

Radford et al. 2022, section 2.3. generation_config.json names the tokens, under the keys of Whisper's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from zoo.artifact.weights import load_json
from zoo.errors import ArtifactError, UsageError, nearest, task_option

__all__ = ["SpeechPrompt"]


@dataclass(frozen=True)
class SpeechPrompt:
    """The tokens before a text, as the ``generate`` of transformers chooses them.

    >>> prompt = SpeechPrompt(start=50258, languages={"en": 50259}, tasks={"transcribe": 50359}, no_timestamps=50363)
    >>> prompt.tokens("en"), prompt.detects
    ([50258, 50259, 50359, 50363], True)
    """

    start: int
    """The first token of every text."""
    languages: Mapping[str, int] = field(default_factory=dict)
    """Tokens of languages by their codes; empty for a model of one language."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Tokens of ``transcribe`` and ``translate``."""
    no_timestamps: int | None = None
    """Token after which a text has no timestamps."""
    forced: tuple[int | None, ...] = ()
    """Tokens after the first one, unless a language or a task is chosen. None stands for the detected language."""
    language: str | None = None
    """Code of the chosen language."""
    task: str | None = None
    """The chosen task."""
    timestamps: bool = False
    """Whether texts have timestamps."""
    latest_start: int | None = None
    """``max_initial_timestamp_index``, the largest first timestamp."""
    before_context: int | None = None
    """``prev_sot_token_id``, the token before earlier text in a prompt."""

    @classmethod
    def read(
        cls, path: Path | None, start: int, *, language: str | None, translate: bool, timestamps: bool = False
    ) -> Self:
        """Return the prompt that a model's generation_config.json describes.

        Args:
            path: the file; None for a model without it, whose prompt is the first token alone.
            start: the first token.
            language: code of the chosen language; by default that of the file, else it is detected.
            translate: whether to translate to English.
            timestamps: whether texts have timestamps.

        Raises:
            ArtifactError: the file is malformed.
            UsageError: the model has no such language, cannot translate, or has no timestamps.
        """
        stored: Mapping[str, Any] = {} if path is None else load_json(path)
        languages = {key.strip("<|>"): token for key, token in _tokens(stored, "lang_to_id", path).items()}
        tasks = _tokens(stored, "task_to_id", path)
        language = language or stored.get("language")
        task = "translate" if translate else stored.get("task")
        code = None if language is None else str(language).lower().strip("<|>")
        if code is not None and code not in languages:
            remedy = nearest(code, languages) if languages else "leave it out"
            raise UsageError(f"the model has no language {language!r}", path, remedy)
        if task is not None and task not in tasks:
            raise UsageError(f"the model has no token for the task {task!r}", path, "leave it out")
        none = stored.get("no_timestamps_token_id")
        if none is not None and not _is_token(none):
            raise ArtifactError(f"no_timestamps_token_id must be a token id, got {none!r}", path)
        if timestamps and none is None:
            problem = "the model has no timestamps: its generation_config.json lacks no_timestamps_token_id"
            raise UsageError(problem, path, task_option("timestamps", "leave out {}"))
        latest = stored.get("max_initial_timestamp_index")
        if latest is not None and not _is_token(latest):
            raise ArtifactError(f"max_initial_timestamp_index must be a number of steps, got {latest!r}", path)
        before = _before_context(stored, path)
        return cls(start, languages, tasks, none, _forced(stored, path), code, task, timestamps, latest, before)

    @property
    def no_speech(self) -> int | None:
        """The token that stands for silence, which follows the first token in place of a language."""
        return None if self.no_timestamps is None else self.no_timestamps - 1

    @property
    def detects(self) -> bool:
        """Whether the language of a sound is detected from its first token."""
        forced = self.forced if self.language is None and self.task is None else ()
        return bool(self.languages) and self.language is None and (not forced or forced[0] is None)

    def tokens(self, language: str | None = None) -> list[int]:
        """Return the prompt, given the detected language, if it is detected.

        Without a language, the first one takes its place, so that the length is right.
        """
        free = self.language is None and self.task is None
        tokens: list[int | None] = [self.start, *(self.forced if free else ())]
        code = language or self.language or (next(iter(self.languages)) if self.detects else None)
        if code is not None:
            tokens[1:2] = [self.languages[code]]
        if self.task is not None:
            tokens.append(self.tasks[self.task])
        elif self.language is not None and "transcribe" in self.tasks:
            tokens.append(self.tasks["transcribe"])
        if self.timestamps and tokens[-1] == self.no_timestamps:
            tokens.pop()
        if not self.timestamps and self.no_timestamps is not None and tokens[-1] != self.no_timestamps:
            tokens.append(self.no_timestamps)
        return [token for token in tokens if token is not None]

    def language_of(self, tokens: list[int]) -> str | None:
        """Return the language of a prompt, if it has one."""
        codes = {token: code for code, token in self.languages.items()}
        return codes.get(tokens[1]) if len(tokens) > 1 else None


def _is_token(value: object) -> bool:
    return type(value) is int and value >= 0


def _before_context(stored: Mapping[str, Any], path: Path | None) -> int | None:
    """Return ``prev_sot_token_id``. Older files lack it, but have it in the place before the last suppressed token."""
    suppressed = stored.get("suppress_tokens") or []
    token = stored.get("prev_sot_token_id")
    if token is None and isinstance(suppressed, list) and len(suppressed) >= 2:
        token = suppressed[-2]
    if token is not None and not _is_token(token):
        raise ArtifactError(f"prev_sot_token_id must be a token id, got {token!r}", path)
    return token


def _tokens(stored: Mapping[str, Any], key: str, path: Path | None) -> dict[str, int]:
    """Return a mapping of names to tokens; empty if the file has none."""
    value = stored.get(key) or {}
    if not isinstance(value, dict) or not all(map(_is_token, value.values())):
        raise ArtifactError(f"{key} must map names to token ids, got {value!r:.80}", path)
    return value


def _forced(stored: Mapping[str, Any], path: Path | None) -> tuple[int | None, ...]:
    """Return ``forced_decoder_ids``, pairs of positions and tokens, if they begin after the first token."""
    pairs = stored.get("forced_decoder_ids") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and (pair[1] is None or _is_token(pair[1])) for pair in pairs
    ):
        raise ArtifactError(f"forced_decoder_ids must be pairs of positions and tokens, got {pairs!r:.80}", path)
    if pairs and [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise ArtifactError(f"forced_decoder_ids must have the positions 1, 2, ..., got {pairs!r:.80}", path)
    return tuple(token for _, token in pairs)
