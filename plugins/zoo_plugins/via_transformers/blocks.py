"""Tokens of transformers' decoders that see later ones: those of an image, or of a whole prompt.

B batch, T tokens of this call, S tokens including those before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.replaced import replaced

__all__ = ["blocks_of_types", "seeing_blocks", "types_of_blocks"]

_NUMBERING = "get_block_sequence_ids_for_mask"
"""Function of Gemma 3 that numbers the blocks of a call, given types of tokens; it has windows around the blocks."""
_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
"""Functions of masks in a class's file that take numbers of blocks, from 0, and -1 for tokens in none."""


def blocks_of_types(c: ClassFields, token_type_ids: Tensor) -> Tensor:
    """Return the number of each token's block, (B, T), given the types with which transformers calls the class.

    The type is 1 for tokens of an image, or 0 for those of a prompt.
    """
    return token_type_ids.eq(1 if c.token_blocks == "image" else 0).long()


def types_of_blocks(c: ClassFields, input_ids: Tensor) -> Tensor | None:
    """Return the types of the tokens of texts with an image, (B, T); None if all tokens are causal.

    The first half of a text is its prompt.
    """
    if c.token_blocks is None:
        return None
    if c.token_blocks == "image":
        return input_ids.eq(c.image_token_id or 0).long()
    length = input_ids.shape[1]
    return torch.arange(length, device=input_ids.device).ge(length // 2).long().expand(input_ids.shape)


@contextmanager
def seeing_blocks(original: Any, block_ids: Tensor | None, total: int) -> Iterator[dict[str, Any]]:
    """Call a class within this block, with the options that it yields, so that tokens of a block see each other.

    Args:
        original: the class.
        block_ids: (B, T), 0 for a token in no block; None if all are causal.
        total: S.
    """
    if block_ids is None:
        yield {}
        return
    module = sys.modules[type(original).__module__]
    numbers = functional.pad(block_ids, (total - block_ids.shape[1], 0))  # (B, S)
    if hasattr(module, _NUMBERING):
        with replaced([(module, _NUMBERING, lambda _: _from_zero)]):
            yield {"token_type_ids": numbers}
    else:
        options = {"block_sequence_ids": _from_zero(numbers)}
        with replaced([(module, name, partial(_with_options, options)) for name in _MASKS]):
            yield {}


def _from_zero(numbers: Tensor, device: Any = None) -> Tensor:
    return numbers - 1


def _with_options(options: dict[str, Any], function: Any) -> Any:
    return partial(function, **options)
