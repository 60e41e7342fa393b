"""Attention in windows of a map, and the halving of maps between stages (Liu et al. 2021, Swin Transformer).

B batch, Y and X height and width of a map, E hidden size, H heads, D head size, w window size, N windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.attention import scaled_dot_product_attention
from zoo.nn.pooling import normalize

__all__ = ["ContinuousOffsetBias", "OffsetBias", "PatchMerging", "WindowAttention"]

_STEEPEST = 100.0
"""Largest factor of a cosine."""
_SPREAD = 8.0
"""Scaled distance of the farthest position of a window."""
_HIGHEST = 16.0
"""Limit of a continuous bias."""


class OffsetBias(nn.Module):
    """A learned bias for each head and each offset of a query from a key in a window (Liu et al. 2021, section 3.2).

    The offset (y, x) has the row (y + w - 1) (2 w - 1) + x + w - 1 of ``table``, ((2 w - 1)^2, H).

    Args:
        num_heads: H.
        window: w, at least 1.
        std: standard deviation of the initial biases.
    """

    def __init__(self, num_heads: int, window: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.table, std=std, a=-2 * std, b=2 * std)

    def forward(self) -> Tensor:
        """Return the bias, (1, H, w w, w w), of positions row by row."""
        return _by_offset(self.table, self.window)


class ContinuousOffsetBias(nn.Module):
    """The bias of :class:`OffsetBias` as a function of the offset (Liu et al. 2022, Swin Transformer V2, section 3.3).

    It is 16 sigmoid(W_2 relu(W_1 (f(y), f(x)) + b_1)), where f(d) = sign(d) log2(1 + 8 abs(d) / (v - 1)) / 3 (equation
    4, scaled as in the published code). Values of f are rounded to float32, as in training.

    Args:
        num_heads: H.
        window: w.
        pretrained_window: v, the window for which distances were scaled in training; w by default.
        hidden_size: the number of rows of W_1.

    Raises:
        ValueError: ``pretrained_window`` is 1, which leaves no distance to scale.
    """

    def __init__(
        self, num_heads: int, window: int, *, pretrained_window: int | None = None, hidden_size: int = 512
    ) -> None:
        super().__init__()
        if pretrained_window is not None and pretrained_window < 2:
            raise ValueError(f"pretrained_window must be 2 or more, got {pretrained_window}")
        self.window = window
        self.up = nn.Linear(2, hidden_size)
        self.down = nn.Linear(hidden_size, num_heads, bias=False)
        farthest = max((pretrained_window or window) - 1, 1)
        distances = torch.arange(1 - window, window, dtype=torch.float32, device="cpu") / farthest * _SPREAD
        scaled = distances.sign() * (distances.abs() + 1).log2() / math.log2(_SPREAD)
        self.coordinates: tuple[float, ...] = tuple(scaled.tolist())

    def forward(self) -> Tensor:
        """Return the bias, (1, H, w w, w w), of positions row by row."""
        line = torch.tensor(self.coordinates, dtype=self.up.weight.dtype, device=self.up.weight.device)
        count = len(self.coordinates)
        grid = torch.stack((line[:, None].expand(-1, count), line[None].expand(count, -1)), dim=-1).flatten(0, 1)
        table = self.down(F.relu(self.up(grid)))  # ((2 w - 1)^2, 2) -> ((2 w - 1)^2, H)
        return _HIGHEST * torch.sigmoid(_by_offset(table, self.window))


def _by_offset(table: Tensor, window: int) -> Tensor:
    """Look up a table of offsets, ((2 w - 1)^2, H) -> (1, H, w w, w w)."""
    places = torch.arange(window, device=table.device)
    offsets = places[:, None] - places + window - 1  # (w, w), of a query and a key along one axis
    rows = offsets[:, None, :, None] * (2 * window - 1) + offsets[None, :, None, :]  # (w, w, w, w)
    return table.T.index_select(1, rows.flatten()).unflatten(1, (window**2, window**2)).unsqueeze(0)


class WindowAttention(nn.Module):
    """Attention of each position of a map to those of its window: O(Y X w w) instead of O((Y X)^2).

    In each window, softmax(Q K^T / sqrt(D) + bias) V (Liu et al. 2021, equation 4). With a ``shift``, windows start at
    (shift - w, shift - w), and those that cross a border are divided there: the map is rolled, so that the parts share
    windows with others, which they do not see (section 3.2, figure 4). Maps whose sides are no multiples of w are
    padded with zeros on the right and at the bottom, before the projections, and padding is seen like any position.

    With ``cosine``, scores are min(s, 100) cos(q, k) + bias, with a learned s for each head (Liu et al. 2022, equation
    2, with 1 / tau written as s).

    Inside :func:`recorded_attentions`, the heads of each window count as heads: weights are (B, N H, w w, w w), of
    windows row by row, each with its heads.

    Args:
        hidden_size: E.
        num_heads: H.
        window: w.
        shift: from 0 to w - 1.
        positions: module that returns the bias, (1, H, w w, w w); :class:`OffsetBias` by default.
        bias: whether the query, key and value projections have biases: one boolean, or one for each of the three. The
            output projection always has one.
        cosine: whether scores are cosines.
        dropout: on the attention weights, in training only.

    Raises:
        ValueError: E is not divisible by H, or ``shift`` is not in 0 ... w - 1.

    >>> attention = WindowAttention(16, num_heads=2, window=4, shift=2)
    >>> attention(torch.randn(3, 8, 6, 16)).shape
    torch.Size([3, 8, 6, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        window: int,
        *,
        shift: int = 0,
        positions: nn.Module | None = None,
        bias: bool | Sequence[bool] = True,
        cosine: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}")
        if not 0 <= shift < window:
            raise ValueError(f"shift {shift} lies outside 0 ... {window - 1}, for a window of {window}")
        self.num_heads = num_heads
        self.window = window
        self.shift = shift
        self.dropout = dropout
        query_bias, key_bias, value_bias = (bias,) * 3 if isinstance(bias, bool) else bias
        self.query = nn.Linear(hidden_size, hidden_size, bias=query_bias)
        self.key = nn.Linear(hidden_size, hidden_size, bias=key_bias)
        self.value = nn.Linear(hidden_size, hidden_size, bias=value_bias)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.positions = OffsetBias(num_heads, window) if positions is None else positions
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10))) if cosine else None
        """The logarithm of s."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, Y, X, E) -> (B, Y, X, E)."""
        height, width = x.shape[1:3]
        below, right = -height % self.window, -width % self.window
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        rows, columns = x.shape[1] // self.window, x.shape[2] // self.window
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        scale = None
        if self.log_scale is not None:
            factor = self.log_scale.clamp(max=math.log(_STEEPEST)).exp()  # (H, 1, 1)
            query, key, scale = normalize(query) * factor.repeat(rows * columns, 1, 1), normalize(key), 1.0
        heads = scaled_dot_product_attention(
            query,
            key,
            value,
            mask=self._seen(rows, columns, x.device) if self.shift else None,
            bias=self.positions().expand(rows * columns, -1, -1, -1).flatten(0, 1).unsqueeze(0),
            scale=scale,
            dropout=self.dropout if self.training else 0.0,
        )
        x = self._merge(heads, rows, columns)
        if self.shift:
            x = x.roll((self.shift, self.shift), (1, 2))
        return self.output(x[:, :height, :width] if below or right else x)

    def _split(self, x: Tensor) -> Tensor:
        """(B, Y, X, H D) -> (B, N H, w w, D)."""
        x = x.unflatten(3, (self.num_heads, -1)).unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))
        return x.permute(0, 1, 3, 5, 2, 4, 6).flatten(1, 3).flatten(2, 3)  # (B, Y/w, w, X/w, w, H, D) before

    def _merge(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """(B, N H, w w, D) -> (B, Y, X, H D)."""
        x = x.unflatten(2, (self.window, self.window)).unflatten(1, (rows, columns, self.num_heads))
        return x.permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)

    def _seen(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return a mask, (1, N H, w w, w w), True where query and key lie on the same side of the map's border."""
        sides = []  # (Y/w, w, w) and (X/w, w, w), of windows, queries and keys along one axis
        for count in (rows, columns):
            places = torch.arange(count * self.window, device=device)
            rolled = (places >= count * self.window - self.shift).unflatten(0, (-1, self.window))
            sides.append(rolled[:, :, None] == rolled[:, None])
        seen = sides[0][:, None, :, None, :, None] & sides[1][None, :, None, :, None, :]
        return seen.flatten(4, 5).flatten(2, 3).flatten(0, 1).repeat_interleave(self.num_heads, 0).unsqueeze(0)


class PatchMerging(nn.Module):
    """Each 2 x 2 positions become one, with a norm and a dense layer without bias (Liu et al. 2021, section 3.1).

    A map with an odd side is padded with zeros on the right or at the bottom.

    Args:
        hidden_size: E.
        output_size: width of the result.
        norm_first: whether the norm is before the dense layer, or after it as in Swin Transformer V2.
    """

    def __init__(self, hidden_size: int, output_size: int, *, norm_first: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * hidden_size if norm_first else output_size)
        self.reduction = nn.Linear(4 * hidden_size, output_size, bias=False)
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        """(B, Y, X, E) -> (B, Y / 2, X / 2, output size), rounded up."""
        below, right = x.shape[1] % 2, x.shape[2] % 2
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, Y / 2, 2, X / 2, 2, E)
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)  # the upper left position, then lower left, upper right, lower right
        return self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x))
