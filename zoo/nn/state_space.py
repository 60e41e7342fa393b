"""State-space layers: the sequence layer of Mamba-2 and its norm.

B batch, T tokens of this call, H heads, P head size, G groups of heads, R heads per group, N state size, K kernel size,
D channels, C tokens per chunk, M chunks, E hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config import Activation
from zoo.nn.cache import LayerStates
from zoo.nn.convolution import CausalConvolution
from zoo.nn.feed_forward import ACTIVATIONS

__all__ = ["GatedRMSNorm", "StateSpaceMixer", "segment_sums", "state_space"]

_STEPS = (1e-3, 1e-1)
"""Range of initial step sizes."""


class GatedRMSNorm(nn.Module):
    """RMSNorm of x silu(gate) over each group of channels, with a weight for each channel (Dao and Gu 2024, section 7).

    If not ``gate_first``, RMSNorm(x) silu(gate), as in Gated DeltaNet (Yang et al. 2024, section 3.4).

    Computed in float32 for narrower dtypes.

    Args:
        hidden_size: D.
        num_groups: number of groups, each with D / ``num_groups`` channels.
        eps: added to the mean of squares.
        gate_first: whether the gate is applied before the norm.
    """

    def __init__(self, hidden_size: int, *, num_groups: int = 1, eps: float = 1e-5, gate_first: bool = True) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.eps = eps
        self.gate_first = gate_first
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(..., D) and (..., D) -> (..., D)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = F.silu(gate.to(wide))
        y = x.to(wide)
        if self.gate_first:
            y = y * gate
        if self.num_groups > 1:
            y = y.unflatten(-1, (self.num_groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.num_groups > 1:
            y = y.flatten(-2)
        y = self.weight * y.to(x.dtype)
        return y if self.gate_first else (y * gate).to(x.dtype)


class StateSpaceMixer(nn.Module):
    """The sequence layer of Mamba-2 (Dao and Gu 2024, section 7): projection, convolution, recurrence, gated norm.

    Between calls, it keeps the states ``convolution``, (B, D, K - 1) with D = H P + 2 G N, and ``recurrence``,
    (B, H, N, P). In narrower dtypes, it computes decays and the recurrence in float32.

    Args:
        hidden_size: E.
        width: H P, the width of all heads.
        head_dim: P.
        state_size: N.
        num_groups: G.
        kernel_size: K.
        activation: the activation after the convolution. The gate's is SiLU.
        bias: whether the projections have biases.
        convolution_bias: whether the convolution has a bias.
        steps: the smallest and the largest step size; None for no limit.
        eps: added to the mean of squares in the norm.
        chunk_size: C, at most half of the longest text: the number of chunks is traced as a constant if it is always 1.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        *,
        head_dim: int,
        state_size: int,
        num_groups: int = 1,
        kernel_size: int = 4,
        activation: Activation = "silu",
        bias: bool = False,
        convolution_bias: bool = True,
        steps: tuple[float, float | None] = (0.0, None),
        eps: float = 1e-5,
        chunk_size: int = 32,
    ) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.width = width
        self.head_dim = head_dim
        self.state_size = state_size
        self.num_groups = num_groups
        self.num_heads = width // head_dim
        self.steps = steps
        self.activation = ACTIVATIONS[activation]
        channels = width + 2 * num_groups * state_size
        self.input = nn.Linear(hidden_size, width + channels + self.num_heads, bias=bias)
        self.convolution = CausalConvolution(channels, kernel_size, bias=convolution_bias)
        self.step_bias = nn.Parameter(torch.empty(self.num_heads))
        self.log_decay = nn.Parameter(torch.empty(self.num_heads))
        self.skip = nn.Parameter(torch.ones(self.num_heads))
        self.norm = GatedRMSNorm(width, num_groups=num_groups, eps=eps)
        self.output = nn.Linear(width, hidden_size, bias=bias)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw step sizes that are uniform in their logarithm, and set the decays to 1, 2, ... H."""
        low, high = map(math.log, _STEPS)
        steps = (low + (high - low) * torch.rand(self.num_heads, device=self.step_bias.device)).exp()
        self.step_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
        self.log_decay.copy_(torch.arange(1, self.num_heads + 1, device=self.log_decay.device).log())

    def forward(self, x: Tensor, tokens: Tensor | None = None, states: LayerStates | None = None) -> Tensor:
        """(B, T, E), and (B, T), 1 for a token and 0 for padding on the left -> (B, T, E). The states are replaced."""
        shared = self.num_groups * self.state_size
        gate, x, steps = self.input(x).split((self.width, self.width + 2 * shared, self.num_heads), -1)
        mask = None if tokens is None else tokens.unsqueeze(-1).to(x.dtype)
        x = self.activation(self.convolution(x if mask is None else x * mask, states))
        x, key, query = (x if mask is None else x * mask).split((self.width, shared, shared), -1)
        wide = torch.promote_types(x.dtype, torch.float32)  # errors of decays accumulate over all tokens
        steps = F.softplus(steps.to(wide) + self.step_bias.to(wide)).clamp(*self.steps)  # (B, T, H)
        heads = x.to(wide).unflatten(-1, (self.num_heads, self.head_dim))  # (B, T, H, P)
        key, query = (part.to(wide).unflatten(-1, (self.num_groups, self.state_size)) for part in (key, query))
        before = states.get("recurrence") if states is not None else None
        if before is None:
            before = x.new_zeros(x.shape[0], self.num_heads, self.state_size, self.head_dim)
        decay = -self.log_decay.to(wide).exp() * steps
        y, after = state_space(heads * steps.unsqueeze(-1), decay, key, query, before.to(wide), self.chunk_size)
        if states is not None:
            states["recurrence"] = after.to(x.dtype)
        y = (y + self.skip.to(wide).unsqueeze(-1) * heads).flatten(2)
        return self.output(self.norm(y.to(x.dtype), gate))


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


def state_space(
    x: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor, chunk_size: int = 32
) -> tuple[Tensor, Tensor]:
    """Compute S_t = exp(decay_t) S_{t-1} + key_t x_t^T and y_t = S_t^T query_t (Dao and Gu 2024, equation 1).

    All tokens but the last are processed in chunks, as in attention within a chunk and through the states between
    chunks (section 6), and the last one by the recurrence: a call on one token has no chunks.

    Args:
        x: (B, T, H, P), the inputs, already multiplied by their step sizes.
        decay: (B, T, H), not positive.
        key: (B, T, G, N), the paper's B. Each group of H / G heads shares one.
        query: (B, T, G, N), the paper's C.
        state: (B, H, N, P), the state before the first token.
        chunk_size: C. The work within chunks grows with it, and the work between chunks with T / C.

    Returns:
        y, (B, T, H, P), and the state after the last token, (B, H, N, P).
    """
    groups = key.shape[2]
    x, decay = (part.unflatten(2, (groups, x.shape[2] // groups)) for part in (x, decay))  # (B, T, G, R, ...)
    state = state.unflatten(1, (groups, -1))  # (B, G, R, N, P)
    earlier, state = _in_chunks(x[:, :-1], decay[:, :-1], key[:, :-1], query[:, :-1], state, chunk_size)
    x, decay, key, query = x[:, -1], decay[:, -1], key[:, -1], query[:, -1]
    state = state * decay.exp()[..., None, None] + key[:, :, None, :, None] * x.unsqueeze(-2)
    last = (query[:, :, None, None] @ state).squeeze(-2)  # (B, G, R, P)
    return torch.cat((earlier, last.flatten(1, 2).unsqueeze(1)), 1), state.flatten(1, 2)


def _in_chunks(
    x: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Process any number of tokens: (B, T, G, R, P), (B, T, G, R), twice (B, T, G, N), (B, G, R, N, P)."""
    length = x.shape[1]
    count = (length + chunk_size - 1) // chunk_size
    missing = count * chunk_size - length  # added steps of zeros leave the state as it is

    def chunks(part: Tensor) -> Tensor:
        """(B, T, A, ...) -> (B, A, ..., M, C), for T a multiple of C."""
        part = torch.cat((part, part.new_zeros(part.shape[0], missing, *part.shape[2:])), 1)
        return part.unflatten(1, (count, chunk_size)).movedim((1, 2), (-2, -1))

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
