"""GPT: a pre-norm causal Transformer decoder (Radford et al. 2019; Brown et al. 2020).

GPT-3 and GPT-Neo (Black et al. 2021) use a sliding window in every other layer. OPT (Zhang et al. 2022) is the same
decoder with relu; its model of 350M parameters is post-norm, with narrower token embeddings. GPT-1 (Radford et al.
2018) is post-norm, too.

B batch, T tokens of this call, S tokens including those before, E hidden size, W embedding size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn import (
    Cache,
    FeedForward,
    LayerCache,
    MultiHeadAttention,
    build_mask,
    build_norm,
    initialize,
    positions_of,
    truncate_positions,
)
from zoo_plugins.gpt.config import GPTConfig
from zoo_plugins.gpt.heads import add_head, answer


def norm(c: GPTConfig) -> nn.Module:
    """A norm of the configured kind."""
    return build_norm(c.hidden_size, eps=c.norm_eps, kind=c.norm, bias=c.norm_bias)


class GPTBlock(nn.Module):
    """Attention and feed-forward, each a residual sub-layer, normalised before or after."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = norm(c)
        self.attention = MultiHeadAttention(
            c.hidden_size,
            c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            output_bias=c.attention_output_bias,
            scale=c.attention_scale,
            dropout=c.dropout,
        )
        self.norm_2 = norm(c)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size or 0, activation=c.activation, bias=c.mlp_bias)
        self.dropout = nn.Dropout(c.dropout)
        self.norm_first = c.norm_first

    def forward(self, x: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        if not self.norm_first:
            x = self.norm_1(x + self.dropout(self.attention(x, mask=mask, cache=cache)))
            return self.norm_2(x + self.dropout(self.mlp(x)))
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask, cache=cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and the language-model head."""

    position_tensors = ("position_embedding.weight",)

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.embedding_width)
        self.position_embedding = nn.Embedding(c.position_rows, c.hidden_size)
        narrow = c.embedding_width != c.hidden_size
        self.widen = nn.Linear(c.embedding_width, c.hidden_size, bias=False) if narrow else nn.Identity()
        self.narrow = nn.Linear(c.hidden_size, c.embedding_width, bias=False) if narrow else nn.Identity()
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(GPTBlock(c) for _ in range(c.num_layers))
        self.norm = norm(c) if c.norm_first else nn.Identity()
        add_head(self, c, self.token_embedding, tied=c.tie_embeddings)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw from N(0, 0.02^2), scaled by 1 / sqrt(residual layers) in the last layer of a branch (section 2.3), or
        from another configured distribution."""
        c = self.config
        initialize(self, c.initializer, std=0.02)
        for block in self.modules():
            if isinstance(block, GPTBlock):
                for branch in (block.attention.output, block.mlp.down):
                    initialize(branch, c.initializer, std=0.02 / (2 * c.num_layers) ** 0.5)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the output of the configured task, or several by name: see :func:`zoo_plugins.gpt.heads.answer`.

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: keys and values of earlier calls; extended in place.
        """
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        positions = positions_of(length, total, padding=attention_mask, device=input_ids.device)
        places = positions + self.config.position_offset if self.config.position_offset else positions
        x = self.widen(self.token_embedding(input_ids))  # (B, T, W) -> (B, T, E)
        x = self.dropout(x + self.position_embedding(places))
        windows = [self.config.window(layer) for layer in range(len(self.blocks))]
        masks = {}
        for window in dict.fromkeys(windows):
            mask = build_mask(
                length, total, padding=attention_mask, causal=True, window=window, device=input_ids.device
            )
            first = past_key_values[windows.index(window)] if past_key_values is not None else None
            masks[window] = mask if first is None else first.seen(mask, length)
        for layer, (block, window) in enumerate(zip(self.blocks, windows, strict=True)):
            x = block(x, masks[window], past_key_values[layer] if past_key_values is not None else None)
        x = self.narrow(self.norm(x))  # (B, T, E) -> (B, T, W)
        return answer(self, self.config, x, input_ids, attention_mask, self.config.pad_token_id)

    def adapt_tensor(self, name: str, tensor: Tensor, old: GPTConfig) -> Tensor | None:
        """Truncate the position embedding to a smaller ``max_seq_len``, with the same offset."""
        if name != "position_embedding.weight" or self.config.position_offset != old.position_offset:
            return None
        return truncate_positions(tensor, self.config.position_rows)
