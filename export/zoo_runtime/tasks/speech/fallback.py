"""Texts that are sampled again at higher temperatures, and texts of silence that are left out.

Radford et al. 2022, section 4.5. The rules are those of transformers' ``generate``: the compression ratio is that of
the tokens, where the paper's implementation compresses characters, and silence counts only where the text is
improbable.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

from zoo_runtime.tasks.speech.options import SpeechOptions
from zoo_runtime.tasks.speech.sound import Sound

__all__ = ["NO_SPEECH", "Decoder", "Measures", "compression_ratio", "decode_again", "judge"]

NO_SPEECH = "no_speech"
"""``finish_reason`` of a text that was left out."""

Verdict = Literal["keep", "sample", "leave out"]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The numbers by which a text is judged, as its result has them."""

    temperature: float
    """Temperature at which it was decoded."""
    average_logprob: float
    """Average log-probability of its tokens, with the end token, at temperature 1."""
    compression_ratio: float
    no_speech_probability: float | None
    """Probability of silence in place of a language; None unless there is a threshold."""


def compression_ratio(ids: Sequence[int], vocabulary: int) -> float:
    """Return by how much zlib compresses token ids, each in as many bytes as the vocabulary needs."""
    size = int(math.log2(vocabulary) / 8) + 1
    data = b"".join(token.to_bytes(size, "little") for token in ids)
    return len(data) / len(zlib.compress(data))


def judge(measures: Measures, chosen: SpeechOptions) -> Verdict:
    """Return what happens to a text. That of the last temperature is kept where it would be sampled again."""
    improbable = chosen.logprob_threshold is not None and measures.average_logprob < chosen.logprob_threshold
    if improbable and chosen.no_speech_threshold is not None:
        assert measures.no_speech_probability is not None
        if measures.no_speech_probability > chosen.no_speech_threshold:
            return "leave out"
    largest = chosen.compression_ratio_threshold
    repetitive = largest is not None and measures.compression_ratio > largest
    return "sample" if improbable or repetitive else "keep"


class Decoder(Protocol):
    """Decodes windows at one temperature."""

    def decode_once(self, rows: Sequence[Sound]) -> list[Any]:
        """Return the results of windows, or their errors.

        They have the fields of :class:`Measures`, unless the positions leave no room for a text.
        """
        ...


def decode_again(windows: Sequence[Sound], chosen: SpeechOptions, at: Callable[[float], Decoder]) -> list[Any]:
    """Decode windows at one temperature after another; return their results, or their errors.

    Args:
        windows: the windows.
        chosen: the thresholds and the temperatures.
        at: returns the decoder of a temperature.
    """
    results: list[Any] = [None] * len(windows)
    places = list(range(len(windows)))
    warmer = (temperature for temperature in chosen.fallback_temperatures if temperature > chosen.temperature)
    for attempt, temperature in enumerate((chosen.temperature, *warmer)):
        found = at(temperature).decode_once([replace(windows[place], attempt=attempt) for place in places])
        again = []
        for place, result in zip(places, found, strict=True):
            verdict = _verdict(result, chosen)
            results[place] = _without_text(result) if verdict == "leave out" else result
            if verdict == "sample":
                again.append(place)
        if not again:
            break
        places = again
    return results


def _verdict(result: Any, chosen: SpeechOptions) -> Verdict:
    if not isinstance(result, Mapping) or "average_logprob" not in result:
        return "keep"
    return judge(Measures(**{item.name: result[item.name] for item in fields(Measures)}), chosen)


def _without_text(result: Mapping[str, Any]) -> dict[str, Any]:
    text = None if result["generated"] is None else ""
    return {**result, "generated_ids": [], "generated": text, "finish_reason": NO_SPEECH}
