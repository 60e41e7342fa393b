"""Timestamps of speech recognition, against transformers' rules and texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tests.checkpoints.test_whisper_checkpoints import GENERATION, SAMPLES, export_with_settings, make
from zoo.errors import UsageError
from zoo_runtime import load_session
from zoo_runtime.generation.timestamps import Timestamps

FIRST, END, VOCABULARY = 57, 49, 83
"""26 timestamps, of times 0 to 0.5 s."""


@pytest.mark.parametrize("latest", [None, 3])
def test_allowed_tokens_are_those_of_transformers(latest: int | None) -> None:
    """200 random texts, each continued token by token with the rules of one side."""
    rng = np.random.default_rng(0)
    given: Any = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=latest
    )
    theirs, ours = WhisperTimeStampLogitsProcessor(given, begin_index=2), Timestamps(FIRST, END, latest)
    for _ in range(200):
        ids: list[int] = []
        for _ in range(12):
            logits = rng.normal(0, 3, VOCABULARY)
            wanted = theirs(torch.tensor([[50, 51, *ids]]), torch.from_numpy(logits)[None])[0].numpy()
            found = logits.copy()
            ours.restrict(found, ids)
            np.testing.assert_array_equal(found, wanted)
            chances = np.exp(found - found.max())
            ids.append(int(rng.choice(VOCABULARY, p=chances / chances.sum())))
            if ids[-1] == END:
                break


def test_segments_are_those_of_transformers() -> None:
    """Random texts that the rules allow; transformers also puts the next start into the last complete segment."""
    rng = np.random.default_rng(1)
    times = Timestamps(FIRST, END)
    kinds = set()
    for _ in range(300):
        ids: list[int] = []
        for _ in range(rng.integers(1, 12)):
            logits = rng.normal(0, 3, VOCABULARY)
            logits[END:FIRST] = -np.inf
            times.restrict(logits, ids)
            if logits.max() == -np.inf:
                break
            ids.append(int(logits.argmax()))
        wanted = WhisperForConditionalGeneration._retrieve_segment(
            torch.tensor(ids), [{}], torch.zeros(1, dtype=torch.float64), FIRST, torch.tensor([50]), 0.02, 0.01, 2, 0,
            0, False, torch.zeros(1, 2),
        )  # fmt: skip
        segments, steps = times.split(ids, 25)
        assert (25 if steps is None else steps) == int(wanted[1]) // 2
        assert len(segments) == len(wanted[0])
        for segment, other in zip(segments, wanted[0], strict=True):
            bounds = (segment.start * 0.02, segment.end * 0.02)
            assert bounds == pytest.approx((float(other["start"]), float(other["end"])))
            assert other["tokens"].tolist()[: len(segment.ids)] == segment.ids
        kinds.add((len(segments) > 1, steps is None))
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[WhisperForConditionalGeneration, Path]:
    """A random model of transformers, and its export."""
    folder = tmp_path_factory.mktemp("whisper")
    theirs = make(vocab_size=VOCABULARY)
    export_with_settings(theirs, {**GENERATION, "max_initial_timestamp_index": 5}, folder)
    return theirs, folder / "ours"


def chirp(rate: float, samples: int) -> np.ndarray:
    times = np.arange(samples) / 16000
    return (0.4 * np.sin(2 * np.pi * (300 + rate * times) * times)).astype(np.float32)


@pytest.mark.slow
def test_texts_and_windows_are_those_of_transformers(pair: tuple[WhisperForConditionalGeneration, Path]) -> None:
    """Sound of one window and of three, for a model that reads samples. The segments of a window equal the first ones
    of its sound in transformers, which then cuts the rest from the same spectrogram."""
    theirs, folder = pair
    sounds = [chirp(900, SAMPLES), chirp(4000, 3 * SAMPLES - 700), chirp(0, 2000)]
    with load_session(folder) as session:
        results = session.run(sounds, timestamps=True, max_new_tokens=12)
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    extractor.n_samples = SAMPLES
    for sound, result in zip(sounds, results, strict=True):
        start, language, segments = 0, None, []
        times = Timestamps(FIRST, END)
        windows = result.get("windows", [result])
        for window in windows:
            chosen = {} if language is None else {"language": language}
            part = sound[160 * start : 160 * start + SAMPLES]
            frames = min(SAMPLES, len(sound) - 160 * start) // 160
            features = extractor(part, sampling_rate=16000, return_tensors="pt").input_features
            wanted = theirs.generate(features, max_new_tokens=12, do_sample=False, return_timestamps=True, **chosen)[
                0
            ].tolist()
            ids = [token for token in window["generated_ids"] if token != END]
            texts = [token for token in wanted if token < END or token >= FIRST]
            language = window["language"]
            parts, steps = times.split(ids, frames // 2)
            kept = [token for item in parts for token in item.ids]
            assert texts[: len(kept)] == kept
            segments += [(start / 100 + item.start * 0.02, start / 100 + item.end * 0.02) for item in parts]
            start += frames if steps is None else 2 * steps
        assert start >= len(sound) // 160
        assert [(item["start"], item["end"]) for item in result["segments"]] == [
            pytest.approx(item) for item in segments
        ]
        assert result["seconds"] == len(sound) / 16000
    assert len(results[1]["windows"]) >= 3


@pytest.mark.slow
def test_model_without_timestamps_is_refused(exported_model: Any) -> None:
    with load_session(exported_model("whisper-test")) as session, pytest.raises(UsageError, match="has no timestamps"):
        session.run([np.zeros(8000)], timestamps=True)
