"""Reading sound as a model expects it: files or arrays to one channel at its sampling rate. Torch-free.

Also spectrograms, which some models compute inside their graphs and others read.
"""

from __future__ import annotations

import io
import math
import os
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError, ZooError
from zoo.limits import SOUND_SAMPLES
from zoo.reading import check_plain
from zoo.spectrogram import DECADES, FLOOR, HOP, SAMPLING_RATE, WINDOW, SpectrogramKind

__all__ = [
    "DECADES",
    "FLOOR",
    "HOP",
    "SAMPLING_RATE",
    "WINDOW",
    "AudioReader",
    "LogMelFrames",
    "Spectrogram",
    "kaldi_filter_bank",
    "log_mel",
    "mel_corners",
    "preparation",
    "unit_variance",
]

CheckSeconds = Callable[[float, str | None], None]

_LOUDEST = 2.0
"""Resampled sound may exceed 1 a little; larger floats are integers that were not scaled."""
_VARIANCE = 1e-7
"""Added to the variance of samples, so that silence stays silence."""
_FFT, _LOWEST, _PREEMPHASIS, _KALDI_FLOOR = 512, 20.0, 0.97, 2.0**-23
"""Constants of Kaldi's filter banks: FFT size, lowest frequency in Hz, pre-emphasis coefficient, smallest power."""
_PART = 3000
"""Frames of a long sound that are computed together, half a minute."""
_EXTRA = "pip install attention-zoo[audio]"


@dataclass(frozen=True)
class AudioReader:
    """Reads WAV files, their bytes and arrays.

    The standard library reads integer PCM of 8, 16, 24 or 32 bits. Float WAV and other formats need soundfile, and
    other sampling rates need soxr. The channels of a file are averaged. An array has one channel, (samples,), at the
    model's rate: floats in [-1, 1], or integers, which are divided by the largest value of their type. A mapping with
    ``array`` and ``sampling_rate``, as in the library datasets, states the rate.
    """

    sampling_rate: int = SAMPLING_RATE
    """Samples per second that the model reads."""

    def read(self, value: Any, where: str | None = None, check: CheckSeconds | None = None) -> Array:
        """Return the samples, float32, (samples,).

        Args:
            value: the sound.
            where: the input, for errors.
            check: called with the length of a file in seconds, and its place, before it is decoded. It may raise.

        Raises:
            ArtifactError: it cannot be read, is empty, is an array of another shape or range, or needs a library that
                is not installed.
        """
        rate = self.sampling_rate
        if isinstance(value, Mapping):
            if not {"array", "sampling_rate"} <= value.keys():
                raise ArtifactError("expected the keys array and sampling_rate", where)
            value, rate = np.asarray(value["array"]), value["sampling_rate"]
            if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or rate < 1:
                raise ArtifactError(f"sampling_rate must be a positive integer, got {rate!r}", where)
        if isinstance(value, np.ndarray):
            samples = _check_array(value, where)
        elif isinstance(value, str | bytes | os.PathLike):
            if not isinstance(value, bytes):
                where = f"{where}, {os.fspath(value)!s}" if where else os.fspath(value)
            samples, rate = _load(value, where, check)
        else:
            raise ArtifactError(f"expected a sound file or an array, got {type(value).__name__}", where)
        if not len(samples):
            raise ArtifactError("has no samples", where)
        if not np.isfinite(samples).all():
            raise ArtifactError("samples contain NaN or infinity", where)
        count = len(samples) * self.sampling_rate // int(rate)
        SOUND_SAMPLES.check(count, f"a sound of {count:,} samples at {self.sampling_rate} Hz", where)
        return samples if rate == self.sampling_rate else _resample(samples, int(rate), self.sampling_rate, where)


def _check_array(array: Array, where: str | None) -> Array:
    """Return an array as floats in [-1, 1]."""
    if array.ndim != 1:
        raise ArtifactError(f"expected one channel, (samples,), got shape {array.shape}", where, "average the channels")
    if array.dtype.kind not in "iuf":
        raise ArtifactError(f"samples must be numbers, got {array.dtype}", where)
    if array.dtype.kind != "f":
        return _scale(array)
    with np.errstate(over="ignore"):
        samples = array.astype(np.float32)
    largest = np.abs(samples).max(initial=0.0)
    if np.isfinite(largest) and largest > _LOUDEST:
        what = f"samples up to {largest:g}, but floats must lie in [-1, 1]"
        raise ArtifactError(what, where, "divide them by the largest value of the format")
    return samples


def _scale(integers: Array) -> Array:
    """Return integers divided by the largest value of their type; unsigned ones are centred."""
    half = 2.0 ** (8 * integers.dtype.itemsize - 1)
    offset = half if integers.dtype.kind == "u" else 0.0
    return ((integers.astype(np.float64) - offset) / half).astype(np.float32)


def _load(source: str | bytes | os.PathLike[str], where: str | None, check: CheckSeconds | None) -> tuple[Array, int]:
    """Return the average of a file's channels, and its sampling rate."""
    try:
        with _opened(source) as file:
            try:
                return _read_pcm(file, where, check)
            except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError for a chunk beyond the end
                file.seek(0)
                return _read_other(file, str(error) or "it ends too early", where, check)
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror or error})", where) from error


def _opened(source: str | bytes | os.PathLike[str]) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        check_plain(Path(source))
        return Path(source).open("rb")
    except ValueError as error:  # a null byte in the name
        raise OSError(str(error)) from error


def _check_length(count: int, channels: int, rate: int, where: str | None, check: CheckSeconds | None) -> None:
    """Refuse a sound that is too long, before it is decoded."""
    if check is not None:
        check(count / rate, where)
    SOUND_SAMPLES.check(count * channels, f"a sound of {count * channels:,} samples", where)


def _read_pcm(source: BinaryIO, where: str | None, check: CheckSeconds | None) -> tuple[Array, int]:
    """Read integer PCM. Raises ``wave.Error`` or ``EOFError`` for other files."""
    with wave.open(source) as file:
        width, channels, rate, count = file.getsampwidth(), file.getnchannels(), file.getframerate(), file.getnframes()
        if width > 4 or rate < 1:
            raise wave.Error(f"{8 * width} bits at {rate} Hz")
        _check_length(count, channels, rate, where, check)
        data = file.readframes(count)
    if len(data) < count * width * channels:
        what = f"is truncated: {len(data) // (width * channels)} of {count} samples"
        raise ArtifactError(what, where, "copy the file again")
    if width == 1:
        samples = _scale(np.frombuffer(data, np.uint8))
    elif width == 3:  # the highest three bytes of 32 bits
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = _scale(padded.view("<i4")[:, 0])
    else:
        samples = _scale(np.frombuffer(data, f"<i{width}"))
    return _average(samples.reshape(-1, channels)), rate


def _read_other(source: BinaryIO, reason: str, where: str | None, check: CheckSeconds | None) -> tuple[Array, int]:
    """Read a file that is not integer PCM with soundfile."""
    try:
        import soundfile
    except ImportError:
        what = f"cannot be read as a WAV file with integer samples ({reason})"
        raise ArtifactError(what, where, f"convert it, or {_EXTRA}") from None
    try:
        with soundfile.SoundFile(source) as file:
            _check_length(file.frames, file.channels, file.samplerate, where, check)
            samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    except ZooError:
        raise
    except Exception as error:  # soundfile raises its own classes, whose text names an object in memory
        reason = getattr(error, "error_string", str(error)).rstrip(".")
        raise ArtifactError(f"cannot be read as sound ({reason})", where) from error
    return _check_array(_average(samples), where), int(rate)


def _average(samples: Array) -> Array:
    """(samples, channels) -> (samples,)."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(1, dtype=np.float64).astype(np.float32)


def _resample(samples: Array, rate: int, wanted: int, where: str | None) -> Array:
    try:
        import soxr
    except ImportError:
        what = f"is sampled at {rate} Hz, but the model reads {wanted} Hz"
        raise ArtifactError(what, where, f"resample it, or {_EXTRA}") from None
    try:
        resampled: Array = soxr.resample(samples, rate, wanted)
    except Exception as error:  # soxr raises its own classes
        raise ArtifactError(f"cannot be resampled from {rate} Hz ({error})", where) from error
    if not len(resampled):
        raise ArtifactError(f"has {len(samples)} samples at {rate} Hz, none at {wanted} Hz", where)
    return resampled


def unit_variance(samples: Array) -> Array:
    """Return samples (samples,) of a sound scaled to zero mean and unit variance, as wav2vec 2.0 reads them."""
    result: Array = (samples - samples.mean()) / np.sqrt(samples.var() + _VARIANCE)
    return result


# Spectrograms.


@dataclass(frozen=True, kw_only=True)
class Spectrogram:
    """A spectrogram of a fixed size, as models at 16 kHz read it.

    ``whisper`` is :func:`log_mel` of the sound and the silence after it, (mel bins, frames). ``kaldi``, for AST, is
    :func:`kaldi_filter_bank` of the sound, then zeros: (frames, mel bins). Both are scaled: (x - mean) / std.
    """

    kind: SpectrogramKind
    num_mel_bins: int
    num_frames: int
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, option: Callable[[str], Any]) -> Spectrogram | None:
        """Return the spectrogram that a configuration describes, given a function from its fields to their values.

        None if the model reads samples.
        """
        if option("spectrogram") is None:
            return None
        names = {"kind": "spectrogram", "mean": "feature_mean", "std": "feature_std"}
        names |= {name: name for name in ("num_mel_bins", "num_frames")}
        return cls(**{name: option(field) for name, field in names.items()})

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the spectrogram."""
        sizes = self.num_mel_bins, self.num_frames
        return sizes if self.kind == "whisper" else sizes[::-1]

    @property
    def fewest(self) -> int:
        """Samples of the shortest sound."""
        return 1 if self.kind == "whisper" else WINDOW

    @property
    def most(self) -> int:
        """Samples of the longest sound."""
        return self.num_frames * HOP + (0 if self.kind == "whisper" else WINDOW - 1)

    def __call__(self, samples: Array) -> Array:
        """Return the spectrogram of samples (samples,), at least ``fewest``, in float64.

        Samples after ``most`` are left out, as by the original.
        """
        samples = samples[: self.most]
        if self.kind == "whisper":
            found = log_mel(np.pad(samples, (0, self.most - len(samples))), self.num_mel_bins)
        else:
            bank = kaldi_filter_bank(samples, self.num_mel_bins)
            found = np.pad(bank, ((0, self.num_frames - len(bank)), (0, 0)))
        return (found - self.mean) / self.std


def preparation(option: Callable[[str], Any]) -> Callable[[Array], Array]:
    """Return the function from samples (samples,) to what a model reads, given a function from fields to their values.

    The fields are ``normalize_sound``, and those of :class:`Spectrogram`.
    """
    if (spectrogram := Spectrogram.of(option)) is not None:
        return spectrogram
    return unit_variance if option("normalize_sound") else lambda samples: samples


def mel_corners(num_mel_bins: int) -> tuple[float, ...]:
    """Return the frequencies at which triangular mel filters begin, peak and end, in Hz: ``num_mel_bins`` + 2 of them.

    Filter i rises from corner i to corner i + 1 and falls to corner i + 2. The corners are equally spaced from 0 to
    8000 Hz on Slaney's scale (Auditory Toolbox, 1998): linear up to 1000 Hz, where it reaches 15, and logarithmic
    above, with 27 steps for a factor of 6.4.
    """
    step = math.log(6.4) / 27
    highest = 15 + math.log(SAMPLING_RATE / 2 / 1000) / step
    mels = (highest * number / (num_mel_bins + 1) for number in range(num_mel_bins + 2))
    return tuple(1000 * math.exp((mel - 15) * step) if mel >= 15 else mel * 200 / 3 for mel in mels)


def log_mel(samples: Array, num_mel_bins: int) -> Array:
    """Return Whisper's features (..., mel bins, frames) of samples (..., 160 x frames), in float64.

    The same as :class:`zoo.nn.LogMel`, for models whose graph reads features.
    """
    padded = np.pad(samples, [(0, 0)] * (samples.ndim - 1) + [(WINDOW // 2, WINDOW // 2)], "reflect")
    powers = _mel_powers(padded, num_mel_bins)[..., : samples.shape[-1] // HOP]
    return _limited(powers, powers.max((-1, -2), keepdims=True))


class LogMelFrames:
    """Frames of :func:`log_mel` of a sound of any length, of which a few are computed at a time.

    They are those of the spectrogram of the whole sound: windows reach across the borders of a part, and the floor of
    all frames depends on the largest value of the sound.

    Args:
        samples: the sound, (samples,), at least 201.
        num_mel_bins: number of mel bins.
    """

    def __init__(self, samples: Array, num_mel_bins: int) -> None:
        self.samples = samples
        self.num_mel_bins = num_mel_bins
        self.count = len(samples) // HOP
        """Number of frames, 10 ms each."""

    def read(self, start: int, stop: int) -> Array:
        """Return frames ``start`` to ``stop``, without the latter: (mel bins, stop - start), in float64."""
        return _limited(self._powers(start, stop), self._largest)

    @cached_property
    def _largest(self) -> Array:
        starts = range(0, self.count, _PART)
        return np.max([self._powers(start, min(start + _PART, self.count)).max() for start in starts])

    def _powers(self, start: int, stop: int) -> Array:
        first, last = start * HOP - WINDOW // 2, (stop - 1) * HOP + WINDOW // 2
        begin = max(0, first)
        part = self.samples[begin : last + WINDOW]  # with samples that are reflected at the end of a short part
        before, after = begin - first, max(0, last - len(self.samples))
        padded = np.pad(part, (before, after), "reflect")
        return _mel_powers(padded[: last - first], self.num_mel_bins)


def _mel_powers(padded: Array, num_mel_bins: int) -> Array:
    """Return the powers (..., mel bins, frames) of all windows of samples (..., samples), in float64."""
    frames = np.lib.stride_tricks.sliding_window_view(padded.astype(np.float64), WINDOW, -1)[..., ::HOP, :]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW + 1)[:-1])) ** 2  # (..., frames, frequencies)
    corners = np.array(mel_corners(num_mel_bins))
    filters = _triangles(corners, np.linspace(0, SAMPLING_RATE / 2, WINDOW // 2 + 1))
    filters *= (2 / (corners[2:] - corners[:-2]))[:, None]
    return np.swapaxes(power @ filters.T, -1, -2)


def _limited(powers: Array, largest: Array) -> Array:
    """Return the scaled logarithms of powers (..., mel bins, frames), which end 8 decades below the largest."""
    log, top = (np.log10(np.maximum(FLOOR, values)) for values in (powers, largest))
    result: Array = (np.maximum(log, top - DECADES) + 4) / 4
    return result


def kaldi_filter_bank(samples: Array, num_mel_bins: int) -> Array:
    """Return the log filter banks of Kaldi (Povey et al. 2011), (frames, mel bins), of samples (samples,), in float64.

    A frame is 25 ms without its mean, pre-emphasised, under a symmetric Hann window, one every 10 ms. Filters are
    triangles on the mel scale, 1127 ln(1 + f / 700), from 20 to 8000 Hz.
    """
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), WINDOW)[::HOP]
    frames = frames - frames.mean(1, keepdims=True)
    before = np.concatenate((frames[:, :1], frames[:, :-1]), axis=1)
    windowed = (frames - _PREEMPHASIS * before) * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(windowed, _FFT)) ** 2  # (frames, frequencies)
    lowest, highest, frequencies = (
        1127 * np.log1p(np.asarray(hertz) / 700)
        for hertz in (_LOWEST, SAMPLING_RATE / 2, np.linspace(0, SAMPLING_RATE / 2, _FFT // 2 + 1))
    )
    filters = _triangles(np.linspace(lowest, highest, num_mel_bins + 2), frequencies)
    result: Array = np.log(np.maximum(_KALDI_FLOOR, power @ filters.T))
    return result


def _triangles(corners: Array, frequencies: Array) -> Array:
    """Return filters (M, K), of which each rises from 0 at a corner to 1 at the next one, and falls to 0 at the third.

    Args:
        corners: (M + 2,), on any scale.
        frequencies: (K,), on the same.
    """
    edges = corners[:, None]
    rise, fall = frequencies - edges[:-2], edges[2:] - frequencies
    result: Array = np.maximum(0, np.minimum(rise / np.diff(edges[:-1], axis=0), fall / np.diff(edges[1:], axis=0)))
    return result
