"""How a checkpoint's processor makes the inputs of a model that reads a text with an image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.arrays import Array
from zoo.checkpoints.images import sample_images
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError
from zoo.tokenizers.image_places import count_features

__all__ = ["ProcessedPrompt", "open_processor", "process_prompt", "read_image_prompt", "with_image"]

_FILE = "processor_config.json"
_INPUTS = {"attention_mask", "input_ids", "mm_token_type_ids", "pixel_values", "token_type_ids"}
"""What a processor may make. Types of tokens are inputs of no model that is imported."""


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt with an image, as a processor prepares it."""

    ids: list[int]
    pixels: Array
    """(channels, height, width)"""


def open_processor(folder: Path) -> Any:
    """Return the processor of a checkpoint, which prepares images with Pillow.

    Raises:
        ImportError: transformers is not installed.
        ArtifactError: it states no size of patches, which it needs.
        UsageError: it cannot be read, or is not one of images and texts.
    """
    import transformers

    load_all: Any = transformers.AutoProcessor.from_pretrained
    load_images: Any = transformers.AutoImageProcessor.from_pretrained
    try:
        processor: Any = load_all(folder, local_files_only=True, trust_remote_code=False)
        processor.image_processor = load_images(folder, backend="pil", local_files_only=True, trust_remote_code=False)
        assert isinstance(processor.image_token, str)
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"the processor cannot be used: {said}", folder / _FILE) from error
    if hasattr(processor, "patch_size") and not processor.patch_size:  # by which it counts the tokens of an image
        said = json.dumps(processor.patch_size)
        raise ArtifactError(f"patch_size must be that of the model, got {said}", folder / _FILE)
    return processor


def process_prompt(processor: Any, image: Any, text: str, where: Path, **options: Any) -> ProcessedPrompt:
    """Apply a processor to an image of Pillow and a prompt.

    Raises :class:`UsageError` if that fails, or gives other inputs than token ids and the pixels of one image.
    """
    try:
        found = dict(processor(images=[image], text=[text], **options))
        (ids,), pixels = found["input_ids"], np.asarray(found["pixel_values"])
        others = sorted(found.keys() - _INPUTS)
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"the processor cannot be used: {said}", where) from error
    name = type(processor).__name__
    if others:
        raise UsageError(f"{name} makes {', '.join(others)} beside ids and pixels, which is not supported", where)
    if pixels.ndim != 4 or len(pixels) != 1:
        raise UsageError(f"{name} makes several images of one, {pixels.shape}, which is not supported", where)
    return ProcessedPrompt([int(token) for token in ids], pixels[0])


def read_image_prompt(folder: Path, token: int) -> dict[str, Any]:
    """Return the fields of a configuration that say which tokens are in the place of an image in a prompt.

    Args:
        folder: the checkpoint.
        token: the token of each feature of an image.

    Raises:
        ImportError: Pillow or transformers is not installed.
        UsageError: the processor cannot be used, or puts other tokens among those of an image, or as many of them as
            its size requires.
    """
    processor, where = open_processor(folder), folder / _FILE
    name, text = type(processor).__name__, processor.image_token
    (prompt_id, *more) = processor.tokenizer.encode(text, add_special_tokens=False)
    ids, *others = (
        process_prompt(processor, image, text, where, add_special_tokens=False).ids for image in sample_images()
    )
    if any(other != ids for other in others):
        raise UsageError(f"{name} makes other tokens of images of other sizes, which is not supported", where)
    if more or token not in ids:
        raise UsageError(f"{name} puts no token {token} in the place of {text!r}", where)
    first, last = ids.index(token), len(ids) - ids[::-1].index(token)
    if set(ids[first:last]) != {token}:
        raise UsageError(f"{name} puts other tokens among those of an image, which is not supported", where)
    return {"image_prompt_id": prompt_id, "image_before": tuple(ids[:first]), "image_after": tuple(ids[last:])}


def with_image(
    inputs: Mapping[str, Tensor], token: int, graphs: Sequence[Graph], longest: int | None
) -> dict[str, Tensor]:
    """Return texts with the tokens of an image after their first token, and no others of these.

    Args:
        inputs: ``input_ids`` and ``attention_mask``, each (B, T), and others, which are kept.
        token: the token of each feature of an image.
        graphs: the graphs, of which one returns the features.
        longest: the largest number of tokens, None for no limit.

    Raises:
        UsageError: an image leaves no room for a text.
    """
    count = count_features(graphs) or 0
    room = None if longest is None else longest - count
    if room is not None and room < 1:
        raise UsageError(f"an image of {count} tokens leaves no room in {longest} positions")
    ids, mask = (inputs[name][:, :room] for name in ("input_ids", "attention_mask"))
    ids = ids.masked_fill(ids == token, int(token == 0))
    places = ids.new_full((len(ids), count), token)
    return {
        **inputs,
        "input_ids": torch.cat((ids[:, :1], places, ids[:, 1:]), dim=1),
        "attention_mask": torch.cat((mask[:, :1], torch.ones_like(places), mask[:, 1:]), dim=1),
    }
