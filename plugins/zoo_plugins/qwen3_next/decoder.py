"""The decoder that Qwen3-Next, LFM2 and Granite 4 share: some blocks have attention, others keep states of fixed size.

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zoo.nn import Cache, LayerStates, RotaryPositions, build_mask, positions_of, tied_linear

__all__ = ["HybridDecoder"]


class HybridDecoder(nn.Module):
    """Token embeddings, blocks of two kinds, a final norm and the language-model head, which subclasses build.

    Blocks that keep states take (B, T, E), the tokens (B, T) and their states; those with attention (B, T, E), the
    rotation, the mask and their cache.
    """

    state_block: type[nn.Module]
    """The class of the blocks that keep states."""
    token_embedding: nn.Embedding
    positions: RotaryPositions | None
    """Rotary positions of attention, unless it has none."""
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def build_head(self, c: Any) -> nn.Module:
        """Return the language-model head, which shares the token embedding if the configuration says so."""
        if c.tie_embeddings:
            return tied_linear(self.token_embedding)
        return nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        past_states: list[LayerStates] | None = None,
    ) -> Tensor:
        """Return the logits of the next token, (B, T, V).

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 1 for a token and 0 for padding, on the left, the past included.
            past_key_values: keys and values of each block with attention after earlier calls; extended in place.
            past_states: the states of each other block after earlier calls; replaced.
        """
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        tokens = None if attention_mask is None else attention_mask[:, total - length :]  # (B, T)
        x = self.embed(input_ids)  # (B, T, E)
        rotation = None
        if self.positions is not None:
            places = positions_of(length, total, padding=attention_mask, device=input_ids.device)
            rotation = self.positions(places, x.dtype)
        mask = build_mask(length, total, padding=attention_mask, causal=True, device=input_ids.device)
        caches = iter(past_key_values.layers if past_key_values is not None else ())
        states = iter(past_states or ())
        for block in self.blocks:
            if isinstance(block, self.state_block):
                x = block(x, tokens, next(states, None))
            else:
                x = block(x, rotation, mask, next(caches, None))
        return self.logits(self.norm(x))

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, E)."""
        return self.token_embedding(input_ids)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, V)."""
        return self.head(x)
