"""Attention and its masks, registered with transformers under the name ``zoo``.

Those of transformers branch on whether a batch has padding, and are thus two functions of which a graph has one.

B batch, T queries, S keys, H heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function

from zoo.nn import scaled_dot_product_attention

__all__ = ["ATTENTION", "EAGER", "UnknownOption"]

ATTENTION, EAGER = "zoo", "zoo_eager"
"""Names of zoo's attention, and of a class's own with masks from here."""
_NEUTRAL = (
    "cache_position", "is_causal", "layer_idx", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "position_ids", "return_dict", "sliding_window", "use_cache",
)  # fmt: skip
"""Options that change nothing here: masks hold windows and causality."""


class UnknownOption(Exception):  # noqa: N818  (another implementation is then chosen)
    """A model asks for an option of attention that is not implemented here."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(B, H, T, D), (B, K, S, D) and (B, K, S, D') -> (B, T, H, D'), and no weights."""
    unknown = [name for name, option in options.items() if name not in _NEUTRAL and option is not None]
    if unknown:
        raise UnknownOption(f"options of attention that are not supported: {', '.join(unknown)}")
    is_causal = options.get("is_causal")
    if attention_mask is None and (getattr(module, "is_causal", False) if is_causal is None else is_causal):
        raise UnknownOption("causal attention without a mask")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
        attention_mask = None
    mixed = scaled_dot_product_attention(
        query, key, value, mask=attention_mask, bias=position_bias, scale=scaling, softcap=softcap, dropout=dropout
    )
    return mixed.transpose(1, 2).contiguous(), None


def _build_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """Return where a query may see a key, boolean, (B, 1, T, S); None if each sees all.

    ``mask_function`` maps numbers of rows, heads, queries and keys to truth values.
    """
    if attention_mask is None and mask_function is bidirectional_mask_function:
        return None
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    queries = (torch.arange(q_length, device=device) + q_offset)[None, None, :, None]
    keys = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    seen = mask_function(rows, heads, queries, keys).expand(batch_size, 1, q_length, kv_length)
    return seen if attention_mask is None else seen & attention_mask.bool()[:, None, None, :]


def _attend_eagerly(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Call the function of the module's own file."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **options)


def _build_added_mask(*, dtype: torch.dtype, **options: Any) -> Tensor | None:
    """Return what is added to scores, (B, 1, T, S): 0, or the least number where a query may not see a key."""
    seen = _build_mask(**options)
    return None if seen is None else torch.zeros((), dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _build_mask)
AttentionInterface.register(EAGER, _attend_eagerly)
AttentionMaskInterface.register(EAGER, _build_added_mask)
