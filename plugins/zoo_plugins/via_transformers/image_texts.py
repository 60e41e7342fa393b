"""Classes of transformers that read a text with an image, as graphs for the image, the embeddings and the decoder.

B batch, N positions of an image, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zoo import UsageError
from zoo.checkpoints import Exact
from zoo.nn import Cache, LayerStates, insert_features, positions_of
from zoo_plugins.via_transformers.blocks import seeing_blocks
from zoo_plugins.via_transformers.cache import PastCache, cache_argument
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.image_grids import (
    GRID_INPUTS,
    added_features,
    encode_grid,
    grid_facts,
    positions_in_grid,
)
from zoo_plugins.via_transformers.known import FIRST_POSITION, TOKEN_BLOCKS
from zoo_plugins.via_transformers.replaced import given_positions, replaced, whole_images, without_branches

__all__ = ["decode_embeddings", "embed", "encode_image", "image_text_facts", "image_token", "require_image_texts"]

_OPTIONAL = (
    "attention_mask", "cache_position", "image_sizes", "input_ids", "inputs_embeds", "interpolate_pos_encoding",
    "labels", "logits_to_keep", "mm_encoder_outputs", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "pixel_attention_mask", "pixel_values", "pixel_values_videos",
    "position_ids", "return_dict", "self", "use_cache", "vision_feature_layer", "vision_feature_select_strategy",
)  # fmt: skip
"""Arguments of a class that graphs have, or that may be left out: ``image_sizes`` are those of padded images, and
``pixel_attention_mask`` is 1 for whole tiles. Others describe masks of images; for grids, see ``GRID_INPUTS``."""
_REMEDY = "of models that read a text with an image, those with one image, a causal mask and rows of its features"


def require_image_texts(cls: Any, model_type: str) -> None:
    """Raise :class:`UsageError` unless a class reads token ids, images of one size or grids of patches, and no more.

    Those that make masks of their own let some tokens see later ones, of which ``TOKEN_BLOCKS`` has the known kinds.
    """
    has_blocks = model_type in TOKEN_BLOCKS
    if hasattr(cls, "create_masks_for_generate") and not has_blocks:
        raise UsageError(f"{cls.__name__} makes masks that are not causal", None, f"{_REMEDY} are supported")
    taken = dict(signature(cls.forward).parameters)
    if has_blocks:
        del taken["token_type_ids"]
    features = getattr(cls, "get_image_features", None)
    needed = {} if features is None else signature(features).parameters
    optional = (*_OPTIONAL, *GRID_INPUTS) if "image_grid_thw" in taken else _OPTIONAL
    others = [name for name, item in taken.items() if name not in optional and item.kind != Parameter.VAR_KEYWORD]
    others += [
        name
        for name, item in needed.items()
        if item.default is Parameter.empty
        and item.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        and name not in ("self", "pixel_values", *others)
    ]
    if "pixel_values" not in taken or others:
        what = f"reads {', '.join(others)} beside pixel_values" if "pixel_values" in taken else "takes no pixel_values"
        raise UsageError(f"{cls.__name__} {what}", None, f"{_REMEDY} are supported")


def image_token(config: Any) -> int | None:
    """Return the token in the place of each position of an image, which a configuration states."""
    names = ("image_token_id", "image_token_index")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def image_text_facts(c: ClassFields, original: Any) -> dict[str, Any]:
    """Return the fields of the configuration that say how a class reads a text with an image.

    Errors as of :func:`grid_facts`.
    """
    return {"image_token_id": image_token(original.config), **grid_facts(c, original)}


def encode_image(original: Any, pixel_values: Tensor) -> Tensor:
    """(B, C, I, I) -> the features of the images, (B, N, E), or those of a grid: see :func:`encode_grid`.

    Raises :class:`UsageError` for a class without any.
    """
    if "image_grid_thw" in signature(original.forward).parameters:
        return encode_grid(original, pixel_values)
    owner = next((item for item in (original, original.base_model) if hasattr(item, "get_image_features")), None)
    if owner is None:
        raise UsageError(f"{type(original).__name__} has no get_image_features", None, f"{_REMEDY} are supported")
    module = sys.modules[type(original).__module__]
    # list() of a tensor would cut it into rows, whose number a trace fixes.
    with whole_images(original), replaced([(module, "list", lambda _: _parts)]):
        found = owner.get_image_features(pixel_values=pixel_values, return_dict=True)
    found = getattr(found, "pooler_output", found)
    features: Tensor = torch.cat([*found]) if isinstance(found, list | tuple) else found
    return features.reshape(pixel_values.shape[0], -1, features.shape[-1])


def _parts(value: Any) -> Any:
    return [value] if isinstance(value, Tensor) else [*value]


def embed(
    original: Any, input_ids: Tensor, image_indices: Tensor, image_features: Tensor, attention_mask: Tensor
) -> Tensor:
    """Return the embeddings of tokens, (B, T, E), zeros for padding.

    Args:
        original: the class.
        input_ids: (B, T).
        image_indices: (B, T), 0 for a token of the text, n for the n-th feature of the row's image.
        image_features: (B, N, E); an index larger than N stands for the last feature. They may be wider than
            embeddings by what is added after layers, which is then 0 for a token of the text.
        attention_mask: (B, T), 1 for a token and 0 for padding.
    """
    x: Tensor = original.get_input_embeddings()(input_ids)
    if more := image_features.shape[-1] - x.shape[-1]:
        x = functional.pad(x, (0, more))
    return insert_features(x, image_indices, image_features, attention_mask)


def decode_embeddings(
    original: Any,
    c: ClassFields,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past: Cache | None,
    states: Sequence[LayerStates] | None,
    block_ids: Tensor | None = None,
    image_grid: Tensor | None = None,
) -> Tensor:
    """Return the logits of the tokens that follow, (B, T, V).

    Args:
        original: the class.
        c: its configuration.
        inputs_embeds: (B, T, E), of :func:`embed`.
        attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
        past: keys and values of earlier calls; extended in place.
        states: states after earlier calls, of the layers that have any; replaced in place.
        block_ids: (B, T), the same positive number for tokens that see each other, later ones included.
        image_grid: (B, 3), see :func:`zoo_plugins.via_transformers.image_grids.image_grid`; by default no image.
    """
    inputs_embeds, *added = inputs_embeds.chunk(1 + c.image_layers, dim=-1)
    rows, length, _ = inputs_embeds.shape
    total = length + (past.length if past is not None else 0)
    if attention_mask is None:
        attention_mask = torch.ones(rows, total, dtype=torch.long, device=inputs_embeds.device)
    positions = positions_of(length, total, padding=attention_mask, device=inputs_embeds.device)
    has_past = past is not None or states is not None
    kept = PastCache(past or Cache.empty(0), states or (), c.key_layers, c.state_layers) if has_past else None
    options: dict[str, Any] = {"use_cache": has_past, cache_argument(original): kept}
    if c.counts_positions:
        positions = positions + FIRST_POSITION.get(c.original["model_type"], 0)
        options["position_ids"] = positions_in_grid(positions, image_grid) if c.grid_positions else positions
    # Embeddings of the table alone are exact in float32, in which a reference in float64 would compute the first norm.
    with (
        given_positions(original, positions),
        without_branches(original),
        added_features(original, added),
        Exact(original),
        seeing_blocks(original, block_ids, total) as more,
    ):
        options |= {"attention_mask": attention_mask, **more}
        found = original(inputs_embeds=inputs_embeds, return_dict=True, **options)
    logits: Tensor = found["logits"]
    return logits
