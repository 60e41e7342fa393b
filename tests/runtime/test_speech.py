"""Speech recognition on a random model."""

from __future__ import annotations

import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from tests.architectures.test_whisper import CHIRP, wav
from tests.exported import Builder
from zoo.audio import AudioReader
from zoo.errors import ArtifactError
from zoo_runtime import load_session


@pytest.mark.slow
def test_rows_are_read_and_bad_ones_do_not_harm_others(exported_model: Builder, tmp_path: Path) -> None:
    path = tmp_path / "chirp.wav"
    path.write_bytes(wav(CHIRP[:8000]))
    floats = AudioReader().read(path)
    with load_session(exported_model("whisper-test")) as session:
        answers = list(session.map([str(path), b"", floats, np.zeros(20_000)], max_new_tokens=4))
        assert [answer.error is None for answer in answers] == [True, False, True, False]
        assert "1.2 s of sound exceed the model's 1 s" in str(answers[3].error)
        assert answers[0].result == answers[2].result
        assert answers[0].result["seconds"] == 0.5
        assert "".join(session.stream(str(path), max_new_tokens=4)) == answers[0].result["generated"]
        long = session.run(np.concatenate([np.tile(floats, 2), floats]), max_new_tokens=4, windows=True)
        assert [window["seconds"] for window in long["windows"]] == [1.0, 0.5]
        assert long["windows"][1] == answers[0].result


def test_other_formats_and_rates_are_read(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    tone = {rate: 0.3 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate) for rate in (16_000, 44_100)}
    files = {
        "tone.flac": (16_000, "PCM_16", 1e-4),
        "float.wav": (16_000, "FLOAT", 1e-7),
        "cd.wav": (44_100, "PCM_24", 1e-3),
    }
    for name, (rate, subtype, error) in files.items():
        soundfile.write(tmp_path / name, tone[rate], rate, subtype=subtype)
        samples = AudioReader().read(tmp_path / name)
        assert (samples.shape, samples.dtype) == ((16_000,), np.float32)
        assert np.abs(samples - tone[16_000])[500:-500].max() < error


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["flac", "wav"])
def test_long_file_is_refused_before_it_is_decoded(
    suffix: str, exported_model: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes of silence are hours of sound. The limit of a model comes first, then that of any file."""
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / f"silence.{suffix}"
    soundfile.write(path, np.zeros((80_000, 2)), 8_000, subtype="PCM_16")
    monkeypatch.setenv("ZOO_MAX_SOUND_SAMPLES", "159999")
    for owner in (soundfile.SoundFile, wave.Wave_read):
        monkeypatch.setattr(owner, "read" if owner is soundfile.SoundFile else "readframes", None)
    for value in (path, path.read_bytes()):
        with pytest.raises(ArtifactError, match=r"160,000 samples: at most 159,999 are allowed"):
            AudioReader().read(value, "input 1")
    with (
        load_session(exported_model("whisper-test"), threads=1) as session,
        pytest.raises(ArtifactError, match=r"10\.0 s of sound exceed the model's 1 s: input 1"),
    ):
        session.run(path)


def test_low_rate_asks_for_many_samples(tmp_path: Path) -> None:
    """A second of a file at 1 Hz is 16,000 samples."""
    with wave.open(str(tmp_path / "slow.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1)
        file.writeframes(bytes(20_000))
    with pytest.raises(ArtifactError, match=r"a sound of 160,000,000 samples at 16000 Hz: at most 134,217,728"):
        AudioReader().read(tmp_path / "slow.wav")


def test_wrong_float_sound_is_named(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    loud, broken = tmp_path / "loud.wav", tmp_path / "broken.wav"
    soundfile.write(loud, np.full(800, 1e30), 16_000, subtype="FLOAT")
    broken.write_text("not a sound")
    with pytest.raises(ArtifactError, match=r"samples up to 1e\+30, but floats must lie in \[-1, 1\]: input 2, .*loud"):
        AudioReader().read(loud, "input 2")
    with pytest.raises(ArtifactError, match=r"cannot be read as sound \([^<>]*\): .*broken"):
        AudioReader().read(broken)


@pytest.mark.parametrize(("library", "rate", "subtype"), [("soundfile", 16_000, "FLOAT"), ("soxr", 44_100, "PCM_16")])
def test_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, rate: int, subtype: str
) -> None:
    pytest.importorskip("soundfile").write(tmp_path / "tone.wav", np.zeros(rate), rate, subtype=subtype)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ArtifactError, match=r"attention-zoo\[audio\]"):
        AudioReader().read(tmp_path / "tone.wav")
