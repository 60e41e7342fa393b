"""Encoder and decoder of a model of transformers, each as a graph.

B batch, S source tokens or positions of an image, T target tokens of this call, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput

from zoo.nn import Cache, positions_of
from zoo_plugins.via_transformers.cache import SelfAndCrossCache
from zoo_plugins.via_transformers.fields import READS_IMAGES, ClassFields
from zoo_plugins.via_transformers.replaced import given_positions

__all__ = ["decode", "encode"]


@dataclass
class _Encoded(BaseModelOutput):
    """The states of a source, with what classes that route to experts read beside."""

    router_logits: Any = None


def encode(original: Any, num_layers: int, source: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the states of the source, (B, S, E), and their keys and values for each layer of the decoder.

    The decoder computes the latter when it reads a first token, of which nothing else is kept.

    Args:
        original: the encoder-decoder.
        num_layers: number of layers of the decoder.
        source: the inputs of the encoder: ``input_ids`` and ``attention_mask``, (B, S), or ``pixel_values``.
    """
    states = original.get_encoder()(**source, return_dict=True)[0]
    cross = Cache.empty(num_layers)
    first = torch.zeros(states.shape[0], 1, dtype=torch.long, device=states.device)
    original(
        decoder_input_ids=first,
        decoder_attention_mask=torch.ones_like(first),  # without it, some look for padding
        encoder_outputs=_Encoded(last_hidden_state=states),
        **{name: value for name, value in source.items() if name == "attention_mask"},
        past_key_values=SelfAndCrossCache(Cache.empty(num_layers), cross, is_updated=False),
        use_cache=True,
        return_dict=True,
    )
    return {"last_hidden_state": states, "cross_key_values": cross}


def decode(
    original: Any,
    c: ClassFields,
    decoder_input_ids: Tensor,
    cross: Cache,
    decoder_attention_mask: Tensor | None,
    attention_mask: Tensor | None,
    past: Cache | None,
) -> Tensor:
    """Return the logits of the next target token, (B, T, V).

    The states of the source are not needed beside their keys and values: zeros are in their place.
    """
    rows, length = decoder_input_ids.shape
    past = Cache.empty(len(cross)) if past is None else past
    total, key = past.length + length, next(cross.pairs())[0]
    if decoder_attention_mask is None:
        decoder_attention_mask = decoder_input_ids.new_ones(rows, total)
    options: dict[str, Tensor] = {}
    if c.task not in READS_IMAGES:
        options["attention_mask"] = (
            decoder_input_ids.new_ones(rows, key.shape[2]) if attention_mask is None else attention_mask
        )
    positions = positions_of(length, total, padding=decoder_attention_mask, device=decoder_input_ids.device)
    if c.counts_positions or isinstance(original, EncoderDecoderModel):
        options["decoder_position_ids"] = positions
    with given_positions(original, positions):
        found = original(
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=_Encoded(last_hidden_state=key.new_zeros(rows, key.shape[2], c.hidden_size or 0)),
            past_key_values=SelfAndCrossCache(past, cross, is_updated=True),
            use_cache=True,
            return_dict=True,
            **options,
        )
    logits: Tensor = found["logits"]
    return logits
