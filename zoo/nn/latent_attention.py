"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

B batch, T tokens of this call, S tokens including those before, H heads, E hidden size, L latent size, D size of the
part of a query or key without positions, R size of the rotated part, V size of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn.attention import scaled_dot_product_attention
from zoo.nn.cache import LayerCache
from zoo.nn.positions import Rotation, apply_rotary
from zoo.nn.recording import recorded_attentions

__all__ = ["LatentAttention"]


class LatentAttention(nn.Module):
    """Attention whose keys and values are projections of one vector c of L numbers per token (equations 9 to 19).

    Head i has the key [W_i^UK c, r], where the rotated part r is shared by all heads, and the value W_i^UV c. The cache
    holds c and r, which are L + R numbers per token in place of H (D + R + V).

    Without a cache, keys and values of all heads are computed. With one, that would repeat for every earlier token in
    each call; instead W^UK is multiplied into the queries and W^UV into the results, so that all heads attend to the
    same keys [c, r] and values c (section 2.1.2). Both are equal, apart from rounding.

    Args:
        hidden_size: E.
        num_heads: H.
        latent_size: L, of keys and values, the paper's d_c.
        query_latent_size: width of the vector from which the queries are projected, the paper's d_c'; by default they
            are projected from the input.
        head_dim: D.
        rotary_dim: R.
        value_head_dim: V.
        bias: whether the projections to latent vectors and the output projection have biases.
        scale: factor of the scores; 1 / sqrt(D + R) by default.
        interleaved: whether the rotated pairs are neighbours, see :func:`apply_rotary`.
        norm_eps: epsilon of the RMS norms of both latent vectors.
        dropout: on the attention weights, in training only.

    >>> attention = LatentAttention(64, 4, latent_size=24, head_dim=16, rotary_dim=8, value_head_dim=12)
    >>> x, cache = torch.randn(3, 7, 64), LayerCache()
    >>> attention(x, cache=cache).shape
    torch.Size([3, 7, 64])
    >>> cache.key.shape, cache.value.shape  # c and r
    (torch.Size([3, 1, 7, 24]), torch.Size([3, 1, 7, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        latent_size: int,
        query_latent_size: int | None = None,
        head_dim: int,
        rotary_dim: int,
        value_head_dim: int,
        bias: bool = False,
        scale: float | None = None,
        interleaved: bool = True,
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.sizes = head_dim, rotary_dim, value_head_dim
        self.scale = (head_dim + rotary_dim) ** -0.5 if scale is None else scale
        self.interleaved = interleaved
        self.dropout = dropout
        queries = num_heads * (head_dim + rotary_dim)
        if query_latent_size is None:
            self.query = nn.Linear(hidden_size, queries, bias=False)
        else:
            self.query_down = nn.Linear(hidden_size, query_latent_size, bias=bias)
            self.query_norm = nn.RMSNorm(query_latent_size, eps=norm_eps)
            self.query = nn.Linear(query_latent_size, queries, bias=False)
        self.has_query_latent = query_latent_size is not None
        self.down = nn.Linear(hidden_size, latent_size + rotary_dim, bias=bias)
        self.norm = nn.RMSNorm(latent_size, eps=norm_eps)
        self.up = _Expansion(latent_size, num_heads * (head_dim + value_head_dim), bias=False)
        self.output = nn.Linear(num_heads * value_head_dim, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from ``x`` (B, T, E) to itself and to the tokens before it.

        Args:
            x: (B, T, E).
            mask: as of :func:`scaled_dot_product_attention`.
            rotation: from :class:`RotaryPositions`, over R elements.
            cache: the latent vectors and rotated parts of the tokens before ``x``, (B, 1, S - T, L) as keys and
                (B, 1, S - T, R) as values. Those of ``x`` are appended.

        Returns:
            (B, T, E).
        """
        head_dim, rotary_dim, value_head_dim = self.sizes
        query = self.query(self.query_norm(self.query_down(x)) if self.has_query_latent else x)
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, H (D + R)) -> (B, H, T, D + R)
        query, turned_query = query.split((head_dim, rotary_dim), dim=-1)
        latent, turned = self.down(x).unsqueeze(1).split((self.norm.weight.shape[0], rotary_dim), dim=-1)
        latent = self.norm(latent)  # (B, 1, T, L)
        if rotation is not None:
            turned_query = apply_rotary(turned_query, rotation, interleaved=self.interleaved)
            turned = apply_rotary(turned, rotation, interleaved=self.interleaved)  # (B, 1, T, R)
        to_keys, to_values = self.up.weight.unflatten(0, (self.num_heads, -1)).split((head_dim, value_head_dim), dim=1)
        if cache is None:
            expanded = self.up(latent.squeeze(1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            key, value = expanded.split((head_dim, value_head_dim), dim=-1)  # (B, H, S, D), (B, H, S, V)
            key = torch.cat((key, turned.expand(-1, self.num_heads, -1, -1)), dim=-1)
        else:
            latent, turned = cache.extend(latent, turned)
            query = query @ to_keys  # (B, H, T, D) (H, D, L) -> (B, H, T, L)
            key, value = torch.cat((latent, turned), dim=-1), latent  # (B, 1, S, L + R), (B, 1, S, L)
        heads = scaled_dot_product_attention(
            torch.cat((query, turned_query), dim=-1),
            key,
            value,
            mask=mask,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
        )
        if cache is not None:
            heads = heads @ to_values.transpose(1, 2)  # (B, H, T, L) (H, L, V) -> (B, H, T, V)
        return self.output(heads.transpose(1, 2).flatten(2))

    def with_weights(
        self, x: Tensor, *, mask: Tensor | None = None, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of :meth:`forward` and its attention weights (B, H, T, S)."""
        with recorded_attentions() as weights:
            output = self(x, mask=mask, rotation=rotation)
        return output, weights[0]


class _Expansion(nn.Linear):
    """W^UK and W^UV of all heads. Its weight is also used by itself, so adapters, which replace dense layers, do not
    apply: they look for ``nn.Linear`` itself.
    """
