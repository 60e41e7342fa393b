"""TextCNN: convolutions of several widths over word embeddings, with max-over-time pooling (Kim 2014).

B batch, T tokens, E embedding size, F filters per group, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_plugins.textcnn.config import TextCNNConfig


class MaxOverTime(nn.Module):
    """Maximum over i of c_i = f(w . x_{i:i+h-1} + b), the feature of a window of h words (equations 2 to 4).

    Texts shorter than the window are padded with zeros.
    """

    def __init__(self, inputs: int, num_filters: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.filters = nn.Conv1d(inputs, num_filters, size)

    def forward(self, x: Tensor, places: Tensor, counts: Tensor) -> Tensor:
        """(B, E, T), 0 at padding -> (B, F).

        Args:
            places: (B, T), index of each token among the tokens of its row; -1 for padding.
            counts: (B, 1), number of tokens in each row.
        """
        features = F.relu(self.filters(F.pad(x, (0, self.size - 1))))  # (B, F, T), one per start of a window
        whole = (places >= 0) & (places <= (counts - self.size).clamp(min=0))  # windows within the row, or its first
        return features.masked_fill(~whole.unsqueeze(1), 0.0).amax(-1)  # 0 is neutral after ReLU


class TextCNN(nn.Module):
    """Embeddings, filters, and a linear classifier (figure 1)."""

    def __init__(self, c: TextCNNConfig) -> None:
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.groups = nn.ModuleList(MaxOverTime(c.hidden_size, c.num_filters, size) for size in c.kernel_sizes)
        self.dropout = nn.Dropout(c.dropout)
        self.classifier = nn.Linear(c.num_features, c.num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) of texts (B, T). The mask (B, T) is 1 for a token, and 0 for padding on any side."""
        tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask.bool().long()
        places = torch.where(tokens == 1, tokens.cumsum(1) - 1, -1)
        x = self.token_embedding(input_ids) * tokens.unsqueeze(-1)  # (B, T, E)
        counts = tokens.sum(1, keepdim=True)
        features = torch.cat([group(x.transpose(1, 2), places, counts) for group in self.groups], 1)
        return self.classifier(self.dropout(features))
