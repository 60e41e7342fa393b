"""A recurrent encoder-decoder with attention (Bahdanau et al. 2015).

Without attention it covers the models of Cho et al. 2014 and Sutskever et al. 2014.

B batch, S source tokens, T target tokens of this call, L layers, E embedding size, D hidden size, W state size of a
layer (D, or 2 D for an LSTM: hidden state and cell state), M memory size, A attention size, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn import (
    AdditiveAttention,
    LayerStates,
    is_recording,
    run_padded,
    scaled_dot_product_attention,
    scan_steps,
    unrecorded_attentions,
)
from zoo_plugins.seq2seq.config import Seq2SeqConfig


class DotAttention(nn.Module):
    """Attention with unscaled scores s^T U h (Luong et al. 2015, equation 8, "general")."""

    def __init__(self, query_size: int, memory_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(memory_size, query_size, bias=False)

    def forward(
        self, query: Tensor, memory: Tensor, *, keys: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Like :class:`AdditiveAttention`: (B, T, D) and (B, S, M) -> (B, T, M)."""
        keys = self.keys(memory) if keys is None else keys
        heads = (item.unsqueeze(1) for item in (query, keys, memory))
        heads_mask = None if mask is None else mask.unsqueeze(1)
        return scaled_dot_product_attention(*heads, mask=heads_mask, scale=1.0).squeeze(1)

    def keys(self, memory: Tensor) -> Tensor:
        """Project the memory, U h: (B, S, M) -> (B, S, D)."""
        return self.key(memory)


class Maxout(nn.Module):
    """A dense layer followed by the maximum of each pair of outputs (appendix A.2.2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return self.dense(x).unflatten(-1, (-1, 2)).amax(-1)


class Seq2Seq(nn.Module):
    """Encoder, attention, decoder and the projection to the vocabulary."""

    def __init__(self, c: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = c
        lstm, hidden, target = c.cell == "lstm", c.hidden_size, c.target_vocab_size or 0
        self.source_embedding = nn.Embedding(c.vocab_size, c.embedding_size)
        self.encoder = (nn.LSTM if lstm else nn.GRU)(
            c.embedding_size,
            hidden,
            c.num_layers,
            batch_first=True,
            dropout=c.dropout if c.num_layers > 1 else 0.0,  # torch warns if it has no effect
            bidirectional=c.bidirectional,
        )
        if c.bridge:
            ends = c.memory_size // hidden * c.state_size
            self.bridge = nn.ModuleList(nn.Linear(ends, c.state_size) for _ in range(c.num_layers))
        if c.attention == "additive":
            self.attention: AdditiveAttention | DotAttention = AdditiveAttention(hidden, c.memory_size, c.key_size)
        elif c.attention == "dot":
            self.attention = DotAttention(hidden, c.memory_size)
        self.target_embedding = nn.Embedding(target, c.embedding_size)
        cell = nn.LSTMCell if lstm else nn.GRUCell
        self.decoder = nn.ModuleList(
            cell(hidden if layer else c.embedding_size + c.context_size, hidden) for layer in range(c.num_layers)
        )
        read = hidden + c.context_size
        self.readout = None if c.maxout_size is None else Maxout(read + c.embedding_size, c.maxout_size)
        self.head = nn.Linear(c.maxout_size or read, target)
        self.dropout = nn.Dropout(c.dropout)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Encode the source.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for a token and 0 for padding, on either side.

        Returns:
            ``state`` (B, L, W), the decoder's initial state; with attention also ``last_hidden_state`` (B, S, M), the
            memory, and ``attention_keys`` (B, S, A), its projection.
        """
        c = self.config
        memory, last = run_padded(self.encoder, self.dropout(self.source_embedding(input_ids)), attention_mask)
        ends = torch.cat(last, -1) if isinstance(last, tuple) else last  # (L directions, B, W)
        ends = ends.unflatten(0, (c.num_layers, -1)).permute(2, 0, 1, 3).flatten(2)  # (B, L, directions W)
        if c.bridge:
            ends = torch.stack([dense(ends[:, layer]) for layer, dense in enumerate(self.bridge)], 1).tanh()
        if c.attention == "none":
            return {"state": ends}
        return {"last_hidden_state": memory, "attention_keys": self.attention.keys(memory), "state": ends}

    def decode(
        self,
        decoder_input_ids: Tensor,
        state: Tensor,
        last_hidden_state: Tensor | None = None,
        attention_keys: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_states: list[LayerStates] | None = None,
    ) -> Tensor:
        """Return the logits of the next target token.

        Args:
            decoder_input_ids: (B, T).
            state: (B, L, W), from :meth:`encode`, as are ``last_hidden_state`` and ``attention_keys``.
            last_hidden_state: (B, S, M).
            attention_keys: (B, S, A).
            attention_mask: (B, S), of the source.
            past_states: the state of each layer after the last token of earlier calls, (B, W), and whether there were
                any, (B, 1); replaced.

        Returns:
            (B, T, V).
        """
        c = self.config
        seen = None if attention_mask is None else attention_mask.bool().unsqueeze(1)  # (B, 1, S)

        def step(states: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            """(B, L, W) and (B, E) -> the next states, and their concatenation with the context, (B, L W + M)."""
            x, context = token, token[:, :0]
            if last_hidden_state is not None:
                query = states[:, -1:, : c.hidden_size]  # state of the last layer
                found = self.attention(query, last_hidden_state, keys=attention_keys, mask=seen)
                context = found[:, 0]
                x = torch.cat((token, context), -1)
            results = []
            for layer, cell in enumerate(self.decoder):
                x = self.dropout(x) if layer else x
                before = states[:, layer]
                made = cell(x, before.chunk(2, -1) if c.cell == "lstm" else before)
                x = made[0] if c.cell == "lstm" else made
                results.append(torch.cat(made, -1) if c.cell == "lstm" else made)
            after = torch.stack(results, 1)
            return after, torch.cat((after.flatten(1), context), -1)

        tokens = self.dropout(self.target_embedding(decoder_input_ids))  # (B, T, E)
        before = self._latest(state, past_states)
        with unrecorded_attentions():
            last, steps = scan_steps(step, before, tokens)
        states, context = steps.split((c.num_layers * c.state_size, c.context_size), -1)
        states = states.unflatten(-1, (c.num_layers, c.state_size))  # (B, T, L, W)
        if is_recording() and last_hidden_state is not None:  # recompute all steps at once
            queries = torch.cat((before.unsqueeze(1), states[:, :-1]), 1)[:, :, -1, : c.hidden_size]  # (B, T, D)
            self.attention(queries, last_hidden_state, keys=attention_keys, mask=seen)
        for layer, kept in enumerate(past_states or ()):
            kept["hidden"] = last[:, layer]
            kept["started"] = torch.ones_like(decoder_input_ids[:, :1])
        parts = [states[:, :, -1, : c.hidden_size], context]
        if self.readout is None:
            return self.head(self.dropout(torch.cat(parts, -1)))
        return self.head(self.dropout(self.readout(torch.cat((*parts, tokens), -1))))

    def _latest(self, first: Tensor, past: list[LayerStates] | None) -> Tensor:
        """Return the states (B, L, W) after the last token of earlier calls, or the initial ones."""
        if not past or not past[0]:
            return first
        latest = [
            torch.where(state["started"].bool(), state["hidden"], first[:, layer]) for layer, state in enumerate(past)
        ]
        return torch.stack(latest, 1)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) for a source (B, S) and target prefixes (B, T), as in training."""
        encoded: dict[str, Any] = self.encode(input_ids, attention_mask)
        return self.decode(decoder_input_ids, **encoded, attention_mask=attention_mask)
