"""The module of the defaults.  B batch, T tokens, E hidden size."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["MeanScorer"]


class MeanScorer(nn.Module):
    """A score of a text: a linear layer on the mean of the embeddings of its tokens."""

    def __init__(self, vocab_size: int = 64, hidden_size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the scores (B,) of texts (B, T). The mask (B, T) is 1 for a token, and 0 for padding on any side."""
        x = self.embedding(input_ids) * mask.unsqueeze(-1)  # (B, T, E)
        mean = x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)  # (B, E)
        scores: Tensor = self.head(mean).squeeze(-1)
        return scores
