"""GPT-NeoX: the causal decoder of Black et al. 2022 (section 2.1), and those that differ from it in settings.

Attention and the feed-forward network of a block read the same residual stream, and both are added to it (Wang and
Komatsuzaki 2021, GPT-J). Norms are LayerNorm, and a part of each head is rotated. BLOOM (BigScience Workshop 2022) and
MPT (MosaicML 2023) have biases of scores by distance instead; Nemotron (Parmar et al. 2024) adds 1 to the weights of
norms.

B batch, H heads, T tokens of this call, S tokens including those before, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from zoo.nn import FeedForward, LayerCache, LinearBiases, OffsetLayerNorm, Rotation
from zoo_plugins.llama.model import Llama, LlamaBlock
from zoo_plugins.neox.config import NeoXConfig


class NeoXBlock(LlamaBlock):
    """Attention and feed-forward, side by side or in turn, each normalised before and added."""

    def __init__(self, c: Any, layer: int) -> None:
        super().__init__(c, layer)
        self.parallel = c.parallel
        self.shared_norm = c.shared_norm
        if c.shared_norm:
            self.norm_2 = nn.Identity()
        self.dropout = nn.Dropout(c.residual_dropout)

    @staticmethod
    def norm_of(c: Any) -> Callable[[int], nn.Module]:
        """Return the constructor of the configured norm, given a width."""
        if c.norm == "rms":
            return LlamaBlock.norm_of(c)
        return partial(OffsetLayerNorm if c.norm_offset else nn.LayerNorm, eps=c.norm_eps, bias=c.norm_bias)

    def build_mlp(self, c: Any, layer: int) -> nn.Module:
        """Return the feed-forward network of a layer."""
        if c.gated:
            return super().build_mlp(c, layer)
        return FeedForward(c.hidden_size, c.intermediate_size, activation=c.activation, bias=c.mlp_bias)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        cache: LayerCache | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(B, T, E) -> (B, T, E). ``bias`` is added to the scores of attention."""
        normed = self.norm_1(x)
        attended = x + self.dropout(self.attention(normed, rotation=rotation, mask=mask, bias=bias, cache=cache))
        if not self.shared_norm:
            normed = self.norm_2(x if self.parallel else attended)
        return attended + self.dropout(self.mlp(normed))


class NeoX(Llama):
    """Token embeddings, blocks, a final norm and the head."""

    block = NeoXBlock
    config: NeoXConfig

    def __init__(self, c: NeoXConfig) -> None:
        super().__init__(c)
        self.embedding_norm = NeoXBlock.norm_of(c)(c.hidden_size) if c.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(c.residual_dropout)
        self.biases = LinearBiases(c.num_heads) if c.positions == "alibi" else None

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, E)."""
        return self.dropout(self.embedding_norm(super().embed(input_ids)))

    def score_bias(self, total: int, x: Tensor) -> Tensor | None:
        """Return what is added to the scores of keys at ``total`` positions, (1, H, 1, S) in the dtype of ``x``."""
        return None if self.biases is None else self.biases(total, x)
