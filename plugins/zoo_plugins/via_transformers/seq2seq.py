"""Encoder and decoder of a model of transformers, each as a graph.

B batch, S source tokens, T target tokens of this call, E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput

from zoo.nn import Cache, positions_of
from zoo_plugins.via_transformers.cache import SelfAndCrossCache
from zoo_plugins.via_transformers.positions import given_positions

__all__ = ["decode", "encode"]


@dataclass
class _Encoded(BaseModelOutput):
    """The states of a source, with what classes that route to experts read beside."""

    router_logits: Any = None


def encode(original: Any, num_layers: int, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Return the states of the source, (B, S, E), and their keys and values for each layer of the decoder.

    The decoder computes the latter when it reads a first token, of which nothing else is kept.
    """
    states = original.get_encoder()(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)[0]
    cross = Cache.empty(num_layers)
    original(
        decoder_input_ids=torch.zeros_like(input_ids[:, :1]),
        encoder_outputs=_Encoded(last_hidden_state=states),
        attention_mask=attention_mask,
        past_key_values=SelfAndCrossCache(Cache.empty(num_layers), cross, is_updated=False),
        use_cache=True,
        return_dict=True,
    )
    return {"last_hidden_state": states, "cross_key_values": cross}


def decode(
    original: Any,
    width: int,
    decoder_input_ids: Tensor,
    cross: Cache,
    decoder_attention_mask: Tensor | None,
    attention_mask: Tensor | None,
    past: Cache | None,
) -> Tensor:
    """Return the logits of the next target token, (B, T, V).

    The states of the source, of ``width``, are not needed beside their keys and values: zeros are in their place.
    """
    rows, length = decoder_input_ids.shape
    past = Cache.empty(len(cross)) if past is None else past
    total, key = past.length + length, next(cross.pairs())[0]
    if decoder_attention_mask is None:
        decoder_attention_mask = decoder_input_ids.new_ones(rows, total)
    if attention_mask is None:
        attention_mask = decoder_input_ids.new_ones(rows, key.shape[2])
    positions = positions_of(length, total, padding=decoder_attention_mask, device=decoder_input_ids.device)
    passed_on = {"decoder_position_ids": positions} if isinstance(original, EncoderDecoderModel) else {}
    with given_positions(original, positions):
        found = original(
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=_Encoded(last_hidden_state=key.new_zeros(rows, key.shape[2], width)),
            attention_mask=attention_mask,
            past_key_values=SelfAndCrossCache(past, cross, is_updated=True),
            use_cache=True,
            return_dict=True,
            **passed_on,
        )
    logits: Tensor = found["logits"]
    return logits
