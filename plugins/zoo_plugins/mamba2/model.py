"""Mamba-2 (Dao and Gu 2024).

B batch, T tokens of this call, E hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.nn import LayerStates, StateSpaceMixer, tied_linear
from zoo_plugins.mamba2.config import Mamba2Config


class Mamba2Block(nn.Module):
    """A pre-norm residual mixer."""

    def __init__(self, c: Mamba2Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.mixer = StateSpaceMixer(
            c.hidden_size,
            c.width,
            head_dim=c.head_dim,
            state_size=c.state_size,
            num_groups=c.num_groups,
            kernel_size=c.kernel_size,
            activation=c.activation,
            bias=c.projection_bias,
            convolution_bias=c.convolution_bias,
            steps=(c.min_step, c.max_step),
            eps=c.norm_eps,
            chunk_size=max(1, min(32, c.max_seq_len // 8)),
        )

    def forward(self, x: Tensor, tokens: Tensor | None, states: LayerStates | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return x + self.mixer(self.norm(x), tokens, states)


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
        for layer, block in enumerate(self.blocks):
            x = block(x, attention_mask, past_states[layer] if past_states else None)
        return self.head(self.norm(x))
