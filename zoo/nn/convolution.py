"""Causal convolutions with a state, and the gated short convolution of LFM2.

B batch, T tokens of this call, D channels, K kernel size, E hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn.cache import LayerStates

__all__ = ["CausalConvolution", "ShortConvolution"]


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


class ShortConvolution(nn.Module):
    """The gated short convolution of LFM2 (Liquid AI 2025): a convolution between two gates, in place of attention.

    With three projections of the input, ``value``, ``input_gate`` and ``output_gate``, it computes
    output(output_gate * convolution(input_gate * value)). The gates have no activation.

    Between calls, it keeps the state ``convolution``, (B, E, K - 1).

    Args:
        hidden_size: E.
        kernel_size: K, at least 2.
        bias: whether the projections and the convolution have biases.
    """

    def __init__(self, hidden_size: int, *, kernel_size: int = 3, bias: bool = False) -> None:
        super().__init__()
        self.input_gate = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.output_gate = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.value = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.convolution = CausalConvolution(hidden_size, kernel_size, bias=bias)
        self.output = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, tokens: Tensor | None = None, states: LayerStates | None = None) -> Tensor:
        """(B, T, E), and (B, T), 1 for a token and 0 for padding on the left -> (B, T, E). The state is replaced."""
        gated = self.input_gate(x) * self.value(x)
        if tokens is not None:  # after the biases, so that a token sees zeros before the first one
            gated = gated * tokens.unsqueeze(-1).to(x.dtype)
        return self.output(self.output_gate(x) * self.convolution(gated, states))
