"""Long sounds, against transformers' long-form generation on the same random models."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperNoSpeechDetection

from tests.architectures.test_whisper import wav
from tests.checkpoints.test_whisper_checkpoints import GENERATION, export_with_settings, make
from tests.runtime.server.conftest import KEPT, SECONDS, serving
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import load_session
from zoo_runtime.tasks.speech.fallback import Measures, compression_ratio, decode_again, judge
from zoo_runtime.tasks.speech.options import SpeechOptions
from zoo_runtime.tasks.speech.recognition import SpeechRecognition
from zoo_runtime.tasks.speech.sound import Sound

Model = WhisperForConditionalGeneration
FIRST, END = 57, 49
"""The token of time 0, and the end token."""
POSITIONS = 25
WINDOW = POSITIONS * 320
"""Samples in a window of the small models: half a second stands for half a minute."""
LENGTHS = {1: 31, 2: 65, 3: 90, 0: 130, 4: 134.1, 6: 136}
"""Seeds of sounds, and their lengths in thirtieths of a window; the windows of their texts end in all ways."""


def sound(length: float, seed: int, *, window: int = WINDOW) -> np.ndarray:
    """Return a sound with silence inside, of a length in thirtieths of a window."""
    samples = round(window * length / 30)
    rng = np.random.default_rng(seed)
    times = np.arange(samples) / 16000
    pitch = 300 + 900 * seed + 2000 * times * (WINDOW / window)
    loudness = np.repeat(rng.choice([0.0, 1e-4, 0.1, 0.5], samples // (window // 5) + 1), window // 5)[:samples]
    noise = rng.normal(0, 0.1, samples)
    return (loudness * (np.sin(2 * np.pi * pitch * times) + noise) / 2).astype(np.float32)


def lively(positions: int = POSITIONS) -> Model:
    """Return a random model whose texts depend on the sound, and end in all ways."""
    theirs = make(vocab_size=FIRST + positions + 1, max_source_positions=positions)
    generator = torch.Generator().manual_seed(10)
    for name, parameter in theirs.named_parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        if "layer_norm" in name:
            parameter.fill_(float(name.endswith("weight")))
    theirs.model.decoder.embed_tokens.weight[END] *= 1.2
    for layer in theirs.model.decoder.layers:
        layer.encoder_attn.out_proj.weight *= 4
    return theirs


def transcribe(theirs: Model, samples: np.ndarray, **options: Any) -> tuple[list[list[int]], list[tuple[float, float]]]:
    """Return the tokens and the times of the segments of a sound that transformers finds."""
    config = theirs.config
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    features = extractor(samples, sampling_rate=16000, truncation=False, padding="longest", return_tensors="pt")
    found = theirs.generate(
        features.input_features, return_timestamps=True, return_segments=True, **{"max_new_tokens": 12, **options}
    )
    segments = found["segments"][0]
    return [item["tokens"].tolist() for item in segments], [(float(s["start"]), float(s["end"])) for s in segments]


def check(result: dict[str, Any], wanted: tuple[list[list[int]], list[tuple[float, float]]]) -> None:
    """Compare segments. Those of transformers also have the time after a complete segment with which a window ends."""
    tokens, times = wanted
    found = [segment["ids"] for segment in result["segments"]]
    assert [ids[: len(mine)] for mine, ids in zip(found, tokens, strict=True)] == found
    rest = [ids[len(mine) :] for mine, ids in zip(found, tokens, strict=True)]
    assert all(
        not ids or (len(ids) == 1 and min(ids[0], mine[-1]) >= FIRST) for mine, ids in zip(found, rest, strict=True)
    )
    assert [(item["start"], item["end"]) for item in result["segments"]] == [pytest.approx(item) for item in times]
    assert result["generated_ids"] == [token for ids in found for token in ids]


def kinds(result: dict[str, Any]) -> set[tuple[bool, bool]]:
    """Return the ways in which windows end: whether with a single time, and whether there are pairs of times."""
    found = set()
    for window in result.get("windows", [result]):
        is_time = [token >= FIRST for token in window["generated_ids"] if token != END]
        pairs = any(map(all, pairwise(is_time)))
        found.add((is_time[-2:] == [False, True], pairs))
    return found


def exported(theirs: Model, folder: Path, **settings: Any) -> tuple[Model, Path]:
    """Export a model that reads spectrograms, with other settings of generation."""
    export_with_settings(theirs, {**GENERATION, "max_initial_timestamp_index": 5, **settings}, folder, "input=features")
    return theirs, folder / "ours"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A random model of transformers, and its export."""
    return exported(lively(), tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A model whose likeliest token is almost certain, so that it is also drawn at a temperature of 1."""
    theirs = lively()
    for parameter in theirs.model.decoder.layer_norm.parameters():
        parameter *= 1000
    return exported(theirs, tmp_path_factory.mktemp("certain"), prev_sot_token_id=8)


def test_segments_are_those_of_transformers(pair: tuple[Model, Path]) -> None:
    """Sounds are answered in one batch, and each alone. Sounds longer than a window have timestamps by default."""
    theirs, folder = pair
    sounds = [sound(length, seed) for seed, length in LENGTHS.items()]
    with load_session(folder) as session:
        results = session.run(sounds, max_new_tokens=12)
        assert [session.run(item, max_new_tokens=12, timestamps=True) for item in sounds] == results
        short = session.run(sound(20, 0), max_new_tokens=12)
    for samples, result in zip(sounds, results, strict=True):
        check(result, transcribe(theirs, samples))
        assert result["seconds"] == len(samples) / 16000
    assert set.union(*map(kinds, results)) == {(False, False), (False, True), (True, False), (True, True)}
    assert "segments" not in short


@pytest.mark.slow
def test_windows_of_half_a_minute(tmp_path: Path) -> None:
    theirs, folder = exported(lively(1500), tmp_path, max_initial_timestamp_index=50)
    sounds = [sound(length, seed, window=480_000) for seed, length in enumerate((31, 65, 90.013))]
    with load_session(folder) as session:
        results = session.run(sounds, max_new_tokens=12)
    for samples, result in zip(sounds, results, strict=True):
        check(result, transcribe(theirs, samples))
        assert len(result["windows"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"prev_sot_token_id": 8}, {}, {"suppress_tokens": None}], ids=str)
def test_earlier_text_in_prompts(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The token before it is stated, or the last suppressed token but one, or absent."""
    theirs, folder = exported(lively(), tmp_path, **settings)
    sounds = [sound(length, seed) for seed, length in LENGTHS.items()]
    with load_session(folder) as session:
        plain = session.run(sounds, max_new_tokens=12)
        results = session.run(sounds, max_new_tokens=12, condition_on_prev_tokens=True)
    for samples, result in zip(sounds, results, strict=True):
        check(result, transcribe(theirs, samples, condition_on_prev_tokens=True))
    assert results != plain


class Recorder:
    """Records the numbers by which transformers judges texts, and its decisions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        judged, ratio, logprobs = (
            getattr(Model, name) for name in ("_need_fallback", "_retrieve_compression_ratio", "_retrieve_avg_logprobs")
        )

        def need(model: Model, *args: Any) -> tuple[bool, bool]:
            self.calls.append({"temperature": args[-1]})
            verdict: tuple[bool, bool] = judged(model, *args)
            detector = next((item for item in args[3] if isinstance(item, WhisperNoSpeechDetection)), None)
            silence = None if detector is None else float(detector.no_speech_prob[0])
            self.calls[-1] |= {"no_speech_probability": silence, "again": verdict[0], "left out": verdict[1]}
            return verdict

        def note(name: str, value: Any) -> Any:
            self.calls[-1][name] = float(value)
            return value

        patch.setattr(Model, "_need_fallback", need)
        patch.setattr(Model, "_retrieve_compression_ratio",
                      staticmethod(lambda *args: note("compression_ratio", ratio(*args))))  # fmt: skip
        patch.setattr(Model, "_retrieve_avg_logprobs",
                      staticmethod(lambda *args: note("average_logprob", logprobs(*args))))  # fmt: skip


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Any]]:
    """The temperatures and the results of all attempts of zoo."""
    found: list[tuple[float, Any]] = []
    decode = SpeechRecognition.decode_once

    def noted(runner: SpeechRecognition, rows: Sequence[Any]) -> list[Any]:
        results = decode(runner, rows)
        found.extend((runner.chosen.temperature, result) for result in results)
        return results

    monkeypatch.setattr(SpeechRecognition, "decode_once", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("conditions", [False, True])
def test_thresholds_decide_as_in_transformers(
    pair: tuple[Model, Path], conditions: bool, monkeypatch: pytest.MonkeyPatch, attempts: list[tuple[float, Any]]
) -> None:
    """At temperatures so low that the likeliest token is drawn. The thresholds are such that all decisions occur."""
    theirs, folder = pair
    recorder = Recorder(monkeypatch)
    samples = sound(600, 3)
    shared: dict[str, Any] = {"condition_on_prev_tokens": conditions}
    transcribe(theirs, samples, temperature=(0.0,), compression_ratio_threshold=0.0, logprob_threshold=-1e9,
               no_speech_threshold=0.0, **shared)  # fmt: skip
    first, recorder.calls = recorder.calls, []
    shared |= {
        "logprob_threshold": float(np.median([call["average_logprob"] for call in first])),
        "compression_ratio_threshold": float(np.quantile([call["compression_ratio"] for call in first], 0.7)),
        "no_speech_threshold": float(np.median([call["no_speech_probability"] for call in first])),
    }
    wanted = transcribe(theirs, samples, temperature=(0.0, 1e-3, 2e-3), top_k=0, **shared)
    with load_session(folder) as session:
        check(session.run(samples, max_new_tokens=12, fallback_temperatures=(1e-3, 2e-3), **shared), wanted)
    assert len(attempts) == len(recorder.calls)
    for (temperature, result), call in zip(attempts, recorder.calls, strict=True):
        assert temperature == result["temperature"] == call["temperature"]
        for name in ("average_logprob", "compression_ratio", "no_speech_probability"):
            assert result[name] == pytest.approx(call[name], rel=1e-3, abs=1e-5)
    decisions = {(call["again"], call["left out"]) for call in recorder.calls}
    assert decisions == {(False, False), (True, False), (False, True)}


@pytest.mark.slow
def test_text_of_a_high_temperature_is_not_in_prompts(
    certain: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch, attempts: list[tuple[float, Any]]
) -> None:
    theirs, folder = certain
    recorder = Recorder(monkeypatch)
    samples = sound(600, 3)
    shared: dict[str, Any] = {"condition_on_prev_tokens": True}
    transcribe(theirs, samples, temperature=(0.0,), compression_ratio_threshold=1e9, **shared)
    ratios = [call["compression_ratio"] for call in recorder.calls]
    recorder.calls.clear()
    shared["compression_ratio_threshold"] = float(np.median(ratios))
    temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    wanted = transcribe(theirs, samples, temperature=temperatures, top_k=0, **shared)
    with load_session(folder) as session:
        result = session.run(samples, max_new_tokens=12, **shared)
    check(result, wanted)
    assert [temperature for temperature, _ in attempts] == [call["temperature"] for call in recorder.calls]
    assert {window["temperature"] for window in result["windows"]} == {0.0, 1.0}


def test_compression_ratio_is_that_of_transformers() -> None:
    rng = np.random.default_rng(0)
    for vocabulary in (83, 256, 300, 51865, 65536, 70000):
        for size in (1, 7, 200):
            ids = rng.integers(vocabulary, size=size).tolist() * rng.integers(1, 4)
            wanted = Model._retrieve_compression_ratio(torch.tensor(ids), vocabulary)
            assert compression_ratio(ids, vocabulary) == wanted


def test_decisions_are_those_of_transformers() -> None:
    """All combinations of thresholds with numbers below, at and above them."""
    for ratio, (logprob, silence) in product((None, 1.35), ((None, None), (-1.0, None), (-1.0, 0.6))):
        chosen = SpeechOptions(
            compression_ratio_threshold=ratio, logprob_threshold=logprob, no_speech_threshold=silence
        )
        for found in product((1.2, 1.35, 1.5), (-1.5, -1.0, -0.5), (0.5, 0.6, 0.7)):
            assert judge(_measures(*found), chosen) == _judged_by_transformers(*found, chosen), (found, chosen)


def _measures(ratio: float, logprob: float, silence: float) -> Measures:
    return Measures(temperature=0.0, average_logprob=logprob, compression_ratio=ratio, no_speech_probability=silence)


def _judged_by_transformers(ratio: float, logprob: float, silence: float, chosen: SpeechOptions) -> str:
    detector = WhisperNoSpeechDetection(0, 1)
    detector._no_speech_prob = [silence]
    model: Any = SimpleNamespace(
        _retrieve_compression_ratio=lambda *_: ratio, _retrieve_avg_logprobs=lambda *_: torch.tensor(logprob)
    )
    again, left_out = Model._need_fallback(model, [], [{"scores": ()}], 0, [detector], chosen, 83, 0.0)
    return "leave out" if left_out else "sample" if again else "keep"


def test_temperatures_are_tried_in_turn() -> None:
    """Random numbers for each window and attempt: the first text within the thresholds is kept, or else the last."""
    rng = np.random.default_rng(0)
    chosen = SpeechOptions(compression_ratio_threshold=1.5, logprob_threshold=-1, no_speech_threshold=0.6)
    temperatures = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    table = [[_measures(*rng.uniform((1, -4, 0), (2, 0, 0.7))) for _ in temperatures] for _ in range(40)]
    tried: list[tuple[float, list[int]]] = []

    def at(temperature: float) -> Any:
        def decode(windows: Sequence[Sound]) -> list[Any]:
            numbers = [window.number for window in windows]
            tried.append((temperature, numbers))
            column = temperatures.index(temperature)
            assert {window.attempt for window in windows} == {column}
            found = [vars(table[number][column]) for number in numbers]
            return [{**row, "temperature": temperature, "generated_ids": [1], "generated": "a"} for row in found]

        return SimpleNamespace(decode_once=decode)

    results = decode_again([Sound(number, []) for number in range(len(table))], chosen, at)
    wanted: dict[float, list[int]] = {}
    for number, row in enumerate(table):
        for temperature, measures in zip(temperatures, row, strict=True):
            wanted.setdefault(temperature, []).append(number)
            verdict = _judged_by_transformers(
                measures.compression_ratio, measures.average_logprob, measures.no_speech_probability or 0, chosen
            )
            if verdict != "sample":
                break
        assert results[number]["temperature"] == temperature
        assert results[number]["generated_ids"] == ([] if verdict == "leave out" else [1])
    assert dict(tried) == {temperature: wanted[temperature] for temperature in temperatures}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_speech_threshold": 0.6}, "no_speech_threshold requires logprob_threshold"),
        ({"no_speech_threshold": 1.2, "logprob_threshold": -1}, r"must lie in \[0, 1\], got 1.2"),
        ({"compression_ratio_threshold": 0}, "compression_ratio_threshold must be positive"),
        ({"fallback_temperatures": [0.2, 0]}, r"fallback_temperatures must be positive, got \(0.2, 0.0\)"),
        ({"logprob_threshold": -1, "num_beams": 2}, "beam search does not support logprob_threshold: num_beams is 2"),
        ({"condition_on_prev_tokens": True, "timestamps": False}, "timestamps must not be false, nor windows true"),
    ],
)
def test_contradictions_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        SpeechOptions.from_dict(options)
    assert "\n" not in str(error.value)


def test_options_belong_to_speech_recognition(exported_model: Any, zoo: Any) -> None:
    messages = {
        "no_speech_threshold=0.6": "it is an option of speech-recognition",
        "condition_on_prev_tokens=true": "unknown key 'condition_on_prev_tokens' for Generation",
    }
    for option, message in messages.items():
        zoo("run", exported_model("gpt-tiny"), "a", "--option", option).failed(2, message)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of the words w0 to w99."""
    path = tmp_path / "words.json"
    Tokenizer(WordLevel({f"w{number}": number for number in range(100)}, unk_token="w0")).save(str(path))
    return path


@pytest.mark.slow
def test_segments_are_printed_and_streamed(pair: tuple[Model, Path], words: Path, tmp_path: Path, zoo: Any) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(wav(sound(65, 1)))
    with load_session(pair[1], tokenizer=words) as session:
        result = session.run(path, max_new_tokens=12)
        pieces = list(session.stream(str(path), max_new_tokens=12))
        assert len(pieces) == len(result["segments"])
        assert "".join(pieces) == result["generated"].lstrip(" ")
        with pytest.raises(UsageError, match="texts with thresholds are streamed by segment"):
            session.stream(sound(20, 1), logprob_threshold=-1)
        with pytest.raises(ArtifactError, match=r"1\.1 s of sound exceed the model's 0\.5 s.*set timestamps=True"):
            session.run(path, timestamps=False)
    command = ("run", pair[1], path, "--tokenizer", words, "--max-new-tokens", "12")
    assert zoo(*command).out == result["generated"].lstrip(" ") + "\n"
    lines = [f"[{item['start']:.2f} -> {item['end']:.2f}] {item['text'].strip()}\n" for item in result["segments"]]
    for stream in ("--no-stream", "--stream"):
        assert zoo(*command, "--option", "timestamps=true", stream).out == "".join(lines)


@pytest.mark.slow
def test_server_takes_long_sounds(pair: tuple[Model, Path]) -> None:
    samples = [sound(length, seed) for seed, length in LENGTHS.items()]
    with load_session(pair[1], unverified=True, threads=1) as session:
        wanted = session.run([wav(item) for item in samples], max_new_tokens=12)
    body = {
        "inputs": [{"base64": base64.b64encode(wav(item)).decode()} for item in samples],
        "options": {"max_new_tokens": 12},
    }
    with (
        serving(pair[1], "--unverified") as server,
        httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as http,
    ):
        found = http.post("/v1/tasks/speech-recognition", json=body)
        assert found.status_code == 200, found.text
        assert [item["segments"] for item in found.json()["data"]] == [item["segments"] for item in wanted]


@pytest.mark.slow
def test_sounds_are_read_a_batch_at_a_time(pair: tuple[Model, Path]) -> None:
    """Hours of sound do not wait in memory."""
    read = 0

    def sounds() -> Iterator[np.ndarray]:
        nonlocal read
        for seed in range(6):
            read += 1
            yield sound(31, seed)

    with load_session(pair[1]) as session:
        answers = session.map(sounds(), batch_size=2, max_new_tokens=12)
        next(answers)
        assert read == 2
        assert len(list(answers)) == 5
