"""The tokenizer of a checkpoint, read with the settings beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from zoo.checkpoints.layout import Layout
from zoo.checkpoints.sentences import lowers_texts
from zoo.checkpoints.source import Checkpoint
from zoo.errors import ArtifactError, UsageError, argument
from zoo.tokenizers.files.ctc import CTC_CLASS, CTC_VOCABULARY, ctc_tokenizer
from zoo.tokenizers.files.load import find_tokenizer, read_tokenizer, tokenizer_json, write_tokenizer
from zoo.tokenizers.files.pieces import pieces_tokenizer
from zoo.tokenizers.files.segments import passes_segments, without_segments
from zoo.tokenizers.files.sentencepiece import M2M100
from zoo.tokenizers.files.settings import SettledTokenizer, settle
from zoo.tokenizers.surplus import Surplus, drop_surplus, find_surplus

__all__ = ["CheckpointTokenizer"]


@dataclass(frozen=True)
class CheckpointTokenizer:
    """A tokenizer beside the weights of a checkpoint."""

    path: Path
    """Its file, or the first of its files."""
    checkpoint: Checkpoint
    layout: Layout

    @classmethod
    def find(cls, checkpoint: Checkpoint, layout: Layout) -> CheckpointTokenizer | None:
        """Return the tokenizer of a checkpoint, without reading it; None if it has none."""
        if not checkpoint.config:
            return None
        vocabulary = cls(checkpoint.path / CTC_VOCABULARY, checkpoint, layout)
        if vocabulary._is_ctc:
            return vocabulary
        path = find_tokenizer(checkpoint.path)
        if path is None and len(models := sorted(checkpoint.path.glob("*.model"))) > 1:
            names = ", ".join(model.name for model in models)
            raise ArtifactError(f"several SentencePiece models: {names}", checkpoint.path, "move all but one away")
        return None if path is None else cls(path, checkpoint, layout)

    @property
    def settings(self) -> dict[str, Any]:
        """The content of tokenizer_config.json and special_tokens_map.json, and the class that config.json names."""
        said = self.checkpoint.json("tokenizer_config.json") | self.checkpoint.json("special_tokens_map.json")
        stated = said.get("tokenizer_class") or self.checkpoint.config.get("tokenizer_class")
        return {**said, "tokenizer_class": str(stated or "").removesuffix("Fast")}

    def names(self, role: str) -> tuple[bool, str | None]:
        """Return whether the files, or the class of the tokenizer, name a special token by its role, and the name.

        Raises :class:`ArtifactError` if it is not text.
        """
        if self._settled is not None and (name := self._settled.tokens.name(role)) is not None:
            return True, name
        key, settings = f"{role}_token", self.settings
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise ArtifactError(f"{key} {token!r:.80} is not text", self.checkpoint.path)
        return key in settings, None if self._settled is not None else token

    @cached_property
    def backend(self) -> Tokenizer:
        """The tokenizer, with the settings and tokens of the files beside it.

        Raises:
            ArtifactError: it is broken, or a setting cannot be represented.
            UsageError: a setting cannot be applied, or the layout does not say how the family numbers the pieces of a
                SentencePiece model.
        """
        return self._read[0]

    @cached_property
    def _settled(self) -> SettledTokenizer | None:
        """The tokenizer of a tokenizer.json or a vocabulary; None if it is of SentencePiece."""
        layout = self.layout
        if self.path.suffix in (".model", ".spm") or self._is_ctc:
            return None
        family, overrides = layout.tokenizer, layout.overrides_tokenizer
        return settle(self.path, self.checkpoint.config, family=family, overrides=overrides)

    @cached_property
    def _read(self) -> tuple[Tokenizer, bool]:
        """The tokenizer, and whether it differs from the file."""
        if self._is_ctc:
            rows = self.checkpoint.config.get("vocab_size")
            tokenizer, changed = ctc_tokenizer(self.path, self.settings, rows), True
        elif self._settled is not None:
            tokenizer, changed = self._settled.backend, self._settled.changed
        else:
            changed = self._has_pieces
            tokenizer = self._read_pieces() if changed else read_tokenizer(self.path)
        if lowers_texts(self.checkpoint) and not _lowers(tokenizer.normalizer):
            parts = [normalizers.Lowercase(), *([tokenizer.normalizer] if tokenizer.normalizer is not None else [])]
            tokenizer.normalizer, changed = normalizers.Sequence(parts), True
        return tokenizer, changed

    @property
    def _is_ctc(self) -> bool:
        """Whether it is a vocabulary of characters for CTC."""
        is_vocabulary = self.path.name == CTC_VOCABULARY and self.path.exists()
        return is_vocabulary and self.settings["tokenizer_class"] == CTC_CLASS

    @property
    def _has_pieces(self) -> bool:
        """Whether it is a SentencePiece model alone."""
        own_ids = self.path.name == M2M100[0] and self.path.with_name(M2M100[1]).exists()
        return self.path.suffix == ".model" and not own_ids

    def _read_pieces(self) -> Tokenizer:
        classes, settings = self.layout.sentencepiece, self.settings
        written_by = settings["tokenizer_class"] or next(iter(classes), "")
        if written_by not in classes:
            problem = "a SentencePiece model alone is not a complete tokenizer of this family"
            if classes:
                problem = f"tokenizer_class {written_by!r} is not supported, only {', '.join(classes)}"
            raise UsageError(problem, self.path, "save tokenizer.json beside it with transformers, or move it away")
        if self.checkpoint.json("added_tokens.json"):
            where = self.path.with_name("added_tokens.json")
            raise ArtifactError("tokens added to a vocabulary are not supported", where)
        try:
            return pieces_tokenizer(self.path, classes[written_by](settings), settings)
        except (ArtifactError, UsageError):
            raise
        except Exception as error:  # protobuf and the tokenizers library raise their own errors
            raise ArtifactError(f"not a SentencePiece model ({error})", self.path) from error

    @property
    def _passes_segments(self) -> bool:
        """Whether the original passes segments to the model."""
        classes = (self.settings["tokenizer_class"], self.layout.tokenizer)
        name = next(filter(None, classes), "") if self._settled is None else self._settled.name
        return passes_segments(self.settings, name)

    def write(
        self, target: Path, vocab_size: int | None, *, segments: int = 0, drop_tokens: bool = False
    ) -> Surplus | None:
        """Write tokenizer.json.

        Args:
            target: the file.
            vocab_size: number of tokens of the model, if it has any.
            segments: number of segments that the model reads. Of more than one, texts have those that the original
                passes to it.
            drop_tokens: leave out added tokens with ids beyond them.

        Returns:
            The tokens that were left out, or None.

        Raises:
            UsageError: there are such ids.
            ArtifactError: a token with such an id cannot be left out.
        """
        tokenizer, changed = self._read
        surplus = find_surplus(tokenizer, vocab_size)
        if surplus is not None:
            if not drop_tokens:
                problem = f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {vocab_size}"
                remedy = argument("drop_tokens", True, "pass {} to leave these tokens out")
                raise UsageError(f"{problem}: it lacks {surplus}", self.path, remedy)
            tokenizer, changed = drop_surplus(tokenizer, surplus, self.settings, self.path), True
        if segments > 1 and not self._passes_segments:
            tokenizer, before = without_segments(tokenizer), tokenizer_json(tokenizer)
            changed = changed or tokenizer_json(tokenizer) != before
        write_tokenizer(self.path, target, vocab_size, tokenizer if changed else None)
        return surplus


def _lowers(normalizer: Any) -> bool:
    """Whether a normalizer is one that puts texts into lower case, or a sequence with such a one."""
    parts: Any = normalizer if isinstance(normalizer, normalizers.Sequence) else [normalizer]
    return any(isinstance(part, normalizers.Lowercase) for part in parts)
