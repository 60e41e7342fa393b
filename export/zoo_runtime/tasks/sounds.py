"""Tasks on sound, or on a spectrogram that is made of it: classification, and speech recognition by CTC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.audio import AudioReader, Spectrogram, preparation
from zoo.contract import Size, dim_size
from zoo.errors import ArtifactError, UsageError
from zoo.plots import Distribution
from zoo.terminal import printable
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.runner import Runner, finite, require_outputs
from zoo_runtime.running.text_runner import chosen_adapters
from zoo_runtime.tasks.classification import (
    ClassificationOptions,
    classify,
    distribution_of,
    problem_type,
    rank_classes,
    show_classes,
)

__all__ = ["AudioClassification", "CTCSpeechRecognition", "SoundRunner", "Waveform"]

SHOWN = 5
"""Number of classes in human-readable output."""


@dataclass(frozen=True)
class Waveform:
    """A sound, and what the model reads of it."""

    number: int
    samples: Array
    """(samples,)"""
    value: Array
    """The samples that the model reads, or a spectrogram."""
    adapter: int = 0
    """The number of its adapter, in the variant ``adapters``; set by the session."""


class SoundRunner(Runner[Waveform]):
    """Base class for tasks on sound: files, their bytes, or arrays, read by :class:`zoo.audio.AudioReader`.

    The configuration's ``sampling_rate`` and the fields of :func:`zoo.audio.preparation` describe how. Sounds of
    different lengths share a batch if the graph has a mask, or reads spectrograms.
    """

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.graph = session.graphs[0]
        self.sound, *others = self.graph.input_tensors()
        rate = session.option("sampling_rate")
        self.spectrogram = Spectrogram.of(session.option)
        if len(self.sound.dims) != (3 if self.spectrogram else 2) or self.sound.dtype != "float" or rate is None:
            raise UsageError("the model's first graph does not read sound", session.path)
        self.prepare = preparation(session.option)
        self.mask = next((tensor for tensor in others if tensor.is_mask), None)
        self.reader = AudioReader(rate)
        declared = self.graph.sizes.get(str(self.sound.dims[1]), Size()).min
        self.least = self.spectrogram.fewest if self.spectrogram else declared
        """Samples of the shortest sound."""
        require_outputs(self.graph, ("logits",), session.path)

    def samples(self) -> Sequence[Any]:
        """Return a rising tone, noise, silence, and the shortest sound."""
        times = np.arange(self.reader.sampling_rate // 4) / self.reader.sampling_rate
        random = np.random.default_rng(0)
        sounds = [
            0.5 * np.sin(2 * np.pi * (200 + 800 * times) * times),
            random.normal(0, 0.1, len(times) // 2 + self.least),
            np.zeros(2 * self.least),
            random.normal(0, 0.1, self.least),
        ]
        return [sound.astype(np.float32) for sound in sounds]

    def read(self, value: Any, number: int) -> Waveform:
        """Read a sound. Raises :class:`zoo.ArtifactError` if it is too short, or too long for a spectrogram."""
        where = f"input {number}"
        samples = self.reader.read(value, where)
        if len(samples) < self.least:
            problem = f"{len(samples)} samples of sound are fewer than the model's {self.least}"
            raise ArtifactError(problem, where, "add silence")
        if self.spectrogram and len(samples) > self.spectrogram.most:
            problem = f"{len(samples)} samples of sound are more than the model's {self.spectrogram.most}"
            raise ArtifactError(problem, where, "give a part of the sound")
        return Waveform(number, samples, self.prepare(samples))

    def size(self, item: Waveform) -> int:
        return len(item.samples)

    def fits(self, longest: int, size: int) -> bool:
        return self.mask is not None or self.spectrogram is not None or size == longest

    def feed(self, items: Sequence[Waveform]) -> dict[str, Array]:
        """Build the graph's inputs for a batch, padded on the right."""
        if self.spectrogram:
            rows = np.stack([item.value for item in items]).astype(self.session.dtype)
            return {self.sound.name: rows} | chosen_adapters(self.session, items)
        rows = np.zeros((len(items), max(len(item.samples) for item in items)), self.session.dtype)
        mask = np.zeros(rows.shape, np.int64)
        for place, item in enumerate(items):
            rows[place, : len(item.samples)] = item.value
            mask[place, : len(item.samples)] = 1
        masks = {} if self.mask is None else {self.mask.name: mask}
        return {self.sound.name: rows, **masks} | chosen_adapters(self.session, items)

    def compute(self, items: Sequence[Waveform]) -> Array:
        """Run the graph on a batch and return the logits."""
        outputs: dict[str, Array] = self.session.execute(self.graph, self.feed(items))
        return outputs["logits"]

    def seconds(self, item: Waveform) -> float:
        """Return the length of a sound."""
        return len(item.samples) / self.reader.sampling_rate


class CTCSpeechRecognition(SoundRunner):
    """``text`` of a sound, its token ``ids``, the likeliest token of each position (``frames``), and ``seconds``.

    Decoding is greedy (Graves et al. 2006): of equal tokens at neighbouring positions one remains, and then the blank,
    ``pad_token_id``, is left out. Spaces around the text are removed.
    """

    def __init__(self, session: Context, chosen: Any) -> None:
        super().__init__(session, chosen)
        self.blank = session.option("pad_token_id")
        if self.blank is None:
            raise UsageError("the model has no pad_token_id, the blank of CTC", session.path)

    def answer(self, items: Sequence[Waveform]) -> Sequence[Any]:
        logits = self.compute(items)
        positions = self.graph.output_tensors()[0].dims[1]
        name = str(self.sound.dims[1])
        lengths = [dim_size(positions, {name: len(item.samples)}) for item in items]
        own = [row[:length] for row, length in zip(logits, lengths, strict=True)]
        results = [self._result(item, row) for item, row in zip(items, own, strict=True)]
        sums = np.array([row.sum() for row in own])[:, None]  # padding is not the model's concern
        return finite(items, sums, results)

    def _result(self, item: Waveform, logits: Array) -> dict[str, Any]:
        frames = logits.argmax(-1).tolist()
        ids = [token for token, _ in groupby(frames) if token != self.blank]
        tokenizer = self.session.tokenizer
        text = None if tokenizer is None else tokenizer.decode(ids, special_tokens=True).strip()
        return {"seconds": self.seconds(item), "text": text, "ids": ids, "frames": frames}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            text, ids = answer.result["text"], answer.result["ids"]
            yield printable(text if text is not None else ",".join(map(str, ids)))


class AudioClassification(SoundRunner):
    """The classes of a sound: see :func:`zoo_runtime.tasks.classification.classify`."""

    options = ClassificationOptions

    def __init__(self, session: Context, chosen: ClassificationOptions) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph, chosen.function_to_apply)

    def answer(self, items: Sequence[Waveform]) -> Sequence[Any]:
        logits = self.compute(items)
        classes = classify(logits, self.problem, self.session.option("labels"))
        results = [
            {"seconds": self.seconds(item), **rank_classes(scores, self.session, self.problem, self.chosen.top_k)}
            for item, scores in zip(items, classes, strict=True)
        ]
        return finite(items, logits, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield show_classes(answer, self.chosen.top_k or SHOWN)

    def distributions(self, answer: Answer) -> Sequence[Distribution]:
        distribution = distribution_of(answer, exclusive=self.problem == "single_label_classification")
        return [replace(distribution, items=distribution.items[: self.chosen.top_k or SHOWN])]
