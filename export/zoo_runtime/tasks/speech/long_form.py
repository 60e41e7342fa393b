"""Texts of sounds of any length, with the times of their segments.

Radford et al. 2022, sections 3.8 and 4.5. For a model that reads spectrograms, the windows of a longer sound are cut
from the spectrogram of the whole sound, and windows, tokens and times are those of transformers' ``generate``. A model
that reads samples computes the spectrogram of each window by itself.

A frame is 10 ms, a step of a timestamp 20 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zoo.arrays import Array
from zoo.audio import HOP, SAMPLING_RATE, LogMelFrames
from zoo_runtime.generation.timestamps import Segment, Timestamps
from zoo_runtime.tasks.speech.fallback import NO_SPEECH
from zoo_runtime.tasks.speech.sound import Sound

if TYPE_CHECKING:
    from zoo.contract import TensorSpec
    from zoo.tokenizers.tokenizer import Tokenizer
    from zoo_runtime.running.context import Context
    from zoo_runtime.tasks.speech.options import SpeechOptions
    from zoo_runtime.tasks.speech.prompt import SpeechPrompt

__all__ = ["LongForm", "TimedTask", "timed_line"]

_STEP = 2
"""Frames per step of a timestamp."""
_WARMEST = 0.5
"""Texts of this temperature and above are not in the prompt of the next window."""


class TimedTask(Protocol):
    """The parts of speech recognition that reading window by window uses."""

    session: Context
    chosen: SpeechOptions
    speech: SpeechPrompt
    sound: TensorSpec
    ends: frozenset[int]
    longest: int
    as_features: bool

    @property
    def tokenizer(self) -> Tokenizer: ...

    def answer_windows(self, windows: Sequence[Sound]) -> list[Any]: ...

    def joined(self, results: Sequence[Any]) -> Any: ...


@dataclass
class _Reading:
    """How far a sound has been read."""

    sound: Sound
    frames: LogMelFrames | None
    """The spectrogram, for a model that reads it."""
    count: int
    """Number of frames of the sound."""
    place: int = 0
    """Frame at which the next window begins."""
    conditions: bool = True
    """Whether the text so far may be in the prompt."""
    previous: list[int] = field(default_factory=list)
    """The last tokens of the text so far."""
    segments: list[dict[str, Any]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    """The results of windows; the last one may be an error."""

    @property
    def ended(self) -> bool:
        """Whether no window is left."""
        failed = bool(self.results) and not isinstance(self.results[-1], dict)
        return failed or (bool(self.results) and self.place >= self.count)


class LongForm:
    """Reads sounds window by window, for a task that writes timestamps.

    Args:
        task: decodes windows.
        times: the tokens of timestamps.
    """

    def __init__(self, task: TimedTask, times: Timestamps) -> None:
        self.task = task
        self.times = times
        self.width = task.longest // HOP
        """Number of frames in a window."""
        self.most_context = max(1, int(task.session.option("max_seq_len")) // 2 - 1)
        """Number of tokens of earlier text in a prompt."""

    def answer(self, sounds: Sequence[Sound]) -> list[Any]:
        """Return the results of sounds, or their errors. All sounds that are left advance by a window at a time."""
        readings = [self._open(sound) for sound in sounds]
        while waiting := [reading for reading in readings if not reading.ended]:
            self._advance(waiting)
        return [self._result(reading) for reading in readings]

    def segments(self, sound: Sound) -> Iterator[dict[str, Any]]:
        """Yield the segments of one sound, those of a window once it has been decoded. Raises its error."""
        reading = self._open(sound)
        while not reading.ended:
            known = len(reading.segments)
            self._advance([reading])
            yield from reading.segments[known:]
        if not isinstance(reading.results[-1], dict):
            raise reading.results[-1]

    def _open(self, sound: Sound) -> _Reading:
        frames = None
        if self.task.as_features:
            samples = sound.samples
            if len(samples) < self.task.longest:  # padded with silence, as in training
                samples = np.pad(samples, (0, self.task.longest - len(samples)))
            frames = LogMelFrames(samples, int(self.task.sound.dims[1]))
        return _Reading(sound, frames, len(sound.samples) // HOP)

    def _advance(self, readings: Sequence[_Reading]) -> None:
        """Decode the next window of each sound."""
        results = self.task.answer_windows([self._window(reading) for reading in readings])
        for reading, result in zip(readings, results, strict=True):
            self._take(reading, result)

    def _window(self, reading: _Reading) -> Sound:
        place, sound = reading.place, reading.sound
        features: Array | None = None
        if reading.frames is not None:
            found = reading.frames.read(place, min(place + self.width, reading.frames.count))
            features = np.pad(found, ((0, 0), (0, self.width - found.shape[1])))
        context: list[int] = []
        if self.task.chosen.condition_on_prev_tokens and reading.conditions and reading.previous:
            before = self.task.speech.before_context
            context = [*([] if before is None else [before]), *reading.previous]
        return replace(
            sound,
            ids=[*context, *sound.ids],
            context=len(context),
            samples=sound.samples[place * HOP : place * HOP + self.task.longest],
            features=features,
            start=place,
        )

    def _take(self, reading: _Reading, result: Any) -> None:
        """Add the segments of a window, and move to the next one."""
        reading.results.append(result)
        if not isinstance(result, dict):
            return
        left = min(self.width, reading.count - reading.place)
        steps = None
        if result["finish_reason"] != NO_SPEECH:
            ids = [token for token in result["generated_ids"] if token not in self.task.ends]
            segments, steps = self.times.split(ids, _steps(left))
            reading.segments += [self._segment(reading, segment) for segment in segments]
            reading.previous += chain.from_iterable(segment.ids for segment in segments)
            del reading.previous[: -self.most_context]
        reading.place += left if steps is None else max(steps, 1) * _STEP
        reading.conditions = result.get("temperature", self.task.chosen.temperature) < _WARMEST
        if result["language"] is not None:
            ids = self.task.speech.tokens(result["language"])
            reading.sound = replace(reading.sound, ids=ids, has_language=True)

    def _segment(self, reading: _Reading, segment: Segment) -> dict[str, Any]:
        words = [token for token in segment.ids if token < self.times.first]
        text = None
        if self.task.session.tokenizer is not None:
            text = self.task.tokenizer.target.continuation(reading.sound.ids, words)
        start, end = ((reading.place + _STEP * step) * HOP / SAMPLING_RATE for step in (segment.start, segment.end))
        return {"start": start, "end": end, "text": text, "ids": segment.ids}

    def _result(self, reading: _Reading) -> Any:
        """Return the result of a sound, given those of its windows, or its error."""
        joined = self.task.joined(reading.results)
        if not isinstance(joined, dict):
            return joined
        texts = [segment["text"] for segment in reading.segments]
        if len(reading.results) > 1:
            joined.pop("logprobs", None)  # those of the windows remain
        return {
            **joined,
            "seconds": len(reading.sound.samples) / SAMPLING_RATE,
            "generated_ids": list(chain.from_iterable(segment["ids"] for segment in reading.segments)),
            "generated": None if self.task.session.tokenizer is None else "".join(texts),
            "segments": reading.segments,
        }


def timed_line(segment: dict[str, Any]) -> str:
    """Return a segment with its times, in seconds.

    >>> timed_line({"start": 0.0, "end": 3.2, "text": " Good morning.", "ids": [9, 4, 17]})
    '[0.00 -> 3.20] Good morning.'
    """
    text = ",".join(map(str, segment["ids"])) if segment["text"] is None else segment["text"].strip(" ")
    return f"[{segment['start']:.2f} -> {segment['end']:.2f}] {text}"


def _steps(frames: int) -> int:
    """Return the number of steps in a number of frames.

    In float32, like transformers: for 86 of the numbers up to 3000, this is one less than half of them.
    """
    return int(np.float32(frames) * np.float32(0.01) / np.float32(0.02))
