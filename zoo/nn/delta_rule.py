"""Gated linear attention by the delta rule (Yang et al. 2024, *Gated Delta Networks*).

B batch, T tokens of this call, H value heads, P their size, G key heads, N their size, R = H / G value heads per key
head, K kernel size, C tokens per chunk, M chunks, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config import Activation
from zoo.nn.cache import LayerStates
from zoo.nn.convolution import CausalConvolution
from zoo.nn.feed_forward import ACTIVATIONS
from zoo.nn.recurrent import scan_steps
from zoo.nn.state_space import GatedRMSNorm, segment_sums

__all__ = ["GatedDeltaNet", "delta_rule", "invert_unit_triangular"]

_EPS = 1e-6
"""Added to the squared length of queries and keys before they are normalised."""


class GatedDeltaNet(nn.Module):
    """The linear attention of Gated DeltaNet: projections, convolution, gated delta rule, gated norm (section 3.4).

    Between calls, it keeps the states ``convolution``, (B, D, K - 1) with D = 2 G N + H P, and ``recurrence``,
    (B, H, N, P). In narrower dtypes, it computes decays and the recurrence in float32.

    Args:
        hidden_size: E.
        num_heads: H.
        head_dim: P.
        num_key_heads: G; each serves H / G consecutive value heads.
        key_head_dim: N.
        kernel_size: K.
        activation: the activation after the convolution. The output gate's is SiLU.
        eps: added to the mean of squares in the norm.
        chunk_size: C, at most half of the longest text: the number of chunks is traced as a constant if it is always 1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int,
        num_key_heads: int,
        key_head_dim: int,
        kernel_size: int = 4,
        activation: Activation = "silu",
        eps: float = 1e-6,
        chunk_size: int = 16,
    ) -> None:
        super().__init__()
        if num_heads % num_key_heads:
            raise ValueError(f"num_heads {num_heads} is not divisible by num_key_heads {num_key_heads}")
        self.num_heads, self.head_dim, self.num_key_heads, self.key_head_dim = (
            num_heads, head_dim, num_key_heads, key_head_dim,
        )  # fmt: skip
        self.chunk_size = chunk_size
        self.activation = ACTIVATIONS[activation]
        keys, values = num_key_heads * key_head_dim, num_heads * head_dim
        self.query = nn.Linear(hidden_size, keys, bias=False)
        self.key = nn.Linear(hidden_size, keys, bias=False)
        self.value = nn.Linear(hidden_size, values, bias=False)
        self.gate = nn.Linear(hidden_size, values, bias=False)
        self.rate = nn.Linear(hidden_size, num_heads, bias=False)
        self.step = nn.Linear(hidden_size, num_heads, bias=False)
        self.convolution = CausalConvolution(2 * keys + values, kernel_size, bias=False)
        self.step_bias = nn.Parameter(torch.ones(num_heads))
        self.log_decay = nn.Parameter(torch.empty(num_heads).uniform_(0.01, 16).log())
        self.norm = GatedRMSNorm(head_dim, eps=eps, gate_first=False)
        self.output = nn.Linear(values, hidden_size, bias=False)

    def forward(self, x: Tensor, tokens: Tensor | None = None, states: LayerStates | None = None) -> Tensor:
        """(B, T, E), and (B, T), 1 for a token and 0 for padding on the left -> (B, T, E). The states are replaced."""
        mask = None if tokens is None else tokens.unsqueeze(-1).to(x.dtype)
        x = x if mask is None else x * mask
        mixed = torch.cat((self.query(x), self.key(x), self.value(x)), -1)
        mixed = self.activation(self.convolution(mixed, states))
        keys, values = self.num_key_heads * self.key_head_dim, self.num_heads * self.head_dim
        query, key, value = (mixed if mask is None else mixed * mask).split((keys, keys, values), -1)
        wide = torch.promote_types(x.dtype, torch.float32)  # errors of decays accumulate over all tokens
        query, key = (_unit(part.to(wide).unflatten(-1, (-1, self.key_head_dim))) for part in (query, key))
        value = value.to(wide).unflatten(-1, (-1, self.head_dim))  # (B, T, H, P)
        decay = -self.log_decay.to(wide).exp() * F.softplus(self.step(x).to(wide) + self.step_bias.to(wide))
        rate = self.rate(x).to(wide).sigmoid()  # (B, T, H)
        before = states.get("recurrence") if states is not None else None
        if before is None:
            before = x.new_zeros(x.shape[0], self.num_heads, self.key_head_dim, self.head_dim)
        y, after = delta_rule(
            query * self.key_head_dim**-0.5, key, value, decay, rate, before.to(wide), self.chunk_size
        )
        if states is not None:
            states["recurrence"] = after.to(x.dtype)
        gate = self.gate(x).unflatten(-1, (-1, self.head_dim))
        return self.output(self.norm(y.to(x.dtype), gate).flatten(2))


def _unit(x: Tensor) -> Tensor:
    """Divide vectors (..., N) by their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def invert_unit_triangular(lower: Tensor) -> Tensor:
    """Return the inverse of I + L, for the strictly lower triangle L of ``lower``: (..., C, C) -> (..., C, C).

    The inverses P of the diagonal blocks of size s give those of size 2 s as P - P E P, where E are the blocks of L
    below them, for s = 1, 2, 4, ... C / 2. This takes about 2 log2(C) matrix products and no loop over rows, and is as
    accurate as substitution. The sum of the powers of -L is not: with entries of 1, which equal keys have, powers of a
    triangle of 64 rows reach 1e17.

    >>> invert_unit_triangular(torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])).tolist()
    [[1.0, 0.0, 0.0], [-2.0, 1.0, 0.0], [6.0, -3.0, 1.0]]
    """
    places = torch.arange(lower.shape[-1], device=lower.device)

    def below(size: int) -> Tensor:
        """Return the blocks of this size below the diagonal ones that are second in their pair."""
        block, pair = places // size, places // (2 * size)
        inside = (block.unsqueeze(1) > block.unsqueeze(0)) & (pair.unsqueeze(1) == pair.unsqueeze(0))
        return lower * inside.to(lower.dtype)

    inverse, size = torch.eye(len(places), dtype=lower.dtype, device=lower.device) - below(1), 2
    while size < len(places):
        inverse = inverse - inverse @ below(size) @ inverse
        size *= 2
    return inverse


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor, chunk_size: int = 16
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule, y_t = S_t^T query_t (Yang et al. 2024, equation 10, with S transposed):

    S_t = a_t (I - rate_t key_t key_t^T) S_{t-1} + rate_t key_t value_t^T, with a_t = exp(decay_t).

    All tokens but the last are processed in chunks (section 3.3), and the last one by the equation: a call on one token
    has no chunks.

    Args:
        query: (B, T, G, N).
        key: (B, T, G, N), of length 1 or 0.
        value: (B, T, H, P).
        decay: (B, T, H), not positive.
        rate: (B, T, H), between 0 and 1.
        state: (B, H, N, P), the state before the first token.
        chunk_size: C. The work within chunks grows with it, and the number of sequential steps is T / C.

    Returns:
        y, (B, T, H, P), and the state after the last token, (B, H, N, P).
    """
    groups = key.shape[2]
    value, decay, rate = (part.unflatten(2, (groups, -1)) for part in (value, decay, rate))  # (B, T, G, R, ...)
    state = state.unflatten(1, (groups, -1))  # (B, G, R, N, P)
    parts = (query, key, value, decay, rate)
    earlier, state = _in_chunks([part[:, :-1] for part in parts], state, chunk_size)
    query, key, value, decay, rate = (part[:, -1] for part in parts)
    key, query = key[:, :, None, None], query[:, :, None, None]  # (B, G, 1, 1, N)
    state = state * decay.exp()[..., None, None]
    error = rate[..., None, None] * (value.unsqueeze(-2) - key @ state)  # (B, G, R, 1, P)
    state = state + key.transpose(-2, -1) * error
    last = (query @ state).squeeze(-2)
    return torch.cat((earlier, last.flatten(1, 2).unsqueeze(1)), 1), state.flatten(1, 2)


def _in_chunks(parts: Sequence[Tensor], state: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Process any number of tokens, given their queries, keys, values, decays and rates.

    Their shapes are twice (B, T, G, N), (B, T, G, R, P) and twice (B, T, G, R); that of the state is (B, G, R, N, P).
    """
    query, key, value, decay, rate = parts
    length = key.shape[1]
    count = (length + chunk_size - 1) // chunk_size
    missing = count * chunk_size - length  # added tokens of zeros leave the state as it is

    def chunks(part: Tensor) -> Tensor:
        """(B, T, A, ...) -> (B, M, A, ..., C), for T a multiple of C."""
        part = torch.cat((part, part.new_zeros(part.shape[0], missing, *part.shape[2:])), 1)
        return part.unflatten(1, (count, chunk_size)).movedim(2, -1)

    query, key = (chunks(part).transpose(-2, -1).unsqueeze(3) for part in (query, key))  # (B, M, G, 1, C, N)
    value, decay, rate = chunks(value).transpose(-2, -1), chunks(decay), chunks(rate).unsqueeze(-1)
    within = segment_sums(decay).exp()  # (B, M, G, R, C, C)
    passed = decay.cumsum(-1).exp().unsqueeze(-1)  # of the state before a chunk, (B, M, G, R, C, 1)
    inverse = invert_unit_triangular(rate * (key @ key.transpose(-2, -1)) * within)
    # Each token adds the outer product of its key and an error to the state. For the state S before the chunk, the rows
    # of the errors are ``written - asked @ S``.
    written, asked = inverse @ (rate * value), inverse @ (rate * passed * key)
    last_keys = within[..., -1, :].unsqueeze(-1) * key  # decayed until the end of the chunk
    sizes = (key.shape[-1],) * 3 + (value.shape[-1], 1)

    def step(before: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """(B, G, R, N, P) and the rows of a chunk, (B, G, R, C, 3 N + P + 1) -> the next state, (B, G, R, C, 2 P)."""
        read, asked, last_keys, written, passed = chunk.split(sizes, -1)
        errors = written - asked @ before
        after = before * passed[..., -1:, :] + last_keys.transpose(-2, -1) @ errors
        return after, torch.cat((errors, read @ before), -1)

    rows = torch.cat((query * passed, asked, last_keys, written, passed), -1)
    # ONNX Runtime does not scan sequences of length 0, so there is another chunk that leaves the state as it is.
    idle = torch.cat((rows.new_zeros(sum(sizes) - 1), rows.new_ones(1))).expand(rows.shape[0], 1, *rows.shape[2:])
    state, steps = scan_steps(step, state, torch.cat((rows, idle), 1))
    errors, y = steps[:, :count].chunk(2, -1)
    y = y + ((query @ key.transpose(-2, -1)) * within) @ errors  # (B, M, G, R, C, P)
    return y.movedim(-2, 2).flatten(3, 4).flatten(1, 2)[:, :length], state
