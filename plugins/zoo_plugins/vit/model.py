"""ViT: a pre-norm Transformer encoder of image patches (Dosovitskiy et al. 2021).

DeiT (Touvron et al. 2021) adds a learned distillation token with its own position and classifier. DINOv2 (Oquab et al.
2023) scales the outputs of sub-layers by learned factors, and its classifier also reads the mean of the patches.

B batch, C channels, S image size, P patches, T tokens, E hidden size, L classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import FeedForward, GatedFeedForward, LayerScale, MultiHeadAttention, Rotation, initialize, resize_grid
from zoo_plugins.vit.config import ViTConfig

INIT_STD = 0.02


class PatchRotation(nn.Module):
    """Rotary positions in a square grid (Simeoni et al. 2025, section 3.2): half the pairs turn by the row, half by the
    column.

    A pair turns by 2 pi y f, with the centre y of its patch from -1 to 1 and f = theta^(-4i/D) for i < D / 4. Special
    tokens are not turned. Centres and frequencies are rounded to float32, as in training, and angles are of this
    precision at least.
    """

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.num_rows, self.num_special_tokens = c.num_rows, c.num_special_tokens
        exponents = torch.arange(0, 1, 4 / (c.hidden_size // c.num_heads), dtype=torch.float32, device="cpu")
        self.frequencies: tuple[float, ...] = tuple((1 / c.rope_theta**exponents).tolist())

    def forward(self, x: Tensor) -> Rotation:
        """Return cosines and sines, (1, 1, T, D) each, for tokens (B, T, E)."""
        count = self.num_rows
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=x.device)
        centres = 2 * (torch.arange(0.5, count, dtype=torch.float32, device=x.device) / count) - 1
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = 2 * math.pi * centres[:, None] * frequencies.to(wide)  # (rows, D / 4)
        sides = angles[:, None].expand(-1, count, -1), angles[None].expand(count, -1, -1)
        grid = torch.cat(sides, dim=-1).flatten(0, 1)  # (rows, rows, D / 2) -> (P, D / 2)
        grid = F.pad(grid, (0, 0, self.num_special_tokens, 0)).repeat(1, 2)[None, None]  # (1, 1, T, D)
        return grid.cos().to(x.dtype), grid.sin().to(x.dtype)


class ViTBlock(nn.Module):
    """Attention and feed-forward, each a pre-norm residual sub-layer."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.attention = MultiHeadAttention(
            c.hidden_size, c.num_heads, bias=c.attention_bias, output_bias=True, dropout=c.dropout
        )
        self.norm_2 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        width = c.intermediate_size or 0
        if c.gated:
            self.mlp: nn.Module = GatedFeedForward(c.hidden_size, width, activation=c.activation, bias=True)
        else:
            self.mlp = FeedForward(c.hidden_size, width, activation=c.activation)
        self.scale_1, self.scale_2 = (
            nn.Identity() if c.layer_scale is None else LayerScale(c.hidden_size, c.layer_scale) for _ in range(2)
        )
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = x + self.dropout(self.scale_1(self.attention(self.norm_1(x), rotation=rotation)))
        return x + self.dropout(self.scale_2(self.mlp(self.norm_2(x))))


class Embeddings(nn.Module):
    """Embeddings of special tokens and patches, plus learned positions (equation 1), and registers without any."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.patch = nn.Conv2d(c.num_channels, c.hidden_size, c.patch_size, stride=c.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, c.hidden_size))
        self.distillation_token = nn.Parameter(torch.empty(1, 1, c.hidden_size)) if c.distilled else None
        self.position = nn.Parameter(torch.empty(1, c.num_positions, c.hidden_size)) if c.num_positions else None
        self.position_tensors = ("position",) if c.num_positions else ()
        self.registers = nn.Parameter(torch.empty(1, c.num_registers, c.hidden_size)) if c.num_registers else None
        self.dropout = nn.Dropout(c.dropout)
        for name, parameter in self.named_parameters():
            if name == "patch.bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=INIT_STD, a=-2 * INIT_STD, b=2 * INIT_STD)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, T, E)."""
        patches = self.patch(pixel_values).flatten(2).transpose(1, 2)  # (B, E, S / size, S / size) -> (B, P, E)
        special = [token for token in (self.class_token, self.distillation_token) if token is not None]
        tokens = [token.expand(patches.shape[0], -1, -1) for token in special]  # (B, 1, E) each
        x = torch.cat((*tokens, patches), dim=1)
        x = x if self.position is None else x + self.position
        if self.registers is not None:
            x = torch.cat((x[:, :1], self.registers.expand(x.shape[0], -1, -1), x[:, 1:]), dim=1)
        return self.dropout(x)


class ViT(nn.Module):
    """The encoder, with classifiers or a pooler as configured."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.config = c
        self.embeddings = Embeddings(c)
        self.rotation = PatchRotation(c) if c.positions == "rotary" else None
        self.blocks = nn.ModuleList(ViTBlock(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        if c.task == "image-classification":
            self.head = nn.Linear((2 if c.reads_patches else 1) * c.hidden_size, c.num_classes)
        self.distillation_head = nn.Linear(c.hidden_size, c.num_classes) if c.distillation_head else None
        self.pooler = nn.Linear(c.hidden_size, c.hidden_size) if c.pooler else None
        initialize(self, "truncated_normal", std=INIT_STD)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name.

        Args:
            pixel_values: (B, C, S, S), normalised.
        """
        x = self.embeddings(pixel_values)
        rotation = None if self.rotation is None else self.rotation(x)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)  # (B, T, E)
        if self.config.task == "image-classification":
            read = x[:, 0]
            if self.config.reads_patches:
                read = torch.cat((read, x[:, self.config.num_special_tokens :].mean(1)), dim=-1)  # (B, 2 E)
            logits = self.head(read)  # (B, L)
            if self.distillation_head is not None:
                logits = (logits + self.distillation_head(x[:, 1])) / 2
            return {"logits": logits}
        return {"last_hidden_state": x} | ({"pooler_output": torch.tanh(self.pooler(x[:, 0]))} if self.pooler else {})

    def adapt_tensor(self, name: str, tensor: Tensor, old: ViTConfig) -> Tensor | None:
        """Interpolate the patches' positions to another image size, keeping those of the special tokens."""
        if name != "embeddings.position" or old.distilled != self.config.distilled:
            return None
        special, grid = tensor.split((old.num_positions - old.num_patches, old.num_patches), dim=1)
        return torch.cat((special, resize_grid(grid, self.config.num_rows)), dim=1)
