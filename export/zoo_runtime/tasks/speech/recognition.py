"""Speech recognition: text for sound, transcribed or translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import GENERATION
from zoo.audio import HOP, SAMPLING_RATE, AudioReader, log_mel
from zoo.contract import Size
from zoo.errors import ArtifactError, UsageError, Wording, task_option
from zoo.terminal import printable
from zoo_runtime.generation.choices import Choices, Ranked
from zoo_runtime.generation.options import Generation
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.generation.text import GrowingText
from zoo_runtime.generation.timestamps import Segment, Timestamps
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.text_runner import Tokens, chosen_adapters
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.speech.prompt import SpeechPrompt

__all__ = ["Sound", "SpeechOptions", "SpeechRecognition"]


_STEP = 2 * HOP
"""Samples per step of a timestamp: 20 ms."""


@dataclass(frozen=True, kw_only=True)
class SpeechOptions(Generation):
    """Options of speech recognition. By default, a text may fill the model's positions."""

    language: str | None = None
    """Code of the language that is spoken, such as ``en``; by default it is detected, if the model knows several."""
    translate: bool = False
    """Whether to translate to English instead of transcribing."""
    windows: bool = False
    """Whether to read a longer sound in windows of the model's length, one after another. They are cut anywhere, so a
    word at a border may be lost; by default, a longer sound is refused."""
    timestamps: bool = False
    """Whether to divide the text into segments with times. A longer sound is read in windows of which each begins where
    the last complete segment ends (Radford et al. 2022, section 3.8)."""


@dataclass(frozen=True)
class Sound(Tokens):
    """A sound and the prompt of its text, ``ids``."""

    samples: Array = field(default_factory=lambda: np.zeros(0, np.float32), kw_only=True, repr=False, compare=False)
    has_language: bool = field(default=False, kw_only=True)
    """Whether the prompt contains the detected language."""


class SpeechRecognition(Generate):
    """``generated``, the text of a sound, and its ``generated_ids``, ``seconds`` and ``language``.

    With ``timestamps``, also ``segments``, each with ``start`` and ``end`` in seconds, ``text`` and ``ids``.

    An input is a WAV file, its bytes, or an array: see :class:`zoo.audio.AudioReader`. It is padded with silence to the
    length of the model. Unset options come from the model's generation_config.json, as does the prompt.
    """

    options = SpeechOptions
    causal = False
    handled_keys = frozenset({"forced_decoder_ids"})

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of generation_config.json, whose ``max_length`` does not count the prompt."""
        options = {**super().defaults(session, given)}
        if not given.keys() & {"max_new_tokens", "max_length"}:
            new = options.get("max_new_tokens")
            options["max_new_tokens"] = session.option("max_seq_len") if new is None else new + 1
        return options

    def __init__(self, session: Context, chosen: SpeechOptions) -> None:
        super().__init__(session, chosen)
        self.sound = self.graph.input_tensors()[0]
        size = self.graph.sizes.get(str(self.sound.dims[-1]), Size())
        if len(self.graph.input_tensors()) > 1 or self.sound.dtype != "float" or size.max is None:
            raise UsageError("the model's first graph does not read sound of a limited length", session.path)
        self.as_features = len(self.sound.dims) == 3
        self.longest = size.max * (HOP if self.as_features else 1)
        """Number of samples in a window of the model."""
        start = session.option("decoder_start_token_id")
        if start is None:
            raise UsageError("the model has no decoder_start_token_id", session.path)
        path = session.path / GENERATION if GENERATION in session.stored.files else None
        self.speech = SpeechPrompt.read(
            path, start, language=chosen.language, translate=chosen.translate, timestamps=chosen.timestamps
        )
        self.times = self._timestamps()
        if self.times is not None:
            self.choose = Choices(chosen, self.ends, self.choose.bias, self.times)
        if self.in_one_graph and (self.speech.tokens() != [start] or chosen.timestamps):
            raise UsageError("this variant writes no prompt", session.path, "choose another variant")
        drafter = None if self.drafting is None else self.drafting.drafter
        if isinstance(drafter, SpeechRecognition) and drafter.longest != self.longest:
            lengths = f"{drafter.longest / SAMPLING_RATE:g} s of sound, not {self.longest / SAMPLING_RATE:g} s"
            problem = f"the model that drafts reads {lengths}"
            raise UsageError(problem, drafter.session.path, "choose one of the same length")
        self.reader = AudioReader()

    def _timestamps(self) -> Timestamps | None:
        """Return the tokens of timestamps, if they are wanted."""
        none = self.speech.no_timestamps
        if not self.chosen.timestamps or none is None:
            return None
        if not self.ends:
            raise UsageError(
                "timestamps need an eos_token_id", self.session.path, task_option("timestamps", "leave out {}")
            )
        return Timestamps(none + 1, min(self.ends), self.speech.latest_start)

    def samples(self) -> Sequence[Any]:
        """Return a rising tone, noise that ends in silence, and a single sample."""
        times = np.arange(self.longest) / SAMPLING_RATE
        tone = 0.5 * np.sin(2 * np.pi * (200 + 400 * times) * times)
        noise = np.random.default_rng(0).normal(0, 0.1, self.longest // 2 + 1)
        return [tone.astype(np.float32), noise.astype(np.float32), np.array([1000], np.int16)]

    def read(self, value: Any, number: int) -> Sound:
        """Read a sound. Raises :class:`zoo.ArtifactError` if it is too long, unless windows are read."""
        where = f"input {number}"
        samples = self.reader.read(value, where, self._check_seconds)
        self._check_seconds(len(samples) / SAMPLING_RATE, where)
        return Sound(number, self.speech.tokens(), samples=samples)

    def _check_seconds(self, seconds: float, where: str | None) -> None:
        longest = self.longest / SAMPLING_RATE
        if seconds > longest and not (self.chosen.windows or self.chosen.timestamps):
            problem = f"{seconds:.1f} s of sound exceed the model's {longest:g} s"
            remedy = Wording(
                "cut it, or set windows=True or timestamps=True",
                "cut it, or set --option windows=true or --option timestamps=true",
            )
            raise ArtifactError(problem, where, remedy)

    def size(self, item: Tokens) -> int:
        return 1  # all are padded to the same length

    def fits(self, longest: int, size: int) -> bool:
        return True

    def prompt(self, item: Tokens) -> list[int]:
        return item.ids

    def windows(self, item: Tokens) -> list[Sound]:
        """Return the windows of a sound as sounds of their own."""
        assert isinstance(item, Sound)
        starts = range(0, len(item.samples), self.longest)
        return [replace(item, samples=item.samples[start : start + self.longest]) for start in starts]

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> dict[str, Array]:
        """Return the input of the encoder, padded with silence on the right."""
        rows = np.zeros((len(items), self.longest), np.float32)
        for row, item in zip(rows, items, strict=True):
            assert isinstance(item, Sound)
            row[: len(item.samples)] = item.samples
        if self.as_features:
            rows = log_mel(rows, int(self.sound.dims[1]))
        return {self.sound.name: rows.astype(self.session.dtype)} | chosen_adapters(self.session, items)

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        """Encode sounds, and detect the languages that are neither chosen nor detected yet."""
        stepper = self.session.stepper(self.feed(items))
        if self.speech.detects and not all(isinstance(item, Sound) and item.has_language for item in items):
            codes = [*self.speech.languages]
            tokens = [*self.speech.languages.values()]
            first = np.full((len(items), 1), self.speech.start, np.int64)
            best = stepper.step(first)[:, tokens].argmax(-1)
            stepper.roll_back(1)
            items = [
                replace(item, ids=self.speech.tokens(codes[place]), has_language=True)
                for item, place in zip(items, best, strict=True)
                if isinstance(item, Sound)
            ]
        ids = np.array([item.ids for item in items], np.int64)
        return items, stepper, ids, np.ones_like(ids)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        """Answer each window of each sound, and join the answers of a sound."""
        if self.times is not None:
            return self._timed(items, self.times)
        parts = [self.windows(item) for item in items]
        results = iter(self._each(list(chain.from_iterable(parts))))
        return [self._joined([next(results) for _ in part]) for part in parts]

    def _each(self, rows: Sequence[Tokens]) -> list[Any]:
        """Answer single windows, in batches."""
        batches = (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))
        return [result for batch in batches for result in super(SpeechRecognition, self).answer(batch)]

    def _timed(self, items: Sequence[Tokens], times: Timestamps) -> list[Any]:
        """Answer sounds with segments. All sounds that are not finished advance by a window at a time."""
        waiting = {place: item for place, item in enumerate(items) if isinstance(item, Sound)}
        starts = [0] * len(items)
        results: list[list[Any]] = [[] for _ in items]
        segments: list[list[Any]] = [[] for _ in items]
        while waiting:
            rows = [
                replace(item, samples=item.samples[starts[place] : starts[place] + self.longest])
                for place, item in waiting.items()
            ]
            for (place, item), row, result in zip(list(waiting.items()), rows, self._each(rows), strict=True):
                results[place].append(result)
                if not isinstance(result, dict):
                    del waiting[place]
                    continue
                ids = [token for token in result["generated_ids"] if token not in self.ends]
                parts, steps = times.split(ids, -(-len(row.samples) // _STEP))
                segments[place] += [self._segment(item, part, starts[place], times) for part in parts]
                starts[place] += max(steps, 1) * _STEP
                if starts[place] >= len(item.samples):
                    del waiting[place]
                elif result["language"] is not None:
                    tokens = self.speech.tokens(result["language"])
                    waiting[place] = replace(item, ids=tokens, has_language=True)
        return [self._with_segments(*timed) for timed in zip(items, results, segments, strict=True)]

    def _segment(self, item: Tokens, segment: Segment, offset: int, times: Timestamps) -> dict[str, Any]:
        words = [token for token in segment.ids if token < times.first]
        text = None
        if self.session.tokenizer is not None:
            text = self.tokenizer.target.continuation(self.prompt(item), words)
        start, end = ((offset + step * _STEP) / SAMPLING_RATE for step in (segment.start, segment.end))
        return {"start": start, "end": end, "text": text, "ids": segment.ids}

    def _with_segments(self, item: Tokens, results: Sequence[Any], segments: list[dict[str, Any]]) -> Any:
        """Return the result of a sound, given those of its windows and its segments, or the first error."""
        joined = self._joined(results)
        if not isinstance(joined, dict):
            return joined
        assert isinstance(item, Sound)
        texts = [segment["text"] for segment in segments]
        if len(results) > 1:
            joined.pop("logprobs", None)  # those of the windows remain
        return {
            **joined,
            "seconds": len(item.samples) / SAMPLING_RATE,
            "generated_ids": list(chain.from_iterable(segment["ids"] for segment in segments)),
            "generated": None if None in texts else "".join(texts),
            "segments": segments,
        }

    def _joined(self, results: Sequence[Any]) -> Any:
        """Return the result of a sound, given those of its windows, or the first error."""
        errors = [result for result in results if not isinstance(result, dict)]
        if errors or len(results) == 1:
            return [*errors, *results][0]
        texts = [result["generated"] for result in results]
        of_windows = {"score", "beams", "speculation"}
        joined = {key: value for key, value in results[-1].items() if key not in of_windows}
        if "logprobs" in joined:
            joined["logprobs"] = list(chain.from_iterable(result["logprobs"] for result in results))
        return {
            **joined,
            "seconds": sum(result["seconds"] for result in results),
            "language": results[0]["language"],
            "generated_ids": list(chain.from_iterable(result["generated_ids"] for result in results)),
            "generated": None if None in texts else "".join(texts),
            "windows": results,
        }

    def stream(self, item: Tokens) -> Iterator[str]:
        """Yield the text piece by piece. Raises :class:`UsageError` with timestamps, whose texts may be cut later."""
        if self.times is not None:
            raise UsageError(
                "texts with timestamps cannot stream", self.session.path, task_option("timestamps", "leave out {}")
            )
        return super().stream(item)

    def _pieces(self, item: Tokens) -> Iterator[str]:
        return chain.from_iterable(map(super()._pieces, self.windows(item)))

    def result(
        self,
        item: Tokens,
        ids: list[int],
        reason: str | None,
        text: GrowingText | None = None,
        ranks: Sequence[Ranked] = (),
    ) -> dict[str, Any]:
        assert isinstance(item, Sound)
        facts = {"seconds": len(item.samples) / SAMPLING_RATE, "language": self.speech.language_of(item.ids)}
        result = super().result(item, ids, reason, text, ranks)
        return facts | {key: value for key, value in result.items() if key != "tokens"}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield the texts, without the space that begins a text after a prompt."""
        for answer in answers:
            text = answer.result["generated"]
            ids = answer.result["generated_ids"]
            yield printable(text.lstrip(" ") if text is not None else ",".join(map(str, ids)))
