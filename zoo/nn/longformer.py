"""Longformer: sliding-window attention with a few global tokens (Beltagy et al. 2020).

B batch, T tokens, H heads, D head size, E hidden size, R reach (half the window), C chunks of R
tokens, G global tokens, which see all tokens and are seen by all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.attention import scaled_dot_product_attention
from zoo.nn.encoder_attention import EncoderAttention
from zoo.nn.recording import mix_values

__all__ = ["LongformerAttention"]


class LongformerAttention(EncoderAttention):
    """Token i sees token j where ``|i - j| <= window / 2``, or where either is one of the first G: O(T window).

    As queries, the first G tokens use their own projections (section 3.1 of the paper); as keys for other tokens they
    use the common ones. Scores are computed in chunks, R queries against the 3 R keys around them; inputs are padded to
    whole chunks.

    Args:
        hidden_size: E.
        num_heads: H.
        window: 2 R, even.
        global_tokens: G, from 0 to R. With 0 there are no global projections.
        dropout: on the attention weights, in training only.

    Raises:
        ValueError: when E is not divisible by H, the window is not even and positive, or G is not in 0 ... R.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, window: int, *, global_tokens: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__(hidden_size, num_heads, dropout=dropout)
        if window < 2 or window % 2:
            raise ValueError(f"window must be even and positive, got {window}")
        if not 0 <= global_tokens <= window // 2:
            raise ValueError(f"global_tokens {global_tokens} lies outside 0 ... half of window {window}")
        self.reach = window // 2
        self.global_tokens = global_tokens
        if global_tokens:
            self.global_query = nn.Linear(hidden_size, hidden_size)
            self.global_key = nn.Linear(hidden_size, hidden_size)
            self.global_value = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, T, E) -> (B, T, E). ``mask`` is (B, T), non-zero for a token and zero for padding."""
        length, reach = x.shape[1], self.reach
        # At least two chunks: exporters specialise on a dimension of size 1.
        missing = torch.sym_max((length + reach - 1) // reach, 2) * reach - length
        tokens = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask.bool()
        padded, padded_tokens = F.pad(x, (0, 0, 0, missing)), F.pad(tokens, (0, missing))  # (B, C R, E) and (B, C R)
        query, key = self._split(self.query(padded)), self._split(self.key(padded))  # (B, H, C R, D)

        def mix(value: Tensor, global_value: Tensor | None = None) -> Tensor:
            """(B, H, T, D) and (B, H, T, D) -> (B, H, T, D)."""
            mixed = self._look_around(query, key, F.pad(value, (0, 0, 0, missing)), padded_tokens)
            if global_value is not None:
                few = self._see_all(padded[:, : self.global_tokens], x, global_value, tokens)  # (B, H, G, D)
                mixed = torch.cat((few, mixed[:, :, self.global_tokens :]), dim=2)
            return mixed[:, :, :length]

        values = [self._split(part(x)) for part in (self.value, *([self.global_value] if self.global_tokens else []))]
        return self._merge(mix_values(mix, *values))

    def _look_around(self, query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
        """Attend to the window and the global tokens: query, key and value (B, H, C R, D) -> (B, H, C R, D)."""
        count = self.global_tokens
        local = tokens & (torch.arange(tokens.shape[1], device=tokens.device) >= count)  # count no key twice
        seen = self._around(local[:, None, :, None]).transpose(-2, -1) & self._band(query.device)  # (B, 1, C, R, 3 R)
        query = self._chunk(query) * query.shape[-1] ** -0.5  # (B, H, C, R, D)
        scores = query @ self._around(key).transpose(-2, -1)  # (B, H, C, R, 3 R)
        # Only queries at padding may see no key; their weights are then arbitrary but finite.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~seen, lowest)
        if count:
            few = query @ key[:, :, None, :count].transpose(-2, -1)  # (B, H, C, R, G)
            scores = torch.cat((few.masked_fill(~tokens[:, None, None, None, :count], lowest), scores), dim=-1)
        weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
        mixed = weights[..., count:] @ self._around(value)
        if count:
            mixed = mixed + weights[..., :count] @ value[:, :, None, :count]
        return mixed.flatten(2, 3)

    def _see_all(self, first: Tensor, x: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
        """Attend from the global tokens (B, G, E) to all of ``x`` (B, T, E), with values (B, H, T, D): (B, H, G, D)."""
        query, key = self._split(self.global_query(first)), self._split(self.global_key(x))
        mask = tokens[:, None, None].expand(-1, -1, self.global_tokens, -1)  # (B, 1, G, T)
        dropout = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, mask=mask, dropout=dropout)

    def _chunk(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.reach))  # (B, H, C R, D) -> (B, H, C, R, D)

    def _around(self, x: Tensor) -> Tensor:
        """Join each chunk with the previous and the next: (B, H, C R, D) -> (B, H, C, 3 R, D)."""
        chunks = self._chunk(F.pad(x, (0, 0, self.reach, self.reach)))  # (B, H, C + 2, R, D)
        return torch.cat((chunks[:, :, :-2], chunks[:, :, 1:-1], chunks[:, :, 2:]), dim=3)

    def _band(self, device: torch.device) -> Tensor:
        """Boolean mask, (R, 3 R), of the keys around a chunk that lie within R of each of its queries."""
        query = torch.arange(self.reach, 2 * self.reach, device=device).unsqueeze(1)
        return (torch.arange(3 * self.reach, device=device) - query).abs() <= self.reach
