"""How timm prepares images for evaluation: read from a config.json, written to one, and applied by timm itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zoo import ImageConfig, UsageError
from zoo.checkpoints import RESAMPLING, Checkpoint, ProcessedImages, sample_images

__all__ = ["describe_preparation", "preparation", "process_images", "stated_preparation"]

_CROP = 0.875
"""timm's ``crop_pct`` where none is stated."""
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""timm's normalisation where none is stated."""


def preparation(stated: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return the fields of :class:`zoo.ImageConfig` that follow from timm's ``pretrained_cfg``.

    Raises :class:`UsageError` for images that are not square, and for ways to resize that zoo does not know.
    """
    channels, height, width = _input_size(stated, where)
    if height != width:
        raise UsageError(f"input_size {height} x {width} is not supported, only squares", where)
    mode, resample = stated.get("crop_mode") or "center", stated.get("interpolation") or "bicubic"
    if mode not in ("center", "squash"):
        raise UsageError(f"crop_mode {mode!r} is not supported", where, "known: center, squash")
    if resample not in RESAMPLING:
        raise UsageError(f"interpolation {resample!r} is not supported", where, f"known: {', '.join(RESAMPLING)}")
    portion = stated.get("crop_pct") or _CROP
    if not isinstance(portion, int | float) or not 0 < portion <= 1:
        raise UsageError(f"crop_pct {portion!r} is not supported", where, "it must lie in (0, 1]")
    whole = math.floor(height / portion)
    return {
        "num_channels": channels,
        "image_size": height,
        "image_resample": resample,
        "image_resize": "shortest_edge" if mode == "center" else "stretch",
        "image_crop": portion if whole == math.floor(height / portion + 1e-6) else height / whole,  # as zoo rounds
        "image_margin": "down" if mode == "squash" and whole == height else "even",
        "image_mean": _normalisation(stated, "mean", channels, where),
        "image_std": _normalisation(stated, "std", channels, where),
    }


def describe_preparation(c: ImageConfig) -> dict[str, Any]:
    """Return a configuration as timm's ``pretrained_cfg``, of which :func:`preparation` returns the fields."""
    return {
        "input_size": [c.num_channels, c.image_size, c.image_size],
        "interpolation": c.image_resample,
        "crop_pct": c.image_crop,
        "crop_mode": "center" if c.image_resize == "shortest_edge" else "squash",
        "mean": list(c.image_mean or ()),
        "std": list(c.image_std or ()),
    }


def stated_preparation(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return ``pretrained_cfg`` of a checkpoint, with the size of images for which ``model_args`` build the model."""
    config, where = checkpoint.config, checkpoint.config_file
    arguments = config.get("model_args") or {}
    stated = config.get("pretrained_cfg", config) or {}  # in old files, the values lie beside the architecture
    for name, section in (("model_args", arguments), ("pretrained_cfg", stated)):
        if not isinstance(section, Mapping):
            raise UsageError(f"{name} must be an object, got {section!r:.80}", where)
    channels, height, width = _input_size(stated, where)
    size = arguments.get("img_size")
    sides = (size, size) if isinstance(size, int) else size if isinstance(size, list) else (height, width)
    return {**stated, "input_size": (arguments.get("in_chans") or channels, *sides)}


def process_images(checkpoint: Checkpoint) -> ProcessedImages:
    """Have timm prepare images as for evaluation. Raises ``ImportError`` if it or its torchvision cannot."""
    stated, images = stated_preparation(checkpoint), sample_images()
    if stated["input_size"][0] == 1:
        images = [image.convert("L") for image in images]
    try:
        import timm as untyped

        timm: Any = untyped
        prepare = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=stated))
        pixels = [prepare(image).numpy() for image in images]
    except Exception as error:  # from timm on untrusted files, or from a torchvision that does not match torch
        raise ImportError(f"timm cannot prepare images: {' '.join(str(error).split())[:200]}") from error
    return ProcessedImages(timm, None, images, pixels)


def _input_size(stated: Mapping[str, Any], where: object) -> tuple[int, int, int]:
    size = stated.get("input_size") or (3, 224, 224)
    if not isinstance(size, list | tuple) or len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
        raise UsageError(f"input_size {size!r:.80} must be channels, height and width", where)
    return size[0], size[1], size[2]


def _normalisation(stated: Mapping[str, Any], key: str, channels: int, where: object) -> tuple[float, ...]:
    """Return a number for each channel."""
    value = _IMAGENET[key] if stated.get(key) is None else stated[key]
    numbers = value if isinstance(value, list | tuple) else (value,) * channels
    if not all(isinstance(number, int | float) for number in numbers):
        raise UsageError(f"{key} {value!r:.80} must be numbers", where)
    return tuple(map(float, numbers))
