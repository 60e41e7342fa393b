"""Attention weights of speech recognition: of the encoder, of the decoder, and of the text over the sound.

H heads, T queries, S keys, N positions of the encoder, 20 ms each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from zoo import AttentionAxis, AttentionMap, AttentionRecord, AttentionStep
from zoo.arrays import Array
from zoo.artifact import ATTENTIONS
from zoo.audio import SAMPLING_RATE
from zoo.contract import dim_names
from zoo.errors import ArtifactError, UsageError
from zoo.probe.pipeline import decoder_inputs
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, Pair, are_ids
from zoo_runtime.running.loading import load_session
from zoo_runtime.running.runner import Runner
from zoo_runtime.tasks.attention.record import CANDIDATES, attention_maps, only_answer, step_of
from zoo_runtime.tasks.attention.weights import AttentionOptions, ChosenAttentions, checked, strongest
from zoo_runtime.tasks.speech.options import SpeechOptions
from zoo_runtime.tasks.speech.recognition import SpeechRecognition
from zoo_runtime.tasks.speech.sound import Sound

__all__ = ["SoundAttentions", "record_sound"]


@dataclass(frozen=True, kw_only=True)
class SoundAttentionOptions(AttentionOptions):
    """Selects layers and heads, and the prompt of the text."""

    language: str | None = None
    """Code of the language in the prompt; by default the model's own, or the first one."""
    translate: bool = False
    """Whether the prompt asks for a translation to English."""


@dataclass(frozen=True)
class Heard(Sound):
    """A sound, and the tokens that the decoder reads; none to run the encoder alone."""

    target: list[int] = field(default_factory=list, kw_only=True)


class SoundAttentions(Runner[Heard]):
    """``sound-attentions``: the attention weights (T, S) of a sound, as ``encoder.attentions.LAYER.HEAD``.

    Given a pair of a sound and its text, or its token ids, there are also ``decoder.attentions`` and
    ``decoder.cross_attentions``, for the prompt and the text. The sound is padded with silence to the length of the
    model, as in speech recognition.
    """

    options = SoundAttentionOptions
    variant = ATTENTIONS
    batch_size = 1

    def __init__(self, session: Context, chosen: SoundAttentionOptions) -> None:
        super().__init__(session, chosen)
        shared = {"language": chosen.language, "translate": chosen.translate}
        defaults = SpeechRecognition.defaults(session, shared)
        one_window = {"timestamps": False, "condition_on_prev_tokens": False}
        self.speech = SpeechRecognition(session, SpeechOptions.from_dict({**defaults, **shared, **one_window}))
        self.weights = ChosenAttentions(session, chosen)

    def read(self, value: Any, number: int) -> Heard:
        sound, text = value if isinstance(value, Pair) else (value, None)
        item = self.speech.read(sound, number)
        heard = Heard(number, item.ids, samples=item.samples)
        if text is None:
            return heard
        where = f"input {number}"
        if isinstance(text, str):
            encoded = self.speech.tokenizer.encode(text, where=where)
            pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
            ids = [token for token, is_special in pairs if not is_special]
        elif are_ids(text):
            ids = [int(token) for token in text]
        else:
            raise ArtifactError(f"expected a text or token ids, got {type(text).__name__}", where)
        target = [*item.ids, *ids]
        longest = int(self.session.option("max_seq_len"))
        if len(target) > longest:
            raise ArtifactError(f"{len(target)} tokens, with the prompt, exceed the model's {longest}", where)
        vocabulary = int(self.session.option("vocab_size"))
        if not all(0 <= token < vocabulary for token in ids):
            raise ArtifactError(f"token ids must lie in 0 ... {vocabulary - 1}", where)
        return replace(heard, target=target)

    def answer(self, items: Sequence[Heard]) -> Sequence[Any]:
        results = []
        encoder, decoder = self.session.graphs[0], self.session.graphs[-1]
        for item in items:
            feeds = self.speech.feed([item])
            sizes = {str(self.speech.sound.dims[-1]): feeds[self.speech.sound.name].shape[-1], "past_sequence": 0}
            outputs = {encoder.name: self.session.execute(encoder, feeds)}
            result: dict[str, Any] = {"seconds": len(item.samples) / SAMPLING_RATE}
            if item.target:
                ids_name, mask_name = decoder_inputs(decoder)
                ids = np.array([item.target], np.int64)
                values = outputs[encoder.name] | {ids_name: ids} | ({mask_name: np.ones_like(ids)} if mask_name else {})
                names = {tensor.name for tensor in decoder.input_tensors()}
                outputs[decoder.name] = self.session.execute(
                    decoder, {key: values[key] for key in names & values.keys()}
                )
                sizes["sequence"] = len(item.target)
                result["target_texts"] = [self.speech.decode([token]) for token in item.target]
            result["attentions"] = self.weights.pick(outputs, 0, sizes)
            if self.chosen.queries_keys:
                result["vectors"] = self.weights.pick_vectors(outputs, 0, sizes)
            results.append(result)
        return checked(items, results)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield the strongest key of each query, positions of the sound by their numbers."""
        for answer in answers:
            texts = answer.result.get("target_texts", ())

            def labels(name: str, axis: int, texts: Any = texts, answer: Answer = answer) -> Sequence[Any]:
                size = np.shape(answer.result["attentions"][name])[axis]
                return texts if self.along(name, axis) == "target" and None not in texts else range(size)

            yield from strongest(answer, labels)

    def along(self, name: str, axis: int) -> Literal["sound", "target"]:
        """Return what lies along an axis of the weights ``name``."""
        names = dim_names(self.weights.dims[name][axis])
        return "sound" if set(names) <= set(self.session.graphs[0].dim_names()) else "target"


def record_sound(
    directory: Path,
    inputs: Sequence[Any],
    *,
    generate: int,
    layers: Sequence[int],
    heads: Sequence[int],
    unverified: bool,
    queries_keys: bool = False,
) -> AttentionRecord:
    """Return the attention weights of a sound; with a text, or the one that is generated, also of the decoder.

    Queries in the silence after the sound are left out. The weights of the sound's own positions are complete.
    """
    if len(inputs) == 2 and generate:
        raise UsageError("a text is given, so none is generated", directory, "leave out the text, or --generate")
    with load_session(directory, task="sound-attentions", unverified=unverified) as session:
        options: dict[str, Any] = {"layers": tuple(layers), "heads": tuple(heads), "queries_keys": queries_keys}
        value: Any = Pair(*inputs) if len(inputs) == 2 else inputs[0]
        steps: tuple[AttentionStep, ...] = ()
        if generate:
            transcript = session.run(
                value,
                task=session.stored.spec.task,
                max_new_tokens=generate,
                temperature=0.0,
                num_beams=1,
                logprobs=CANDIDATES,
                timestamps=False,
            )
            if transcript["language"] is not None:
                options["language"] = transcript["language"]
            value = Pair(value, list(transcript["generated_ids"]))
        runner = session.runner("sound-attentions", **options)
        assert isinstance(runner, SoundAttentions)
        item = runner.read(value, 1)
        if generate:
            steps = tuple(step_of(step, len(item.ids) - 1 + place) for place, step in enumerate(transcript["logprobs"]))
        result = only_answer(runner, item)
        texts = [text if text is not None else str(token) for text, token in
                 zip(result.get("target_texts", ()), item.target, strict=True)]  # fmt: skip
        prompt = len(item.ids)
        parts = [None if place < prompt else 0 for place in range(len(texts))]
        target = AttentionAxis(labels=texts, parts=parts, part_names=("text",), steps=steps)
        positions = int(session.option("max_source_positions"))
        sound = _sound_axis(item.samples, positions, runner.speech.longest // positions)
        heard = sound if sound.parts == () else _only_sound(sound)

        @cache
        def axis(name: str, place: int, size: int) -> AttentionAxis:
            return sound if runner.along(name, place) == "sound" else target

        maps = attention_maps(result, axis)
        return AttentionRecord(maps=[_cropped(item, sound, heard) for item in maps], rollout=not (layers or heads))


def _sound_axis(samples: Array, positions: int, step: int) -> AttentionAxis:
    """Return the positions of a sound and of the silence after it, ``step`` samples each, named by their times."""
    count = min(positions, max(1, -(-len(samples) // step)))
    padded = np.zeros(positions * step, np.float32)
    padded[: len(samples)] = samples
    peaks = np.abs(padded.reshape(positions, step)).max(-1)
    seconds = step / SAMPLING_RATE
    return AttentionAxis(
        labels=[f"{place * seconds:.2f} s" for place in range(positions)],
        parts=[0] * count + [1] * (positions - count) if count < positions else (),
        part_names=("sound", "silence") if count < positions else (),
        seconds=seconds,
        peaks=peaks / max(float(peaks.max()), 1e-9),
    )


def _only_sound(axis: AttentionAxis) -> AttentionAxis:
    """Return the positions before the silence."""
    count = list(axis.parts).index(1)
    assert axis.peaks is not None
    return replace(axis, labels=axis.labels[:count], parts=[0] * count, peaks=axis.peaks[:count])


def _cropped(item: AttentionMap, sound: AttentionAxis, heard: AttentionAxis) -> AttentionMap:
    """Leave out the queries in the silence."""
    if item.queries is not sound or heard is sound:
        return item
    count = len(heard.labels)
    vectors = item.vectors
    if vectors is not None:
        vectors = replace(
            vectors,
            queries=vectors.queries[:, :count],
            bias=None if vectors.bias is None else vectors.bias[:, :count],
            seen=None if vectors.seen is None else vectors.seen[:, :count],
        )
    return replace(item, queries=heard, weights=item.weights[:, :count], vectors=vectors)
