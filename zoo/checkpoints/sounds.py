"""What the feature extractor of a checkpoint makes of sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact.weights import load_json
from zoo.checkpoints.files import processor_file
from zoo.errors import ArtifactError, UsageError

__all__ = ["EXTRACTORS", "ProcessedSounds", "process_sounds"]

EXTRACTORS = ("preprocessor_config.json", "processor_config.json")
"""Files that describe a feature extractor, alone or as part of a processor."""
_SECONDS = (0.25, 0.5, 0.8)
_CLOSE, _CLOSE_LOGARITHMS = 1e-5, 1e-3
"""Maximum difference of samples, and of spectrograms: originals transform sound in float32, which quiet bands show."""


@dataclass(frozen=True)
class ProcessedSounds:
    """A few sounds, and what the feature extractor of a checkpoint makes of them."""

    extractor: Any
    """The feature extractor of transformers."""
    sounds: Sequence[Array]
    """Samples, (samples,)."""
    values: Sequence[Array]
    """Its result for each sound."""

    def first_difference(self, prepare: Callable[[Array], Array]) -> int | None:
        """Return the number of the first sound of which a function makes something else; None if it makes the same."""
        for number, (sound, expected) in enumerate(zip(self.sounds, self.values, strict=True)):
            found, limit = prepare(sound), _CLOSE if expected.ndim == 1 else _CLOSE_LOGARITHMS
            if found.shape != expected.shape or not np.allclose(found, expected, rtol=0, atol=limit):
                return number
        return None


def process_sounds(folder: Path) -> ProcessedSounds:
    """Apply the feature extractor of a checkpoint to a tone, to noise beside 0, and to silence.

    Raises:
        ImportError: transformers is not installed.
        UsageError: the feature extractor cannot be read or cannot be applied.
    """
    import transformers

    where = processor_file(folder)
    _check_rate(where)
    load: Any = transformers.AutoFeatureExtractor.from_pretrained
    try:
        extractor = load(folder, local_files_only=True, trust_remote_code=False)
        rate = extractor.sampling_rate
        sounds = _sounds(rate)
        made = [extractor(sound, sampling_rate=rate, return_tensors="np") for sound in sounds]
        values = [np.asarray(made_of[extractor.model_input_names[0]][0]) for made_of in made]
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"the feature extractor cannot be used: {said}", where) from error
    return ProcessedSounds(extractor, sounds, values)


def _check_rate(file: Path) -> None:
    """Raise :class:`ArtifactError` if the file of a feature extractor states a sampling rate that is none."""
    values = load_json(file)
    values = values.get("feature_extractor", values)
    rate = values.get("sampling_rate", 1) if isinstance(values, Mapping) else None
    if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
        raise ArtifactError(f"sampling_rate must be a positive number of samples per second, got {rate!r:.40}", file)


def _sounds(rate: int) -> list[Array]:
    tone, noise, silence = (np.arange(int(rate * seconds)) / rate for seconds in _SECONDS)
    random = np.random.default_rng(0)
    sounds = [0.5 * np.sin(2 * np.pi * (200 + 400 * tone) * tone), random.normal(0.1, 0.1, len(noise)), 0 * silence]
    return [sound.astype(np.float32) for sound in sounds]
