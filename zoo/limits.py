"""Limits on what files and settings may ask of the machine. An environment variable raises or lowers each.

A small file can ask for any amount of memory or time. What exceeds a limit is refused before it is computed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NoReturn

from zoo.errors import ArtifactError, UsageError, ZooError
from zoo.system import free_memory

__all__ = [
    "BEAMS",
    "CONSTRAINT_CHARACTERS",
    "CONSTRAINT_STEPS",
    "FILE_BYTES",
    "GRAPH_BYTES",
    "GRAPH_NODES",
    "GRAPH_SECONDS",
    "IMAGE_PIXELS",
    "IMAGE_SIDE",
    "IMAGE_TILES",
    "LAYERS",
    "LIMITS",
    "MODEL_BYTES",
    "SOUND_SAMPLES",
    "TEXT_CHARACTERS",
    "TEXT_GROWTH",
    "WORD_CHARACTERS",
    "Limit",
]


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit and the environment variable that changes it."""

    variable: str
    default: int | None
    """None for the memory that is free."""
    unit: str
    what: str
    """What it limits, for the documentation."""

    def value(self) -> int:
        """Return the limit in force. Raises :class:`UsageError` unless the variable is a positive whole number."""
        text = os.environ.get(self.variable)
        if text is None:
            return int(free_memory()) if self.default is None else self.default
        if not (text.isascii() and text.isdecimal() and int(text[:30]) > 0):
            raise UsageError(f"must be a positive whole number of {self.unit}, got {text!r:.80}", self.variable)
        return int(text[:30])

    def check(self, amount: float, what: str, where: object, kind: type[ZooError] = ArtifactError) -> None:
        """Raise ``kind`` if an amount exceeds the limit, such as ``what`` = "an image of 9,000,000,000 pixels"."""
        if amount > self.value():
            self.refuse(what, where, kind)

    def refuse(self, what: str, where: object, kind: type[ZooError] = ArtifactError) -> NoReturn:
        """Raise ``kind`` for something that exceeds the limit."""
        free = f" ({self.unit} that are free)" if self.default is None and self.variable not in os.environ else ""
        raise kind(f"{what}: at most {self.value():,} are allowed{free}", where, self.remedy)

    @property
    def remedy(self) -> str:
        """The remedy of errors about the limit."""
        return f"see {self.variable}"


FILE_BYTES = Limit("ZOO_MAX_FILE_BYTES", 100_000_000, "bytes", "a file of settings, a vocabulary, or a line of data")
LAYERS = Limit("ZOO_MAX_LAYERS", 4096, "layers", "a configuration; also the channels of an image")
MODEL_BYTES = Limit("ZOO_MAX_MODEL_BYTES", None, "bytes", "the parameters of a new model, in float32")
GRAPH_NODES = Limit("ZOO_MAX_GRAPH_NODES", 200_000, "nodes", "an ONNX graph whose functions are expanded")
GRAPH_SECONDS = Limit("ZOO_MAX_GRAPH_SECONDS", 3600, "seconds", "one run of an ONNX graph, or loading it")
GRAPH_BYTES = Limit(
    "ZOO_MAX_GRAPH_BYTES", None, "bytes", "memory that a command allocates to run an ONNX graph, or to load it"
)
TEXT_CHARACTERS = Limit("ZOO_MAX_TEXT_CHARACTERS", 4_000_000, "characters", "one text to encode")
TEXT_GROWTH = Limit("ZOO_MAX_TEXT_GROWTH", 256, "times", "what a tokenizer may multiply the length of a text by")
WORD_CHARACTERS = Limit("ZOO_MAX_WORD_CHARACTERS", 1000, "characters", "a word to train a tokenizer on: it is cut")
IMAGE_PIXELS = Limit("ZOO_MAX_IMAGE_PIXELS", 2**26, "pixels", "an image file, and an image before it is cropped")
IMAGE_SIDE = Limit("ZOO_MAX_IMAGE_SIDE", 2**16, "pixels", "a side of an image file; every row takes memory")
IMAGE_TILES = Limit("ZOO_MAX_IMAGE_TILES", 1024, "tiles", "what the images of a model may be cut into")
SOUND_SAMPLES = Limit("ZOO_MAX_SOUND_SAMPLES", 2**27, "samples", "a sound file, those of all channels")
BEAMS = Limit("ZOO_MAX_BEAMS", 1024, "beams", "beam search; their memory is checked too")
CONSTRAINT_CHARACTERS = Limit(
    "ZOO_MAX_CONSTRAINT_CHARACTERS", 100_000, "characters", "a JSON schema, a regular expression or a grammar of texts"
)
CONSTRAINT_STEPS = Limit("ZOO_MAX_CONSTRAINT_STEPS", 200_000, "steps", "compiling one of these: llguidance's fuel")

LIMITS = (
    FILE_BYTES,
    LAYERS,
    MODEL_BYTES,
    GRAPH_NODES,
    GRAPH_SECONDS,
    GRAPH_BYTES,
    TEXT_CHARACTERS,
    TEXT_GROWTH,
    WORD_CHARACTERS,
    IMAGE_PIXELS,
    IMAGE_SIDE,
    IMAGE_TILES,
    SOUND_SAMPLES,
    BEAMS,
    CONSTRAINT_CHARACTERS,
    CONSTRAINT_STEPS,
)
"""All limits, in the order of the documentation."""
