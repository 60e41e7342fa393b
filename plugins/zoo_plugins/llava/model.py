"""LLaVA: a decoder that reads the features of an image among the embeddings of a text (Liu et al. 2023, section 4.1).

The image encoder is that of CLIP, whose features are those of the patches after its last block but one; two dense
layers project them to the width of the decoder (Liu et al. 2024, section 3.2). Others have the encoder of SigLIP.

B batch, C channels, I image size, P positions of the image encoder, N features of an image, D width of the image
encoder, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import (
    ACTIVATIONS,
    Cache,
    FeedForward,
    MultiHeadAttention,
    initialize,
    insert_features,
    number_features,
    resize_grid,
)
from zoo_plugins.llama.model import Llama
from zoo_plugins.llava.config import LlavaConfig

INIT_STD = 0.02


class ImageBlock(nn.Module):
    """Attention and feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: LlavaConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(c.image_hidden_size, eps=c.image_norm_eps)
        self.attention = MultiHeadAttention(c.image_hidden_size, c.image_num_heads)
        self.norm_2 = nn.LayerNorm(c.image_hidden_size, eps=c.image_norm_eps)
        self.mlp = FeedForward(c.image_hidden_size, c.image_intermediate_size, activation=c.image_activation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, P, D) -> (B, P, D)."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ImageEncoder(nn.Module):
    """Images to the states of their patches after some blocks.

    Blocks after these and the last norm are without effect. They are kept, since checkpoints hold them.
    """

    position_tensors = ("position_embedding.weight",)

    def __init__(self, c: LlavaConfig) -> None:
        super().__init__()
        width = c.image_hidden_size
        self.feature_layers, self.drops_class = c.feature_layers, c.image_class_token and not c.image_class_feature
        self.patch = nn.Conv2d(c.num_channels, width, c.patch_size, stride=c.patch_size, bias=c.patch_bias)
        self.class_token = nn.Parameter(torch.empty(width)) if c.image_class_token else None
        self.position_embedding = nn.Embedding(c.num_image_tokens, width)
        self.pre_norm = nn.LayerNorm(width, eps=c.image_norm_eps) if c.image_pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(ImageBlock(c) for _ in range(c.image_num_layers))
        self.norm = nn.LayerNorm(width, eps=c.image_norm_eps)
        for part in (*self.blocks[max(c.feature_layers) :], self.norm):
            part.requires_grad_(False)
        nn.init.normal_(self.patch.weight, std=INIT_STD)
        if self.patch.bias is not None:
            nn.init.zeros_(self.patch.bias)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=INIT_STD)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, I, I) -> (B, N, D), or a multiple of D for several layers."""
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)  # (B, D, I / size, I / size) -> (B, patches, D)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], 1, -1), x), dim=1)
        x = self.pre_norm(x + self.position_embedding.weight)
        states = [x]
        for block in self.blocks[: max(self.feature_layers)]:
            states.append(block(states[-1]))
        features = torch.cat([states[layer] for layer in self.feature_layers], dim=-1)
        return features[:, 1:] if self.drops_class else features


class Projector(nn.Module):
    """Two dense layers from the features of an image to embeddings of the decoder."""

    def __init__(self, c: LlavaConfig) -> None:
        super().__init__()
        self.up = nn.Linear(c.image_hidden_size * len(c.image_feature_layers), c.hidden_size, bias=c.projector_bias)
        self.down = nn.Linear(c.hidden_size, c.hidden_size, bias=c.projector_bias)
        self.activation = ACTIVATIONS[c.projector_activation]

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, E)."""
        return self.down(self.activation(self.up(x)))


class Llava(Llama):
    """Image encoder, projector and decoder."""

    config: LlavaConfig

    def __init__(self, c: LlavaConfig) -> None:
        super().__init__(c)
        self.image, self.projector = ImageEncoder(c), Projector(c)
        initialize(self.image, "normal", std=INIT_STD)
        initialize(self.projector, "normal", std=INIT_STD)

    def encode_image(self, pixel_values: Tensor) -> Tensor:
        """Return the features of images, (B, C, I, I) -> (B, N, E)."""
        return self.projector(self.image(pixel_values))

    def embed_with_image(
        self, input_ids: Tensor, image_indices: Tensor, image_features: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return the embeddings of a text with an image, (B, T, E), zeros for padding.

        Args:
            input_ids: (B, T).
            image_indices: (B, T), 0 for a token of the text, n for the n-th feature of the row's image.
            image_features: (B, N, E), from :meth:`encode_image`; without effect where all indices are 0.
            attention_mask: (B, T), 1 for a token and 0 for padding.
        """
        return insert_features(self.embed(input_ids), image_indices, image_features, attention_mask)

    def decode_embeddings(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the next token, (B, T, V).

        Args:
            inputs_embeds: (B, T, E), from :meth:`embed_with_image`.
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: keys and values of earlier calls; extended in place.
        """
        return self.next_tokens(self.read(inputs_embeds, attention_mask, past_key_values))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        *,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token, (B, T, V).

        Args:
            input_ids: (B, T), with the token of an image in the place of each of its features.
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: keys and values of earlier calls; extended in place.
            pixel_values: (B, C, I, I), the image of each text; None for texts without images.
        """
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        if pixel_values is None:
            x = self.embed(input_ids)
        else:
            features = self.encode_image(pixel_values)
            indices = number_features(input_ids, self.config.image_token_id, features.shape[1], mask)
            x = self.embed_with_image(input_ids, indices, features, mask)
        return self.decode_embeddings(x, attention_mask, past_key_values)

    def adapt_tensor(self, name: str, tensor: Tensor, old: LlavaConfig) -> Tensor | None:
        """Interpolate the positions of patches to another image size."""
        if name != "image.position_embedding.weight" or old.image_class_token != self.config.image_class_token:
            return None
        special, grid = tensor.split((old.num_image_tokens - old.num_patches, old.num_patches))
        return torch.cat((special, resize_grid(grid[None], self.config.image_size // self.config.patch_size)[0]))
