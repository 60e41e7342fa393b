"""Encoders of images with a mask of pixels, as those of Idefics 3, called on whole tiles, of which all pixels are read.

B tiles, C channels, I side of a tile, P patches of a side, N features of a tile, H width of the encoder, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

__all__ = ["call_with_tiles", "use_whole_tiles"]


def use_whole_tiles(model: nn.Module) -> None:
    """Let models that read masks of pixels make features of whole tiles, (B, C, I, I), without looking for padding.

    Their own methods count the images that are not zero, and compute positions from the mask in each call.
    """
    owner: Any
    for owner in model.modules():
        if hasattr(owner, "connector") and hasattr(owner, "get_image_features") and _reads_masks(owner):
            owner.get_image_features = MethodType(_encode, owner)
            embeddings: Any = owner.vision_model.embeddings
            embeddings.tile_positions = _positions(embeddings.num_patches_per_side)
            embeddings.forward = MethodType(_embed, embeddings)


def call_with_tiles(original: Any) -> None:
    """Let a class that reads masks of pixels take the tiles of all texts in turn, without masks."""
    if "pixel_attention_mask" in signature(original.forward).parameters:
        original.register_forward_pre_hook(_with_rows_of_tiles, with_kwargs=True)


def _with_rows_of_tiles(_: nn.Module, args: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a class the tiles of each text, (B, tiles, C, I, I)."""
    pixels, rows = inputs.get("pixel_values"), inputs.get("input_ids")
    if isinstance(pixels, Tensor) and isinstance(rows, Tensor) and pixels.dim() == 4:
        return args, {**inputs, "pixel_values": pixels.unflatten(0, (len(rows), -1))}
    return args, dict(inputs)


def _reads_masks(model: Any) -> bool:
    return "pixel_attention_mask" in signature(model.get_image_features).parameters


def _encode(model: Any, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
    """(B, C, I, I) -> features as ``pooler_output``, (B, N, E)."""
    states = model.vision_model(pixel_values=pixel_values, return_dict=True).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.connector(states))


def _embed(module: Any, pixel_values: Tensor, **_: Any) -> Tensor:
    """(B, C, I, I) -> (B, P P, H)."""
    x: Tensor = module.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    return x + module.position_embedding(torch.tensor(module.tile_positions, device=x.device))


def _positions(side: int) -> list[int]:
    """Return the positions of the patches of a whole tile, P P of them.

    They are computed with the operations of transformers, whose rounding repeats some numbers: for a side of 25, those
    of 10 patches are not their own.
    """
    with torch.device("cpu"):
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        coordinates = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side]))
        numbers: Tensor = torch.bucketize(coordinates.clamp(max=1.0 - 1e-6), boundaries, right=True)  # (P)
        return [int(number) for number in (numbers[:, None] * side + numbers).flatten()]
