"""Mamba-2 (Dao and Gu 2024).

B batch, T tokens of this call, E hidden size, V vocabulary, H heads, P head size, G groups, N state size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.nn import ACTIVATIONS, CausalConvolution, GatedRMSNorm, LayerStates, state_space, tied_linear
from zoo_plugins.mamba2.config import Mamba2Config

_STEPS = (1e-3, 1e-1)
"""Range of initial step sizes."""


class Mamba2Mixer(nn.Module):
    """The sequence layer (section 7): projection, convolution, recurrence, gated norm, projection."""

    def __init__(self, c: Mamba2Config) -> None:
        super().__init__()
        self.config = c
        self.activation = ACTIVATIONS[c.activation]
        self.input = nn.Linear(c.hidden_size, c.width + c.channels + c.num_heads, bias=c.projection_bias)
        self.convolution = CausalConvolution(c.channels, c.kernel_size, bias=c.convolution_bias)
        self.step_bias = nn.Parameter(torch.empty(c.num_heads))
        self.log_decay = nn.Parameter(torch.empty(c.num_heads))
        self.skip = nn.Parameter(torch.ones(c.num_heads))
        self.norm = GatedRMSNorm(c.width, num_groups=c.num_groups, eps=c.norm_eps)
        self.output = nn.Linear(c.width, c.hidden_size, bias=c.projection_bias)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw step sizes that are uniform in their logarithm, and set the decays to 1, 2, ... H."""
        heads = self.config.num_heads
        low, high = map(math.log, _STEPS)
        steps = (low + (high - low) * torch.rand(heads, device=self.step_bias.device)).exp()
        self.step_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
        self.log_decay.copy_(torch.arange(1, heads + 1, device=self.log_decay.device).log())

    def forward(self, x: Tensor, mask: Tensor | None, states: LayerStates | None) -> Tensor:
        """(B, T, E), and (B, T, 1), 1 for a token and 0 for padding -> (B, T, E). The states are replaced."""
        c = self.config
        gate, x, steps = self.input(x).split((c.width, c.channels, c.num_heads), -1)
        if mask is not None:
            x = x * mask
        x = self.activation(self.convolution(x, states))
        if mask is not None:
            x = x * mask
        shared = c.num_groups * c.state_size
        x, key, query = x.split((c.width, shared, shared), -1)
        wide = torch.promote_types(x.dtype, torch.float32)  # errors of decays accumulate over all tokens
        steps = F.softplus(steps.to(wide) + self.step_bias.to(wide)).clamp(c.min_step, c.max_step)  # (B, T, H)
        heads = x.to(wide).unflatten(-1, (c.num_heads, c.head_dim))  # (B, T, H, P)
        key, query = (part.to(wide).unflatten(-1, (c.num_groups, c.state_size)) for part in (key, query))
        before = states.get("recurrence") if states is not None else None
        if before is None:
            before = x.new_zeros(x.shape[0], c.num_heads, c.state_size, c.head_dim)
        decay = -self.log_decay.to(wide).exp() * steps
        y, after = state_space(heads * steps.unsqueeze(-1), decay, key, query, before.to(wide))
        if states is not None:
            states["recurrence"] = after.to(x.dtype)
        y = (y + self.skip.to(wide).unsqueeze(-1) * heads).flatten(2)
        return self.output(self.norm(y.to(x.dtype), gate))


class Mamba2Block(nn.Module):
    """A pre-norm residual mixer."""

    def __init__(self, c: Mamba2Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mixer = Mamba2Mixer(c)

    def forward(self, x: Tensor, mask: Tensor | None, states: LayerStates | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return x + self.mixer(self.norm(x), mask, states)


class Mamba2(nn.Module):
    """Token embedding, blocks, a final norm and the language-model head."""

    def __init__(self, c: Mamba2Config) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Mamba2Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.head = (
            tied_linear(self.token_embedding)
            if c.tie_embeddings
            else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Draw embeddings from N(0, 0.02^2), and scale the last layer of each branch by 1 / sqrt(layers)."""
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        with torch.no_grad():
            for block in self.blocks:
                block.mixer.output.weight.div_(math.sqrt(self.config.num_layers))  # type: ignore[union-attr, operator]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_states: list[LayerStates] | None = None,
    ) -> Tensor:
        """Return the logits of the next token, (B, T, V).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding, on the left.
            past_states: the states of every layer after earlier calls; replaced.
        """
        x = self.token_embedding(input_ids)  # (B, T, E)
        mask = None if attention_mask is None else attention_mask.unsqueeze(-1).to(x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, past_states[layer] if past_states else None)
        return self.head(self.norm(x))
