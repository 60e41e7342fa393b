"""A recurrent classifier: LSTM or GRU, optionally bidirectional (Graves and Schmidhuber 2005).

B batch, T tokens, E hidden size per direction, F features of all directions, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.nn import run_padded
from zoo_plugins.rnn.config import RNNConfig


class RNN(nn.Module):
    """Embeddings, recurrent layers, and a linear classifier."""

    def __init__(self, c: RNNConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.embedding_size)
        self.layers = (nn.LSTM if c.cell == "lstm" else nn.GRU)(
            c.embedding_size,
            c.hidden_size,
            c.num_layers,
            batch_first=True,
            dropout=c.dropout if c.num_layers > 1 else 0.0,  # torch warns if it has no effect
            bidirectional=c.bidirectional,
        )
        self.dropout = nn.Dropout(c.dropout)
        self.classifier = nn.Linear(c.num_features, c.num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) of texts (B, T), or (B, T, C) of their tokens.

        The features of a text are the final states of each direction of the last layer.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 for a token and 0 for padding, on either side.
        """
        x = self.dropout(self.token_embedding(input_ids))
        steps, last = run_padded(self.layers, x, attention_mask)  # (B, T, F)
        if self.config.task == "token-classification":
            return self.classifier(self.dropout(steps))
        states = last[0] if isinstance(last, tuple) else last  # (layers x directions, B, E)
        ends = states[-2:] if self.config.bidirectional else states[-1:]
        return self.classifier(self.dropout(torch.cat(ends.unbind(0), -1)))
