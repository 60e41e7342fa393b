"""State-space layers: a causal convolution with a state, and the recurrence of Mamba-2.

B batch, T tokens of this call, H heads, P head size, G groups of heads, R heads per group, N state size, K kernel size,
D channels, C tokens per chunk, M chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.cache import LayerStates

__all__ = ["CausalConvolution", "GatedRMSNorm", "segment_sums", "state_space"]

_CHUNK = 32
"""Tokens per chunk. The work within chunks grows with it, and the work between chunks with T / C."""


class CausalConvolution(nn.Module):
    """A convolution of each channel with its own filter over the last K tokens.

    Between calls, it keeps its last K - 1 inputs as the state ``convolution``, (B, D, K - 1).

    Args:
        channels: D.
        kernel_size: K, at least 2.
        bias: whether each channel has a bias.
    """

    def __init__(self, channels: int, kernel_size: int, *, bias: bool = True) -> None:
        super().__init__()
        if kernel_size < 2:
            raise ValueError(f"a causal convolution needs a kernel_size of 2 or more, got {kernel_size}")
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)

    def forward(self, x: Tensor, states: LayerStates | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). The state is replaced."""
        channels, _, size = self.weight.shape
        before = states.get("convolution") if states is not None else None
        if before is None:
            before = x.new_zeros(x.shape[0], channels, size - 1)
        x = torch.cat((before, x.transpose(1, 2)), 2)
        if states is not None:
            states["convolution"] = x[:, :, 1 - size :]
        return F.conv1d(x, self.weight, self.bias, groups=channels).transpose(1, 2)


class GatedRMSNorm(nn.Module):
    """RMSNorm of x silu(gate) over each group of channels, with a weight for each channel (Dao and Gu 2024, section 7).

    Computed in float32 for narrower dtypes.

    Args:
        hidden_size: D.
        num_groups: number of groups, each with D / ``num_groups`` channels.
        eps: added to the mean of squares.
    """

    def __init__(self, hidden_size: int, *, num_groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(..., D) and (..., D) -> (..., D)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.to(wide) * F.silu(gate.to(wide))
        if self.num_groups > 1:
            y = y.unflatten(-1, (self.num_groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.num_groups > 1:
            y = y.flatten(-2)
        return self.weight * y.to(x.dtype)


def segment_sums(x: Tensor) -> Tensor:
    """Sum x over the positions after s and up to t, for all pairs: (..., C) -> (..., C, C) at [t, s].

    It is -inf for s > t. The sums are accumulated, not subtracted from each other, so that short ones are exact
    (Dao and Gu 2024, listing 1).

    >>> segment_sums(torch.tensor([1.0, 2.0, 4.0])).tolist()
    [[0.0, -inf, -inf], [2.0, 0.0, -inf], [6.0, 4.0, 0.0]]
    """
    places = torch.arange(x.shape[-1], device=x.device)
    before, until = places.unsqueeze(0) < places.unsqueeze(1), places.unsqueeze(0) <= places.unsqueeze(1)
    sums = (x.unsqueeze(-1) * before.to(x.dtype)).cumsum(-2)
    return sums.masked_fill(~until, float("-inf"))


def state_space(x: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute S_t = exp(decay_t) S_{t-1} + key_t x_t^T and y_t = S_t^T query_t (Dao and Gu 2024, equation 1).

    All tokens but the last are processed in chunks, as in attention within a chunk and through the states between
    chunks (section 6), and the last one by the recurrence: a call on one token has no chunks.

    Args:
        x: (B, T, H, P), the inputs, already multiplied by their step sizes.
        decay: (B, T, H), not positive.
        key: (B, T, G, N), the paper's B. Each group of H / G heads shares one.
        query: (B, T, G, N), the paper's C.
        state: (B, H, N, P), the state before the first token.

    Returns:
        y, (B, T, H, P), and the state after the last token, (B, H, N, P).
    """
    groups = key.shape[2]
    x, decay = (part.unflatten(2, (groups, x.shape[2] // groups)) for part in (x, decay))  # (B, T, G, R, ...)
    state = state.unflatten(1, (groups, -1))  # (B, G, R, N, P)
    earlier, state = _in_chunks(x[:, :-1], decay[:, :-1], key[:, :-1], query[:, :-1], state)
    x, decay, key, query = x[:, -1], decay[:, -1], key[:, -1], query[:, -1]
    state = state * decay.exp()[..., None, None] + key[:, :, None, :, None] * x.unsqueeze(-2)
    last = (query[:, :, None, None] @ state).squeeze(-2)  # (B, G, R, P)
    return torch.cat((earlier, last.flatten(1, 2).unsqueeze(1)), 1), state.flatten(1, 2)


def _in_chunks(x: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process any number of tokens: (B, T, G, R, P), (B, T, G, R), twice (B, T, G, N), (B, G, R, N, P)."""
    length = x.shape[1]
    count = (length + _CHUNK - 1) // _CHUNK
    missing = count * _CHUNK - length  # added steps of zeros leave the state as it is

    def chunks(part: Tensor) -> Tensor:
        """(B, T, A, ...) -> (B, A, ..., M, C), for T a multiple of C."""
        part = torch.cat((part, part.new_zeros(part.shape[0], missing, *part.shape[2:])), 1)
        return part.unflatten(1, (count, _CHUNK)).movedim((1, 2), (-2, -1))

    key, query = (chunks(part).movedim(2, -1).unsqueeze(2) for part in (key, query))  # (B, G, 1, M, C, N)
    x, decay = chunks(x).movedim(3, -1), chunks(decay)  # (B, G, R, M, C, P) and (B, G, R, M, C)
    within = segment_sums(decay).exp()  # (B, G, R, M, C, C)
    y = ((query @ key.transpose(-2, -1)) * within) @ x
    added = key.transpose(-2, -1) @ (x * within[..., -1, :].unsqueeze(-1))  # (B, G, R, M, N, P), at a chunk's end
    states = torch.cat((state.unsqueeze(3), added), 3)
    sums = torch.cat((torch.zeros_like(state[..., :1, 0]), decay.sum(-1)), -1)
    between = segment_sums(sums).exp()  # (B, G, R, 1 + M, 1 + M)
    states = (between @ states.flatten(-2)).unflatten(-1, state.shape[-2:])
    passed = decay.cumsum(-1).exp().unsqueeze(-1)  # of the state before a chunk
    y = y + (query @ states[:, :, :, :-1]) * passed
    return y.flatten(1, 2).movedim(1, 3).flatten(1, 2)[:, :length], states[:, :, :, -1]
