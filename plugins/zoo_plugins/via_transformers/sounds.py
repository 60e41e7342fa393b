"""Classes of transformers that read sound: how their convolutions cut it, and how it is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo import ArtifactError, UsageError
from zoo.audio import preparation
from zoo.checkpoints import EXTRACTORS, ProcessedSounds, process_sounds, processor_file
from zoo.spectrogram import SAMPLING_RATE
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.graphs import spectrogram_input

__all__ = ["read_sounds", "require_same_spectrogram", "sound_facts", "spans_sound"]

_LENGTHS = "_get_feat_extract_output_lengths"
_LONGEST = 1 << 16
"""Number of samples up to which lengths are computed."""


def sound_facts(c: ClassFields, original: Any) -> dict[str, Any]:
    """Return the sizes of a class for sound.

    Raises :class:`UsageError` for classes that read something other than samples or a spectrogram that zoo makes, and
    for numbers of positions that do not grow by one in equal steps.
    """
    lengths = getattr(original, _LENGTHS, None)
    steps: dict[str, Any] = {}
    if c.spectrogram is not None:
        if c.task != "audio-classification" or original.main_input_name != spectrogram_input(c)[0]:
            raise UsageError(f"{c.model_class} reads other spectrograms than the checkpoint's feature extractor makes")
    elif original.main_input_name != "input_values" or lengths is None:
        remedy = "of classes for spectrograms, those of AST and Whisper are known, with preprocessor_config.json"
        raise UsageError(f"{c.model_class} does not read samples of sound", None, remedy)
    else:
        steps = _steps(c, lengths, getattr(original.config, "squeeze_factor", 1))
    config = original.config
    return {
        **dict.fromkeys(("max_seq_len", "num_kv_heads", "head_dim", "value_head_dim")),
        "type_vocab_size": 0,
        "vocab_size": config.vocab_size if c.task == "ctc-speech-recognition" else None,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "counts_positions": False,
        **steps,
    }


def _steps(c: ClassFields, lengths: Callable[[Tensor], Tensor], fewest: int) -> dict[str, int]:
    """Return the samples of the shortest sound, its positions, and the samples for each further one.

    ``lengths`` is the class's own function from numbers of samples to numbers of positions, of which it needs at least
    ``fewest``.
    """
    samples = torch.arange(1, _LONGEST + 1, device="cpu")
    positions = lengths(samples).long().clamp(min=0)
    starts = samples[positions.diff(prepend=positions.new_zeros(1)) > 0]
    if len(starts) < 2:
        raise UsageError(f"{c.model_class} makes fewer than two positions of {_LONGEST} samples")
    least, step = int(starts[0]), int(starts[1] - starts[0])
    if not torch.equal(positions, ((samples - least) // step + 1).clamp(min=0)):
        raise UsageError(f"the positions of {c.model_class} are not at equal distances")
    shortest = least + (fewest - 1) * step
    return {"min_samples": shortest, "min_positions": fewest, "samples_per_position": step}


def spans_sound(original: Mapping[str, Any]) -> str:
    """Return why answers depend on the padding of a sound, if the configuration says so; otherwise an empty text."""
    norm = original.get("feat_extract_norm", "group")
    return "the norm of its first convolution spans the sound" if norm == "group" else ""


def read_sounds(folder: Path) -> dict[str, Any]:
    """Return the fields with which zoo prepares sound as the feature extractor of a checkpoint does; none without one.

    Raises:
        ImportError: transformers is not installed.
        UsageError: none gives the same samples, or the feature extractor cannot be read.
    """
    if not any((folder / name).exists() for name in EXTRACTORS):
        return {}
    processed = process_sounds(folder)
    rate = processed.extractor.sampling_rate
    for fields in _candidates(processed):
        if processed.first_difference(preparation(fields.get)) is None:
            return {"sampling_rate": rate, **fields}
    name, where = type(processed.extractor).__name__, processor_file(folder)
    if rate != SAMPLING_RATE and any(value.ndim > 1 for value in processed.values):
        raise ArtifactError(f"sampling_rate {rate} is not supported, spectrograms are of {SAMPLING_RATE} Hz", where)
    raise UsageError(f"{name} prepares sound in a way that zoo does not know", where)


def require_same_spectrogram(described: Any, c: ClassFields, where: object) -> None:
    """Raise :class:`ArtifactError` unless a feature extractor makes spectrograms of the sizes that a model reads.

    Args:
        described: the configuration of transformers.
        c: the configuration, with the sizes of the feature extractor.
        where: the file of the feature extractor, for errors.
    """
    # Whisper's configuration counts positions, each of two frames.
    key, factor = ("max_source_positions", 2) if c.spectrogram == "whisper" else ("max_length", 1)
    if (positions := getattr(described, key, None)) is None:  # of another kind, which is refused for its inputs
        return
    for name, found, wanted in (
        ("mel bins", c.num_mel_bins, described.num_mel_bins),
        ("frames", c.num_frames, factor * positions),
    ):
        if found != wanted:
            what = f"the feature extractor makes {found} {name}, but the model of config.json reads {wanted}"
            raise ArtifactError(what, where, "correct one of the two files")


def _candidates(processed: ProcessedSounds) -> Iterator[dict[str, Any]]:
    """Yield ways to prepare sound, of the sizes that a feature extractor makes."""
    extractor, shapes = processed.extractor, {value.shape for value in processed.values}
    if any(len(shape) == 1 for shape in shapes):
        yield from ({"normalize_sound": normalize} for normalize in (True, False))
        return
    if len(shapes) > 1 or extractor.sampling_rate != SAMPLING_RATE:
        return
    first, second = shapes.pop()
    plain = {"feature_mean": 0.0, "feature_std": 1.0}
    yield {"spectrogram": "whisper", "num_mel_bins": first, "num_frames": second, **plain}
    is_scaled = getattr(extractor, "do_normalize", False) and hasattr(extractor, "mean")
    scale = {"feature_mean": extractor.mean, "feature_std": 2 * extractor.std} if is_scaled else plain
    yield {"spectrogram": "kaldi", "num_mel_bins": second, "num_frames": first, **scale}
