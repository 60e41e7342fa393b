"""CLIP: encoders of images and texts into one space (Radford et al. 2021).

A text is represented by the state of one of its tokens, an image by that of a class token. SigLIP (Zhai et al. 2023)
pools images by attention, reads texts in both directions, and adds a bias to the logits.

N images, M texts, C channels, S image size, T tokens of a text, P patches, E width of an encoder, D embedding size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.nn import (
    FeedForward,
    MultiHeadAttention,
    build_mask,
    initialize,
    normalize,
    pool,
    resize_grid,
    truncate_positions,
)
from zoo_plugins.clip.config import CLIPConfig

INIT_STD = 0.02


class Block(nn.Module):
    """Attention and feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: CLIPConfig, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, eps=c.norm_eps)
        self.attention = MultiHeadAttention(width, num_heads, dropout=c.dropout)
        self.norm_2 = nn.LayerNorm(width, eps=c.norm_eps)
        self.mlp = FeedForward(width, intermediate_size, activation=c.activation)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, T, E) -> (N, T, E)."""
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.mlp(self.norm_2(x))


class TextEncoder(nn.Module):
    """Texts to vectors of ``embedding_size``."""

    position_tensors = ("position_embedding.weight",)

    def __init__(self, c: CLIPConfig) -> None:
        super().__init__()
        self.config = c
        width = c.text_hidden_size
        self.token_embedding = nn.Embedding(c.vocab_size, width)
        self.position_embedding = nn.Embedding(c.max_seq_len, width)
        self.blocks = nn.ModuleList(
            Block(c, width, c.text_num_heads, c.text_intermediate_size or 0) for _ in range(c.text_num_layers)
        )
        self.norm = nn.LayerNorm(width, eps=c.norm_eps)
        self.head = nn.Linear(width, c.embedding_size, bias=c.text_head_bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(M, T) and (M, T) -> (M, D)."""
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(places)  # (M, T, E)
        mask = build_mask(length, length, padding=attention_mask, causal=self.config.causal, device=input_ids.device)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self._pool(self.norm(x), input_ids, attention_mask))

    def _pool(self, x: Tensor, ids: Tensor, padding: Tensor | None) -> Tensor:
        """Return the state of one token of each text, (M, T, E) -> (M, E)."""
        if self.config.text_pooling == "last":
            return pool(x, padding, "last")
        scores = ids if self.config.end_token_id is None else torch.eq(ids, self.config.end_token_id).long()  # (M, T)
        if padding is not None:
            scores = scores.masked_fill(padding == 0, -1)
        place = scores.argmax(-1)  # (M,), the first of equal ones
        return x.gather(1, place[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


class AttentionPooling(nn.Module):
    """A learned query that attends to all patches, and a feed-forward network (Zhai et al. 2022, section 3.4)."""

    def __init__(self, c: CLIPConfig) -> None:
        super().__init__()
        width = c.image_hidden_size
        self.query = nn.Parameter(torch.empty(1, 1, width))
        self.attention = MultiHeadAttention(width, c.image_num_heads)
        self.norm = nn.LayerNorm(width, eps=c.norm_eps)
        self.mlp = FeedForward(width, c.image_intermediate_size or 0, activation=c.activation)
        nn.init.normal_(self.query, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """(N, P, E) -> (N, E)."""
        query = self.query.expand(x.shape[0], -1, -1)  # (N, 1, E)
        pooled = self.attention(query, memory=self.attention.keys_values(x))  # (N, 1, E)
        return (pooled + self.mlp(self.norm(pooled))).squeeze(1)


class ImageEncoder(nn.Module):
    """Images to vectors of ``embedding_size``."""

    position_tensors = ("position_embedding.weight",)

    def __init__(self, c: CLIPConfig) -> None:
        super().__init__()
        width = c.image_hidden_size
        has_class = c.image_pooling == "class"
        self.patch = nn.Conv2d(c.num_channels, width, c.patch_size, stride=c.patch_size, bias=c.patch_bias)
        self.class_token = nn.Parameter(torch.empty(width)) if has_class else None
        self.position_embedding = nn.Embedding(c.num_image_tokens, width)
        self.pre_norm = nn.LayerNorm(width, eps=c.norm_eps) if c.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(c, width, c.image_num_heads, c.image_intermediate_size or 0) for _ in range(c.image_num_layers)
        )
        self.norm = nn.LayerNorm(width, eps=c.norm_eps)
        self.pooling = None if has_class else AttentionPooling(c)
        self.head = nn.Linear(width, c.embedding_size, bias=False) if c.image_head else nn.Identity()
        nn.init.normal_(self.patch.weight, std=INIT_STD)
        if self.patch.bias is not None:
            nn.init.zeros_(self.patch.bias)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=INIT_STD)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(N, C, S, S) -> (N, D)."""
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)  # (N, E, S / size, S / size) -> (N, P, E)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], 1, -1), x), dim=1)
        x = self.pre_norm(x + self.position_embedding.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]) if self.pooling is None else self.pooling(self.norm(x)))


class CLIP(nn.Module):
    """Both encoders, and the logits of pairs of an image and a text."""

    def __init__(self, c: CLIPConfig) -> None:
        super().__init__()
        self.config = c
        self.text = TextEncoder(c)
        self.image = ImageEncoder(c)
        initialize(self, "normal", std=INIT_STD)
        sigmoid = c.label_probabilities == "sigmoid"
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10) if sigmoid else -math.log(0.07)))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if c.logit_bias else None

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return vectors of length 1, (M, T) -> (M, D)."""
        return normalize(self.text(input_ids, attention_mask))

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Return vectors of length 1, (N, C, S, S) -> (N, D)."""
        return normalize(self.image(pixel_values))

    def compare(self, image_embeds: Tensor, text_embeds: Tensor) -> Tensor:
        """Return the logits of all pairs, exp(scale) x cosine + bias: (N, D) and (M, D) -> (N, M)."""
        logits = image_embeds @ text_embeds.T * self.logit_scale.exp()
        return logits if self.logit_bias is None else logits + self.logit_bias

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return ``logits_per_image`` (N, M), ``text_embeds`` (M, D) and ``image_embeds`` (N, D).

        Args:
            input_ids: (M, T).
            pixel_values: (N, C, S, S), normalised.
            attention_mask: (M, T), 1 for a token and 0 for padding.
        """
        texts, images = self.embed_texts(input_ids, attention_mask), self.embed_images(pixel_values)
        return {"logits_per_image": self.compare(images, texts), "text_embeds": texts, "image_embeds": images}

    def adapt_tensor(self, name: str, tensor: Tensor, old: CLIPConfig) -> Tensor | None:
        """Interpolate the positions of patches to another image size, and truncate those of texts."""
        if name == "text.position_embedding.weight":
            return truncate_positions(tensor, self.config.max_seq_len)
        if name != "image.position_embedding.weight" or old.image_pooling != self.config.image_pooling:
            return None
        special, grid = tensor.split((old.num_image_tokens - old.num_patches, old.num_patches))
        side = self.config.image_size // self.config.patch_size
        return torch.cat((special, resize_grid(grid[None], side)[0]))
