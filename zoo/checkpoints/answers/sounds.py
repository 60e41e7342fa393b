"""Comparison of how sound is prepared, and of the tokens that it becomes, with the original."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor, nn

from zoo.arrays import Array
from zoo.audio import preparation
from zoo.checkpoints.answers.pipelines import REMEDY, Answers, ask_exactly
from zoo.checkpoints.answers.tokens import ask
from zoo.checkpoints.original import Unavailable, call
from zoo.checkpoints.sounds import EXTRACTORS, ProcessedSounds, process_sounds
from zoo.checkpoints.source import Checkpoint
from zoo.config import Config
from zoo.contract import TensorSpec
from zoo.errors import ParityError, UsageError
from zoo.registry import ModelSpec
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["SoundComparison"]

_REMEDY = "sound is not prepared as by the original; nothing was written"
_DECODED = "the tokenizer does not decode as the original; nothing was written"
_SEQUENCES, _POSITIONS = 200, 24
"""Numbers of the random sequences that are decoded, and of their positions."""


@dataclass(frozen=True)
class SoundComparison:
    """A comparison of the sound that zoo prepares, and of what it becomes, with the original."""

    spec: ModelSpec
    checkpoint: Checkpoint
    sound: TensorSpec
    """The input that is sound, (rows, samples), or a spectrogram of it."""

    @classmethod
    def of(cls, spec: ModelSpec, checkpoint: Checkpoint) -> Self | None:
        """Return the comparison for a model, None if it reads no sound that zoo prepares as fields describe."""
        tensor = spec.graphs[0].input_tensors()[0]
        reads_samples = tensor.name == "input_values" and len(tensor.dims) == 2
        reads_spectrograms = spec.config.to_dict().get("spectrogram") is not None
        return cls(spec, checkpoint, tensor) if reads_samples or reads_spectrograms else None

    @property
    def is_described(self) -> bool:
        """Whether the checkpoint has a feature extractor."""
        return any((self.checkpoint.path / name).exists() for name in EXTRACTORS)

    @cached_property
    def processed(self) -> ProcessedSounds:
        """The original's feature extractor and what it makes. Raises :class:`Unavailable` or ``ImportError``."""
        try:
            return process_sounds(self.checkpoint.path)
        except UsageError as error:
            raise Unavailable(str(error)) from error

    @property
    def _config(self) -> Any:
        return self.spec.config

    def compare_samples(self) -> int:
        """Return the number of sounds compared. Raises :class:`ParityError` for a difference."""
        rate = self.processed.extractor.sampling_rate
        if rate != self._config.sampling_rate:
            problem = f"sound is read at {self._config.sampling_rate} Hz, by the original at {rate} Hz"
            raise ParityError(problem, self.checkpoint.where, _REMEDY)
        number = self.processed.first_difference(preparation(self._config.to_dict().get))
        if number is not None:
            problem = f"sound {number + 1} is prepared in another way than by the original"
            raise ParityError(problem, self.checkpoint.where, _REMEDY)
        return len(self.processed.sounds)

    def _logits(self, model: nn.Module, value: Array) -> Tensor:
        """Return the logits of a sound as zoo's model reads it, of the model in float64."""
        feeds = {self.sound.name: torch.from_numpy(value)[None]}
        config: Config = self.spec.config
        with torch.no_grad():
            return call(config, model, feeds, torch.float64)["logits"][0]

    def text(self, tokenizer: Tokenizer, frames: Sequence[int]) -> str:
        """Return the text of the tokens of positions, without repetitions and blanks."""
        ids = [token for token, _ in groupby(frames) if token != self._config.pad_token_id]
        return tokenizer.decode(ids, special_tokens=True).strip()

    def compare_decoding(self, ours: Tokenizer, theirs: Any) -> int:
        """Compare the texts of random tokens, many of them repeated or blank, and return the number of sequences.

        Raises :class:`ParityError` for a difference.
        """
        choose, rows = random.Random(0), self._config.vocab_size
        sequences = [[self._config.pad_token_id or 0] * 2]  # an empty text
        for _ in range(_SEQUENCES - 1):
            pool = [self._config.pad_token_id or 0, *choose.choices(range(rows), k=6)]
            sequences.append(choose.choices(pool, k=_POSITIONS))
        for frames in sequences:
            found, expected = self.text(ours, frames), ask(theirs.decode, frames, skip_special_tokens=False)
            if found != expected:
                problem = f"token ids {frames} decode to {found!r}; the original's text is {expected!r}"
                raise ParityError(problem, self.checkpoint.where, _DECODED)
        return _SEQUENCES

    def compare_texts(self, model: nn.Module, theirs: nn.Module, ours: Tokenizer, tokenizer: Any) -> int:
        """Return the number of sounds whose texts are those of the original's pipeline.

        Args:
            model: zoo's model, in float64.
            theirs: the original, in float64.
            ours: the tokenizer that was written.
            tokenizer: the original's.

        Raises :class:`ParityError` for a difference.
        """
        import transformers

        kind: Any = transformers.AutomaticSpeechRecognitionPipeline
        tools = {"feature_extractor": self.processed.extractor, "tokenizer": tokenizer}
        pipeline = kind(model=theirs, **tools, device="cpu")
        prepare = preparation(self._config.to_dict().get)
        for number, sound in enumerate(self.processed.sounds, 1):
            text = self.text(ours, self._logits(model, prepare(sound)).argmax(-1).tolist())
            expected = ask_exactly(theirs, pipeline, sound)["text"]
            if text != expected:
                problem = f"the text of sound {number} is {text!r}, that of the original {expected!r}"
                raise ParityError(problem, self.checkpoint.where, REMEDY)
        return len(self.processed.sounds)

    def compare_classes(self, model: nn.Module, theirs: nn.Module, answers: Answers) -> int:
        """Return the number of sounds whose classes are those of the original's pipeline.

        Args:
            model: zoo's model, in float64.
            theirs: the original, in float64.
            answers: the classes.

        Raises :class:`ParityError` for a difference.
        """
        import transformers

        kind: Any = transformers.AudioClassificationPipeline
        extractor = self.processed.extractor
        if self._config.to_dict().get("spectrogram") == "whisper":
            # The extractor rounds its mel filters to float32, which ask_exactly would prevent.
            extractor.mel_filters = extractor.mel_filters.astype("float32")
        pipeline = kind(model=theirs, feature_extractor=extractor, device="cpu")
        sounds = {f"sound {number}": sound for number, sound in enumerate(self.processed.sounds, 1)}
        values = self.processed.values  # of spectrograms, the original's, which are less exact in quiet bands
        if len(self.sound.dims) == 2:
            values = list(map(preparation(self._config.to_dict().get), self.processed.sounds))
        prepared = iter(values)
        return answers.compare(sounds, lambda _: self._logits(model, next(prepared)), theirs, pipeline)
