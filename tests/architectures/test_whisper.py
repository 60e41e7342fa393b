"""Log-mel spectrograms against transformers, reading of sound, and the task on a random model."""

from __future__ import annotations

import io
import tracemalloc
import wave
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from zoo.audio import AudioReader, LogMelFrames, log_mel
from zoo.errors import ArtifactError
from zoo.nn import LogMel

TIMES = np.arange(16_000) / 16_000
CHIRP = 0.4 * np.sin(2 * np.pi * (200 + 2000 * TIMES) * TIMES) * (TIMES < 0.7)


def wav(samples: Any, width: int = 2, channels: int = 1, rate: int = 16_000) -> bytes:
    """Write integer PCM of floats in [-1, 1]."""
    scaled = np.round(np.asarray(samples) * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    data = b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in np.repeat(scaled, channels))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data)
    return buffer.getvalue()


@pytest.mark.parametrize("bins", [80, 128])
def test_features_equal_those_of_transformers(bins: int) -> None:
    """A chirp that ends in silence, whose powers reach the floor."""
    wanted = WhisperFeatureExtractor(feature_size=bins)._np_extract_fbank_features(CHIRP[None], "cpu")[0]
    exact = LogMel(bins)(torch.from_numpy(CHIRP)[None])[0].numpy()
    single = LogMel(bins)(torch.from_numpy(CHIRP).float()[None])[0].numpy()
    assert exact.min() == pytest.approx(exact.max() - 2)
    assert np.abs(exact - log_mel(CHIRP, bins)).max() < 1e-11
    assert np.abs(exact - wanted).max() < 1e-6
    assert np.abs(single - wanted).max() < 1e-3


@pytest.mark.parametrize("size", [16_000, 99_999, 7])
def test_frames_of_long_sound_are_those_of_the_whole(size: int) -> None:
    """Loud sound, then quiet sound below its floor. The number of samples need not be a multiple of 160."""
    sound = np.random.default_rng(0).normal(0, 0.3, 400 + size)
    sound[len(sound) // 2 :] *= 1e-5
    wanted = WhisperFeatureExtractor(feature_size=80)._np_extract_fbank_features(sound[None], "cpu")[0]
    frames = LogMelFrames(sound, 80)
    assert frames.count == wanted.shape[1]
    for start, stop in ((0, frames.count), (0, 1), (frames.count - 1, frames.count), (frames.count // 2, frames.count)):
        assert np.abs(frames.read(start, stop) - wanted[:, start:stop]).max() < 1e-6


def test_frames_of_long_sound_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes, in parts of a second: their whole spectrogram would be 38 MB."""
    monkeypatch.setattr("zoo.audio._PART", 100)
    frames = LogMelFrames(np.random.default_rng(0).normal(0, 0.1, 9_600_000).astype(np.float32), 80)
    tracemalloc.start()
    frames.read(20_000, 20_100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_files_are_read(width: int, channels: int) -> None:
    read = AudioReader().read(wav(CHIRP[:400], width, channels))
    assert read.dtype == np.float32
    assert np.abs(read - CHIRP[:400]).max() < 2 ** (2 - 8 * width) + 1e-6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"not a wav", "cannot be read as"),
        (wav(CHIRP[:400])[:-100], "is truncated: 350 of 400 samples"),
        (wav(CHIRP[:400]).replace(b"fmt \x10\0\0\0", b"junk\xff\xff\xff\x7f"), "cannot be read as"),
        (wav([]), "has no samples"),
        (np.array([0.1, np.nan]), "samples contain NaN or infinity"),
        (np.zeros((2, 5)), "expected one channel, (samples,), got shape (2, 5)"),
        (np.array([20000.0]), "samples up to 20000, but floats must lie in [-1, 1]"),
        (["x"], "expected a sound file or an array, got list"),
        ("absent.wav", "cannot be read (No such file or directory): input 1, absent.wav"),
        ({"array": [0.0]}, "expected the keys array and sampling_rate"),
    ],
)  # fmt: skip
def test_bad_sound_is_one_line(value: Any, message: str) -> None:
    with pytest.raises(ArtifactError) as error:
        AudioReader().read(value, "input 1")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
