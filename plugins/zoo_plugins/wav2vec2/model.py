"""wav2vec 2.0: an encoder of raw sound (Baevski et al. 2020, section 2), and HuBERT (Hsu et al. 2021).

Convolutions turn samples into a position for every 20 ms, a convolution over the positions encodes where they are, and
blocks as in BERT do the rest. The two differ in how they are pretrained.

B batch, S samples, T positions, C channels of the last convolution, E hidden size, V vocabulary, N classes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import ACTIVATIONS, FeedForward, MultiHeadAttention, Residual, build_mask, initialize, pool
from zoo_plugins.wav2vec2.config import Wav2Vec2Config


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, T)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) -> (B, C, T)."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Convolutions(nn.Module):
    """The feature encoder: convolutions of the samples, with norms and activations (appendix B)."""

    def __init__(self, c: Wav2Vec2Config) -> None:
        super().__init__()
        sizes = zip(c.convolution_kernels, c.convolution_strides, strict=True)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(inputs, outputs, kernel, stride, bias=c.convolution_bias)
            for (inputs, outputs), (kernel, stride) in zip(pairwise((1, *c.convolution_sizes)), sizes, strict=True)
        )
        by_position = c.convolution_norm == "layer"
        self.norms = nn.ModuleList(
            ChannelNorm(size) if by_position else nn.Identity() if layer else nn.GroupNorm(size, size)
            for layer, size in enumerate(c.convolution_sizes)
        )
        self.activation = ACTIVATIONS[c.convolution_activation]

    def forward(self, samples: Tensor) -> Tensor:
        """(B, S) -> (B, T, C)."""
        x = samples.unsqueeze(1)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.activation(norm(convolution(x)))
        return x.transpose(1, 2)


class ConvolutionalPositions(nn.Module):
    """A grouped convolution over the positions, added to them (section 2; Mohamed et al. 2019).

    Its weight is normalised (Salimans and Kingma 2016): for each place of the kernel, a length times a direction.
    """

    def __init__(self, c: Wav2Vec2Config) -> None:
        super().__init__()
        self.groups, self.kernel = c.position_groups, c.position_kernel
        shape = (c.hidden_size, c.hidden_size // c.position_groups, c.position_kernel)
        self.direction = nn.Parameter(torch.empty(shape))
        self.length = nn.Parameter(torch.empty(1, 1, c.position_kernel))
        self.bias = nn.Parameter(torch.zeros(c.hidden_size))
        self.activation = ACTIVATIONS[c.convolution_activation]
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the directions so that outputs have about the variance of the inputs; lengths are theirs."""
        nn.init.normal_(self.direction, std=2 * (self.kernel * self.direction.shape[0]) ** -0.5)
        with torch.no_grad():
            self.length.copy_(self._lengths())

    def _lengths(self) -> Tensor:
        return torch.linalg.vector_norm(self.direction, dim=(0, 1), keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        weight = self.direction * (self.length / self._lengths())
        y = F.conv1d(x.transpose(1, 2), weight, self.bias, padding=self.kernel // 2, groups=self.groups)
        if self.kernel % 2 == 0:  # one position more than there were
            y = y[:, :, :-1]
        return self.activation(y).transpose(1, 2)


class Wav2Vec2Block(nn.Module):
    """Attention and feed-forward, each a residual sub-layer, normalised before or after."""

    def __init__(self, c: Wav2Vec2Config) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads, dropout=c.dropout)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size, activation=c.activation, dropout=c.dropout)
        self.residual_1, self.residual_2 = (
            Residual(c.hidden_size, eps=c.norm_eps, norm_first=c.norm_first, dropout=c.dropout) for _ in range(2)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        x = self.residual_1(x, lambda y: self.attention(y, mask=mask))
        return self.residual_2(x, self.mlp)


class Wav2Vec2(nn.Module):
    """Convolutions, positions, blocks and the head of the task."""

    def __init__(self, c: Wav2Vec2Config) -> None:
        super().__init__()
        self.config = c
        channels = c.convolution_sizes[-1]
        self.features = Convolutions(c)
        self.projection_norm = nn.LayerNorm(channels, eps=c.norm_eps) if c.projection_norm else nn.Identity()
        self.projection = nn.Linear(channels, c.hidden_size)
        self.positions = ConvolutionalPositions(c)
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.blocks = nn.ModuleList(Wav2Vec2Block(c) for _ in range(c.num_layers))
        if c.task == "ctc-speech-recognition":
            self.head = nn.Linear(c.hidden_size, c.vocab_size)
        else:
            self.projector = nn.Linear(c.hidden_size, c.classifier_size)
            self.classifier = nn.Linear(c.classifier_size, c.num_classes)
        self.dropout = nn.Dropout(c.dropout)
        initialize(self, "normal", std=0.02)

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of tokens, (B, T, V), or of classes, (B, N).

        Args:
            input_values: samples, (B, S).
            attention_mask: (B, S), 1 for a sample and 0 for padding after them; None with a norm over the whole sound.
        """
        x = self.dropout(self.projection(self.projection_norm(self.features(input_values))))
        padding = None if attention_mask is None else self.position_mask(attention_mask, x.shape[1])
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1) == 0, 0.0)
        x = x + self.positions(x)
        first = self.config.norm_first
        x = self.dropout(x if first else self.norm(x))
        mask = build_mask(x.shape[1], x.shape[1], padding=padding)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x) if first else x
        if self.config.task == "ctc-speech-recognition":
            return self.head(self.dropout(x))
        return self.classifier(pool(self.projector(x), padding, "mean"))

    def position_mask(self, attention_mask: Tensor, length: int) -> Tensor:
        """Return which positions lie in the sound, (B, T), given which samples do, (B, S)."""
        samples = attention_mask.sum(-1, keepdim=True)
        positions = torch.div(samples - self.config.min_samples, self.config.step, rounding_mode="floor") + 1
        return (torch.arange(length, device=samples.device) < positions).to(attention_mask.dtype)
