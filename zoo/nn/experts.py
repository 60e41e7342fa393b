"""Mixtures of experts: feed-forward networks of which each token uses a few, chosen by a router.

B batch, T tokens of a text, M = B T tokens, E hidden size, F intermediate size, X experts, k experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config import Activation
from zoo.nn.feed_forward import ACTIVATIONS, GatedFeedForward

__all__ = ["Experts", "MixtureOfExperts", "TopKRouter"]


class TopKRouter(nn.Module):
    """The k experts with the largest logits W x, and their weights (Shazeer et al. 2017, section 2.1, without noise).

    With ``renormalize``, the weights are the softmax over the k logits (Jiang et al. 2024, section 2.1), which is the
    softmax over all experts divided by the sum of the k largest probabilities. Without, they are the softmax over all
    experts, so their sum is less than 1.

    Experts are compared by logits rather than probabilities, which may underflow, and in float32 at least, because
    many logits tie in 16 bits. Among equal logits, the choice is arbitrary.

    Args:
        hidden_size: E.
        num_experts: X.
        top_k: k.
        renormalize: whether the k weights add up to 1.

    Raises:
        ValueError: k is not from 1 to X.
    """

    def __init__(self, hidden_size: int, num_experts: int, *, top_k: int, renormalize: bool = True) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to num_experts {num_experts}, got {top_k}")
        self.top_k = top_k
        self.renormalize = renormalize
        self.scores = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(M, E) -> weights (M, k) in the dtype of ``x``, largest first, and the numbers of the experts (M, k)."""
        logits = self.logits(x)
        best, chosen = logits.topk(self.top_k)
        shift = best if self.renormalize else logits
        weights = (best - shift.logsumexp(-1, keepdim=True)).exp()
        return weights.to(x.dtype), chosen

    def logits(self, x: Tensor) -> Tensor:
        """(M, E) -> (M, X), in float32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.scores.weight.to(wide))


class Experts(nn.Module):
    """X gated feed-forward networks without biases, and their weighted sum for each token.

    Their matrices are stacked, in the layout of ``nn.Linear``: ``gate`` and ``up`` (X, F, E), ``down`` (X, E, F).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, *, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.activation = ACTIVATIONS[activation]
        for stack in (self.gate, self.up, self.down):
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(M, E), weights (M, k) and numbers of experts (M, k) -> sum of weight times output, (M, E)."""
        return self.dense(x, weights, chosen)

    def gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same, from a copy of the matrices of the chosen experts for each token: others are not read."""
        columns = x[:, None, :, None]  # (M, 1, E, 1)
        inner = self.activation(self.gate[chosen] @ columns) * (self.up[chosen] @ columns)  # (M, k, F, 1)
        outputs = self.down[chosen] @ inner  # (M, k, E, 1)
        return (outputs.squeeze(-1) * weights.unsqueeze(-1)).sum(1)

    def dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same, from the outputs of all experts for all tokens, with a weight of 0 where they are not chosen."""
        inner = self.activation(x @ self.gate.mT) * (x @ self.up.mT)  # (X, M, F)
        outputs = inner @ self.down.mT  # (X, M, E)
        every = x.new_zeros(x.shape[0], self.num_experts).scatter(1, chosen, weights)  # (M, X)
        return (outputs * every.T.unsqueeze(-1)).sum(0)


class MixtureOfExperts(nn.Module):
    """Sum of the chosen experts' outputs, in place of a feed-forward network, and optionally of a shared expert's.

    The shared expert is a :class:`GatedFeedForward` for all tokens, multiplied by sigmoid(w x) (Qwen Team 2024).

    Args:
        hidden_size: E.
        intermediate_size: F.
        num_experts: X.
        top_k: k.
        renormalize: whether the weights of a token's k experts add up to 1.
        activation: the activation of the gates.
        shared_intermediate_size: hidden width of the shared expert; 0 for none.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool = True,
        activation: Activation = "silu",
        shared_intermediate_size: int = 0,
    ) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size, num_experts, top_k=top_k, renormalize=renormalize)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, activation=activation)
        self.shared: GatedFeedForward | None = None
        if shared_intermediate_size:
            self.shared = GatedFeedForward(hidden_size, shared_intermediate_size, activation=activation)
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        tokens = x.flatten(0, 1)  # (M, E)
        mixed = self.experts(tokens, *self.router(tokens)).view(x.shape)
        if self.shared is None:
            return mixed
        return mixed + self.shared_gate(x).sigmoid() * self.shared(x)
