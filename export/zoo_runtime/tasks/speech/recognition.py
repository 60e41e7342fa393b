"""Speech recognition: text for sound, transcribed or translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import GENERATION
from zoo.artifact.weights import load_json
from zoo.audio import HOP, SAMPLING_RATE, AudioReader, log_mel
from zoo.contract import Size
from zoo.errors import ArtifactError, UsageError, Wording, task_option
from zoo.probe.pipeline import decoder_inputs
from zoo.terminal import printable
from zoo_runtime.generation.choices import Choices, Continuation, Ranked, log_softmax
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.generation.text import GrowingText
from zoo_runtime.generation.timestamps import Timestamps
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.text_runner import Tokens, chosen_adapters
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of
from zoo_runtime.tasks.speech.fallback import Measures, compression_ratio, decode_again
from zoo_runtime.tasks.speech.long_form import LongForm, timed_line
from zoo_runtime.tasks.speech.options import STORED, SpeechOptions
from zoo_runtime.tasks.speech.prompt import SpeechPrompt
from zoo_runtime.tasks.speech.sound import Sound

__all__ = ["SpeechRecognition"]

_MEASURES = {field.name for field in fields(Measures)}


class SpeechRecognition(Generate):
    """``generated``, the text of a sound, and its ``generated_ids``, ``seconds`` and ``language``.

    With ``timestamps``, and of sounds that are longer than the model's window, also ``segments``, each with ``start``
    and ``end`` in seconds, ``text`` and ``ids``. If there are several windows, ``windows`` has their results. With a
    threshold, the result of a window has the fields of :class:`zoo_runtime.tasks.speech.fallback.Measures`.

    An input is a WAV file, its bytes, or an array: see :class:`zoo.audio.AudioReader`. It is padded with silence to the
    length of the model. Unset options come from the model's generation_config.json, as does the prompt.
    """

    options = SpeechOptions
    read_ahead = 1  # sounds may be hours long
    causal = False
    handled_keys = frozenset({"forced_decoder_ids"})

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of generation_config.json, whose ``max_length`` does not count the prompt."""
        options = {**super().defaults(session, given)}
        if GENERATION in session.stored.files:
            path = session.path / GENERATION
            stored = load_json(path)
            options |= {
                name: cls.options.check_field(name, stored[name], path)
                for name in STORED
                if stored.get(name) is not None and name not in given
            }
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
            path, start, language=chosen.language, translate=chosen.translate, timestamps=bool(chosen.timestamps)
        )
        self.times = self._timestamps()
        if self.times is not None:
            self.choose = Choices(chosen, self.ends, self.choose.bias, self.times)
        if self.in_one_graph and (self.speech.tokens() != [start] or chosen.timestamps or chosen.is_judged):
            raise UsageError("this variant writes no prompt", session.path, "choose another variant")
        self._check_long_form()
        drafter = None if self.drafting is None else self.drafting.drafter
        if isinstance(drafter, SpeechRecognition) and drafter.longest != self.longest:
            lengths = f"{drafter.longest / SAMPLING_RATE:g} s of sound, not {self.longest / SAMPLING_RATE:g} s"
            problem = f"the model that drafts reads {lengths}"
            raise UsageError(problem, drafter.session.path, "choose one of the same length")
        self.reader = AudioReader()
        self._others: dict[SpeechOptions, SpeechRecognition] = {}
        """The task with other options."""

    def _check_long_form(self) -> None:
        """Raise :class:`UsageError` if the model lacks something that an option needs."""
        if self.chosen.no_speech_threshold is not None and self.speech.no_speech is None:
            problem = "the model has no token for silence: its generation_config.json lacks no_timestamps_token_id"
            raise UsageError(problem, self.session.path, task_option("no_speech_threshold", "leave out {}"))
        if self.chosen.condition_on_prev_tokens and decoder_inputs(self.session.graphs[-1])[1] is None:
            problem = "the decoder has no mask, so prompts of a batch cannot have different lengths"
            raise UsageError(problem, self.session.path, task_option("condition_on_prev_tokens", "leave out {}"))

    @property
    def writes_timestamps(self) -> bool:
        """Whether the model can divide a text into segments with times."""
        return self.speech.no_timestamps is not None and bool(self.ends) and not self.in_one_graph

    @property
    def timed(self) -> SpeechRecognition:
        """The same task with timestamps."""
        return self if self.times is not None else self._with_options(timestamps=True)

    @property
    def long_form(self) -> LongForm:
        """Reads sounds window by window; of a task with timestamps."""
        assert self.times is not None
        return LongForm(self, self.times)

    def _with_options(self, **changes: Any) -> SpeechRecognition:
        """Return the task with other options, on the same session."""
        chosen = replace(self.chosen, **changes)
        if chosen == self.chosen:
            return self
        if chosen not in self._others:
            self._others[chosen] = type(self)(self.session, chosen)
        self._others[chosen].batch_size = self.batch_size
        return self._others[chosen]

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
        """Read a sound. Raises :class:`zoo.ArtifactError` if it is too long for a model that reads no windows."""
        where = f"input {number}"
        samples = self.reader.read(value, where, self._check_seconds)
        self._check_seconds(len(samples) / SAMPLING_RATE, where)
        return Sound(number, self.speech.tokens(), samples=samples)

    def _check_seconds(self, seconds: float, where: str | None) -> None:
        longest = self.longest / SAMPLING_RATE
        by_times = self.writes_timestamps and self.chosen.timestamps is not False
        if seconds > longest and not (by_times or self.chosen.windows):
            option = "timestamps" if self.writes_timestamps else "windows"
            remedy = Wording(f"cut it, or set {option}=True", f"cut it, or set --option {option}=true")
            raise ArtifactError(f"{seconds:.1f} s of sound exceed the model's {longest:g} s", where, remedy)

    def size(self, item: Tokens) -> int:
        return 1  # all are padded to the same length

    def fits(self, longest: int, size: int) -> bool:
        return True

    def prompt(self, item: Tokens) -> list[int]:
        return item.ids

    def windows(self, item: Tokens) -> list[Sound]:
        """Return the windows of a sound, cut anywhere, as sounds of their own."""
        assert isinstance(item, Sound)
        starts = range(0, len(item.samples), self.longest)
        return [
            replace(item, samples=item.samples[start : start + self.longest], start=start // HOP) for start in starts
        ]

    def feed(self, items: Sequence[Tokens], *, left: bool = False) -> dict[str, Array]:
        """Return the input of the encoder, padded with silence on the right."""
        rows = np.stack([self._heard(item) for item in items])
        return {self.sound.name: rows.astype(self.session.dtype)} | chosen_adapters(self.session, items)

    def _heard(self, item: Tokens) -> Array:
        """Return what the encoder reads of a sound: (samples,) or (mel bins, frames)."""
        assert isinstance(item, Sound)
        if not self.as_features:
            return np.pad(item.samples, (0, self.longest - len(item.samples)))
        bins = int(self.sound.dims[1])
        if item.features is not None and len(item.features) == bins:  # a model that drafts may have others
            return item.features
        return log_mel(np.pad(item.samples, (0, self.longest - len(item.samples))), bins)

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        """Encode sounds; detect the languages that are neither chosen nor detected yet, and silence if it matters."""
        sounds = [item for item in items if isinstance(item, Sound)]
        stepper = self.session.stepper(self.feed(sounds))
        detects = self.speech.detects and not all(item.has_language for item in sounds)
        silence = self.speech.no_speech if self.chosen.no_speech_threshold is not None else None
        read = 0
        if detects or silence is not None:  # both follow the first token of the prompt, after earlier text
            logits = stepper.step(*_padded([item.ids[: item.context + 1] for item in sounds]))
            if detects:
                codes, tokens = zip(*self.speech.languages.items(), strict=True)
                best = logits[:, tokens].argmax(-1)
                sounds = [
                    replace(item, ids=self.speech.tokens(codes[place]), has_language=True)
                    for item, place in zip(sounds, best, strict=True)
                ]
            if silence is not None:
                chances = np.exp(log_softmax(logits)[:, silence]).tolist()
                sounds = [replace(item, no_speech=chance) for item, chance in zip(sounds, chances, strict=True)]
            stepper.roll_back(1)
            read = stepper.length
        ids, mask = _padded([item.ids for item in sounds])
        return sounds, stepper, ids[:, read:], mask[:, read:]

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        """Answer each window of each sound, and join the answers of a sound."""
        results: list[Any] = [None] * len(items)
        timed = [place for place, item in enumerate(items) if self._is_timed(item)]
        if timed:
            sounds = [self._timed_sound(items[place]) for place in timed]
            for place, result in zip(timed, self.timed.long_form.answer(sounds), strict=True):
                results[place] = result
        others = [place for place, result in enumerate(results) if result is None]
        parts = [self.windows(items[place]) for place in others]
        found = iter(self.answer_windows(list(chain.from_iterable(parts))))
        for place, part in zip(others, parts, strict=True):
            results[place] = self.joined([next(found) for _ in part])
        return results

    def is_one_text(self, item: Tokens) -> bool:
        assert isinstance(item, Sound)
        whole = len(item.samples) <= self.longest and not self._is_timed(item) and not self.chosen.is_judged
        return whole and super().is_one_text(item)

    def _is_timed(self, item: Tokens) -> bool:
        """Whether the text of a sound is divided into segments."""
        assert isinstance(item, Sound)
        if self.chosen.timestamps is not None or self.chosen.windows:
            return self.times is not None
        return len(item.samples) > self.longest

    def _timed_sound(self, item: Tokens) -> Sound:
        assert isinstance(item, Sound)
        return replace(item, ids=self.timed.speech.tokens())

    def answer_windows(self, windows: Sequence[Sound]) -> list[Any]:
        """Answer windows, those beyond a threshold again at higher temperatures."""
        if not self.chosen.is_judged:
            return self.decode_once(windows)
        return decode_again(windows, self.chosen, lambda temperature: self._with_options(temperature=temperature))

    def decode_once(self, rows: Sequence[Tokens]) -> list[Any]:
        """Answer windows, in batches."""
        batches = (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))
        return [result for batch in batches for result in super(SpeechRecognition, self).answer(batch)]

    def joined(self, results: Sequence[Any]) -> Any:
        """Return the result of a sound, given those of its windows, or the first error."""
        errors = [result for result in results if not isinstance(result, dict)]
        if errors or len(results) == 1:
            return [*errors, *results][0]
        texts = [result["generated"] for result in results]
        of_windows = {"score", "beams", "speculation", *_MEASURES}
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
        """Yield the text piece by piece; of a text with segments, these, with their times if they were asked for.

        Raises :class:`UsageError` for other texts with thresholds, which may be discarded when they are complete.
        """
        if self._is_timed(item):
            _ = self.tokenizer  # raises
            return self._segment_texts(self._timed_sound(item))
        if self.chosen.is_judged:
            problem = "texts with thresholds are streamed by segment"
            raise UsageError(problem, self.session.path, task_option("timestamps=True", "set {}"))
        return super().stream(item)

    def _segment_texts(self, item: Sound) -> Iterator[str]:
        for number, segment in enumerate(self.timed.long_form.segments(item)):
            if self.chosen.timestamps:
                yield ("\n" if number else "") + timed_line(segment)
            else:
                yield segment["text"] if number else segment["text"].lstrip(" ")

    def _pieces(self, item: Tokens) -> Iterator[str]:
        return chain.from_iterable(map(super()._pieces, self.windows(item)))

    def open_row(self, item: Tokens, text: GrowingText | None = None) -> Continuation:
        assert isinstance(item, Sound)
        row = super().open_row(item, text)
        if item.start or item.attempt:  # other random numbers for each window of a sound, each time
            row.seed = (*row.seed, item.start, item.attempt)
        if self.chosen.is_judged:
            row.log_probability = 0.0
        return row

    def finished(self, item: Tokens, row: Continuation, text: GrowingText | None) -> Any:
        """Return the result of a window, with the numbers by which it is judged if there are thresholds."""
        result = super().finished(item, row, text)
        if row.error is not None or row.log_probability is None:
            return result
        assert isinstance(item, Sound)
        measures = Measures(
            temperature=self.chosen.temperature,
            average_logprob=row.log_probability / len(row.ids),
            compression_ratio=compression_ratio(row.ids, vocabulary_of(self.session)),
            no_speech_probability=item.no_speech,
        )
        return result | asdict(measures)

    def result(
        self,
        item: Tokens,
        ids: list[int],
        reason: str | None,
        text: GrowingText | None = None,
        ranks: Sequence[Ranked] = (),
    ) -> dict[str, Any]:
        assert isinstance(item, Sound)
        language = self.speech.language_of(item.ids[item.context :])
        facts = {"seconds": len(item.samples) / SAMPLING_RATE, "language": language}
        result = super().result(item, ids, reason, text, ranks)
        return facts | {key: value for key, value in result.items() if key != "tokens"}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield the texts, without the space that begins a text after a prompt, or the segments with their times."""
        for answer in answers:
            if self.chosen.timestamps:
                yield from map(printable, map(timed_line, answer.result["segments"]))
                continue
            text = answer.result["generated"]
            ids = answer.result["generated_ids"]
            yield printable(text.lstrip(" ") if text is not None else ",".join(map(str, ids)))


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return token ids padded on the left, and their mask, both (B, T)."""
    width = max(map(len, rows))
    ids = np.array([[row[0]] * (width - len(row)) + list(row) for row in rows], np.int64)
    lengths = np.array([[len(row)] for row in rows])
    return ids, (np.arange(width) >= width - lengths).astype(np.int64)
