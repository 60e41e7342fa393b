"""Classes of transformers whose images are grids of patches of any size, with positions in rows and columns.

B batch, C channels, P side of a patch, M patches along a side of a feature, R rows and K columns of features,
N = R K M M patches of an image, T tokens of this call, E hidden size, L layers to which features are added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from zoo import UsageError
from zoo.checkpoints import Exact
from zoo.nn import positions_of, scaled_dot_product_attention
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.originals import read_original
from zoo_plugins.via_transformers.replaced import Replacement, replaced

__all__ = [
    "GRID_INPUTS",
    "added_features",
    "call_with_patches",
    "encode_grid",
    "grid_facts",
    "grid_processor",
    "grid_sizes",
    "image_grid",
    "positions_in_grid",
]

GRID_INPUTS = ("image_grid_thw", "mm_token_type_ids", "second_per_grid_ts", "video_grid_thw")
"""Arguments of these classes beside those of others. Videos are not supported."""
_PIXELS = (56 * 56, 28 * 28 * 1280)
"""Smallest and largest number of pixels of an image, if no processor states them: the defaults of Qwen2-VL's."""


def grid_sizes(config: Any) -> dict[str, Any]:
    """Return how images are resized to patches of a vision configuration, as fields; none for other classes."""
    patch, merge = getattr(config, "patch_size", None), getattr(config, "spatial_merge_size", None)
    if not (isinstance(patch, int) and isinstance(merge, int) and hasattr(config, "temporal_patch_size")):
        return {}
    channels = {"num_channels": getattr(config, "in_channels", 3)}
    return {"image_resize": "area", "image_size": _PIXELS, "image_multiple": patch * merge, **channels}


def grid_processor(c: ClassFields) -> dict[str, Any]:
    """Return how images are resized and cut into patches, in the words of their processor."""
    vision = read_original(c).vision_config
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": dict(zip(("shortest_edge", "longest_edge"), c.images().sides, strict=True)),
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }


def grid_facts(c: ClassFields, original: Any) -> dict[str, Any]:
    """Return the fields that describe how a decoder reads an image, which are those of no grid for other classes.

    Raises :class:`UsageError` if images have other sizes than the patches of the class need.
    """
    if GRID_INPUTS[0] in signature(original.forward).parameters:
        stated = grid_sizes(getattr(_vision(original), "config", None))
        if not stated:
            raise UsageError(f"{c.model_class} has no encoder of grids of patches that is supported")
        if (c.image_resize, c.image_multiple) != ("area", stated["image_multiple"]):
            what = f"{c.model_class} reads images whose sides are multiples of {stated['image_multiple']} pixels"
            raise UsageError(what, None, "give the preprocessor_config.json that belongs to the model")
    vision = getattr(_vision(original), "config", None)
    layers = getattr(vision, "deepstack_visual_indexes", None) or ()
    depth = getattr(vision, "depth", 0)
    if not {*layers} <= {*range(depth)}:
        raise UsageError(f"deepstack_visual_indexes {layers} are not layers of an encoder of depth {depth}")
    window = getattr(vision, "window_size", None)
    if isinstance(window, int) and window < (c.image_multiple or 0):
        raise UsageError(f"window_size {window} is smaller than a feature, of {c.image_multiple} pixels")
    return {"image_layers": len(layers), "grid_positions": hasattr(original.base_model, "get_rope_index")}


def _vision(original: Any) -> Any:
    return getattr(original.base_model, "visual", None)


def encode_grid(original: Any, pixel_values: Tensor) -> Tensor:
    """Return the features of images, (B, C, height, width) -> (B, R, K, (1 + L) E).

    Those that stand for tokens come before those that are added after layers. Sides are multiples of a feature's.
    """
    vision, merge = _vision(original), _vision(original).spatial_merge_size
    patches, size = _patches(vision, pixel_values), vision.config.patch_size * merge
    rows, columns = pixel_values.shape[2] // size, pixel_values.shape[3] // size
    batch, device = pixel_values.shape[0], pixel_values.device
    down = torch.arange(rows * merge, device=device).view(rows, 1, merge, 1)
    across = torch.arange(columns * merge, device=device).view(1, columns, 1, merge)
    places = torch.stack(torch.broadcast_tensors(down, across), dim=-1).reshape(-1, 2)  # (N, 2)
    options: dict[str, Any] = {"position_ids": _repeated(places, batch), "cu_seqlens": _Images(batch)}
    if hasattr(vision, "window_size"):
        windows = places // (vision.window_size // size * merge)
        seen = (windows[:, None] == windows).all(-1)[None, None]
        order = torch.arange(batch * rows * columns, device=device)
        options |= {"window_index": order, "cu_window_seqlens": _Images(batch, seen)}
    if hasattr(vision, "num_grid_per_side"):
        indices, weights = _interpolation(vision, places)
        options |= {"interp_indices": _repeated(indices, batch), "interp_weights": _repeated(weights, batch)}
    with replaced(_replacements(vision)), Exact(vision):
        found = vision(patches, grid_thw=None, return_dict=True, **options)
    added = getattr(found, "deepstack_features", None) or ()
    return torch.cat((found.pooler_output, *added), dim=-1).view(batch, rows, columns, -1)


def _patches(vision: Any, pixel_values: Tensor) -> Tensor:
    """(B, C, height, width) -> (B N, C frames P P), the patches of a feature in turn."""
    c = vision.config
    size, merge, frames = c.patch_size, c.spatial_merge_size, c.temporal_patch_size
    batch, channels, height, width = pixel_values.shape
    rows, columns = height // (size * merge), width // (size * merge)
    x = pixel_values.reshape(batch, channels, rows, merge, size, columns, merge, size)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :]  # (B, R, K, M, M, C, 1, P, P)
    x = x.expand(*x.shape[:6], frames, size, size)
    return x.reshape(batch * rows * columns * merge * merge, channels * frames * size * size)


def _repeated(values: Tensor, batch: int) -> Tensor:
    """(N, n) -> (B N, n)"""
    return values.expand(batch, *values.shape).reshape(batch * values.shape[0], values.shape[1])


def _interpolation(vision: Any, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the square table of positions that a patch has parts of, (N, n), and these parts, (N, n)."""
    from transformers.vision_utils import _interpolation_axis_taps_weights as taps_of

    side, options = vision.num_grid_per_side, (vision.interpolation_mode, vision.interpolation_align_corners)
    taps, parts = zip(*(taps_of(place, place[-1] + 1, side, *options) for place in places.unbind(-1)), strict=True)
    indices = taps[0][:, :, None] * side + taps[1][:, None, :]
    weights = parts[0][:, :, None] * parts[1][:, None, :]
    return indices.flatten(1), weights.flatten(1)


@dataclass(frozen=True)
class _Images:
    """How patches, of which a class states the numbers in each image or window, attend to each other."""

    count: int
    """B."""
    seen: Tensor | None = None
    """(1, 1, N, N), whether a patch sees another of its image; None if it sees all."""


class _Attention:
    """The table of implementations of attention of a class, which has that of patches."""

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        """Return the implementation, whatever the configuration says."""
        return _attend


def _attend(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, cu_seq_lens_q: _Images, scaling: float, **__: Any
) -> tuple[Tensor, None]:
    """(1, H, B N, D) of each -> (1, B N, H, D), and no weights."""
    rows = [x[0].unflatten(1, (cu_seq_lens_q.count, -1)).transpose(0, 1) for x in (query, key, value)]  # (B, H, N, D)
    mixed = scaled_dot_product_attention(*rows, mask=cu_seq_lens_q.seen, scale=scaling)
    return mixed.transpose(1, 2).flatten(0, 1)[None], None


def _replacements(vision: Any) -> Sequence[Replacement]:
    """Let attention take all patches at once, as it does for flash attention, in place of one image at a time."""
    module = sys.modules[type(vision).__module__]
    return [
        (module, "is_flash_attention_requested", lambda _: lambda *_, **__: True),
        (module, "ALL_ATTENTION_FUNCTIONS", lambda _: _Attention()),
    ]


def image_grid(c: ClassFields, input_ids: Tensor, mask: Tensor | None, pixel_values: Tensor | None) -> Tensor:
    """Return the number of tokens before the image, and the rows and columns of its features, (B, 3); 0 without one.

    Args:
        c: the configuration.
        input_ids: (B, T).
        mask: (B, S), 1 for a token and 0 for padding, the past included; by default no padding.
        pixel_values: (B, C, height, width).
    """
    if pixel_values is None:
        return input_ids.new_zeros(len(input_ids), 3)
    length, size = input_ids.shape[1], c.image_multiple or 1
    if mask is None:
        mask = torch.ones_like(input_ids)
    of_image = (input_ids.eq(c.image_token_id or 0) & mask[:, -length:].bool()).long()
    first, found = of_image.argmax(1, keepdim=True), of_image.amax(1, keepdim=True)  # (B, 1)
    before = positions_of(length, mask.shape[1], padding=mask).gather(1, first)
    return torch.cat([before, *(torch.full_like(before, side // size) for side in pixel_values.shape[2:])], 1) * found


def positions_in_grid(counts: Tensor, grid: Tensor | None) -> Tensor:
    """Return the positions of tokens in time and by row and column, (3, B, T).

    Those of an image begin with the number of tokens before it, and count its rows and columns; the text after it goes
    on from the greater number of both (Wang et al. 2024, *Qwen2-VL*, section 2.1).

    Args:
        counts: the number of tokens before each token, (B, T).
        grid: of :func:`image_grid`, (B, 3).
    """
    if grid is None:
        return counts.expand(3, *counts.shape)
    start, rows, columns = (part[:, None] for part in grid.unbind(1))  # (B, 1)
    place = counts - start
    after = place >= rows * columns
    text = torch.where(after, counts - rows * columns + torch.maximum(rows, columns), counts)
    is_text = after | (place < 0)
    width = columns.clamp(min=1)
    down, across = (torch.where(is_text, text, start + part) for part in (place // width, place % width))
    return torch.stack((torch.where(is_text, text, start.expand_as(text)), down, across))


@contextmanager
def added_features(original: Any, features: Sequence[Tensor]) -> Iterator[None]:
    """Add features, (B, T, E) each, to the outputs of the first layers of a decoder within a block."""
    layers = original.base_model.language_model.layers if features else ()
    with ExitStack() as stack:
        for layer, part in zip(layers, features, strict=False):
            handle = layer.register_forward_hook(lambda *found, part=part: found[-1] + part)
            stack.callback(handle.remove)
        yield


def call_with_patches(original: Any) -> None:
    """Let a class take images, (B, C, height, width), of which it is given patches, grids and the places of tokens."""
    if _vision(original) is not None and grid_sizes(_vision(original).config):
        original.register_forward_pre_hook(_with_patches, with_kwargs=True)


def _with_patches(original: Any, args: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    pixels = inputs.get("pixel_values")
    if pixels is None:
        return args, dict(inputs)
    vision = _vision(original)
    height, width = (side // vision.config.patch_size for side in pixels.shape[2:])
    made = {
        "pixel_values": _patches(vision, pixels),
        "image_grid_thw": torch.tensor([[1, height, width]] * len(pixels)),
        "mm_token_type_ids": inputs["input_ids"].eq(original.config.image_token_id).int(),
    }
    return args, {**inputs, **made}
