"""Features of images among the embeddings of a text. B batch, T tokens, N features of an image, E hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["insert_features", "number_features"]


def number_features(input_ids: Tensor, image_token_id: int, count: int, attention_mask: Tensor | None = None) -> Tensor:
    """Return the number of the image's feature in the place of each token, from 1, or 0 for a token of the text.

    Args:
        input_ids: (B, T).
        image_token_id: the token in the place of a feature. Further ones stand for the last feature.
        count: N.
        attention_mask: (B, T), 1 for a token and 0 for padding, which stands for no feature.
    """
    is_image = input_ids.eq(image_token_id).long()
    is_image = is_image if attention_mask is None else is_image * attention_mask
    return (is_image.cumsum(1) * is_image).clamp(max=count)


def insert_features(
    x: Tensor, image_indices: Tensor, image_features: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Return embeddings with the features of an image in their places, (B, T, E), zeros for padding.

    Args:
        x: embeddings of tokens, (B, T, E).
        image_indices: (B, T), 0 for a token of the text, n for the n-th feature of the row's image.
        image_features: (B, N, E); an index larger than N stands for the last feature.
        attention_mask: (B, T), 1 for a token and 0 for padding.
    """
    places = (image_indices - 1).clamp(min=0, max=image_features.shape[1] - 1)[..., None].expand(x.shape)
    x = torch.where(image_indices[..., None] > 0, image_features.gather(1, places).to(x.dtype), x)
    return x if attention_mask is None else x.masked_fill(attention_mask[..., None] == 0, 0)
