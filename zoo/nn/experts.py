"""Mixtures of experts: feed-forward networks of which each token uses a few, chosen by a router.

B batch, T tokens of a text, M = B T tokens, E hidden size, F intermediate size, X experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import handle_torch_function, has_torch_function

from zoo.config import Activation
from zoo.nn.feed_forward import ACTIVATIONS, GatedFeedForward

__all__ = [
    "Experts",
    "GroupedRouter",
    "MixtureOfExperts",
    "Route",
    "TopKRouter",
    "load_balancing_loss",
    "mix_experts",
    "recorded_routes",
]


Route = tuple[Tensor, Tensor]
"""The logits of a router, (M, X), and the numbers of the experts that it chose, (M, k)."""
_ROUTES: ContextVar[list[Route] | None] = ContextVar("routes", default=None)


@contextmanager
def recorded_routes() -> Iterator[list[Route]]:
    """Collect the routes that are computed in this block, one for each layer with experts.

    >>> mixture = MixtureOfExperts(16, 8, num_experts=4, top_k=2)
    >>> with recorded_routes() as routes:
    ...     _ = mixture(torch.randn(3, 7, 16))
    >>> [tuple(tensor.shape) for tensor in routes[0]]
    [(21, 4), (21, 2)]
    """
    routes: list[Route] = []
    token = _ROUTES.set(routes)
    try:
        yield routes
    finally:
        _ROUTES.reset(token)


def load_balancing_loss(routes: Sequence[Route], mask: Tensor | None = None) -> Tensor:
    """X sum_i f_i P_i over the experts i (Fedus et al. 2021, equation 4), as in transformers over all layers at once.

    f_i is the mean number of times that a token in a layer chooses expert i, and P_i the mean probability of i. The
    loss is k if all experts are chosen equally often, and grows if the probable ones are chosen more often. Its
    gradient is that of P.

    Args:
        routes: those of each layer.
        mask: (B, T), 1 for a token and 0 for padding, which does not count.

    Returns:
        A scalar.

    Raises:
        ValueError: there are no routes.
    """
    if not routes:
        raise ValueError("no routes were recorded")
    counts, probabilities = [], []
    for logits, numbers in routes:
        tokens = logits.new_ones(len(logits)) if mask is None else mask.flatten().to(logits.dtype)  # (M,)
        weights = tokens.unsqueeze(-1).expand(numbers.shape)  # (M, k)
        counts.append(logits.new_zeros(logits.shape).scatter(1, numbers, weights).sum(0) / tokens.sum())
        probabilities.append(tokens @ logits.softmax(-1) / tokens.sum())
    return logits.shape[-1] * (torch.stack(counts).mean(0) * torch.stack(probabilities).mean(0)).sum()


def mix_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: Activation,
    biases: Sequence[Tensor] = (),
    limit: float | None = None,
) -> Tensor:
    """Sum the weighted outputs of each token's experts, W_down (f(W_gate x) * W_up x), one expert after another.

    With a ``limit`` c, the product is f(min(g, c)) * (min(max(u, -c), c) + 1), where g = W_gate x and u = W_up x
    (OpenAI 2025, gpt-oss, section 2.2).

    Each expert that a token has chosen is computed for the tokens that chose it; others are neither computed nor read.
    The number of these tokens cannot be traced: exporters replace this function by a loop.

    Args:
        x: (M, E).
        weights: (M, k).
        chosen: (M, k), numbers of experts, different for each token.
        gate: (X, F, E).
        up: (X, F, E).
        down: (X, E, F).
        activation: f.
        biases: those that are added to the products with ``gate``, ``up`` and ``down``, (X, F), (X, F) and (X, E);
            none by default.
        limit: c; none by default.

    Returns:
        (M, E).
    """
    if has_torch_function((x, gate)):
        arguments = (x, weights, chosen, gate, up, down, activation, biases, limit)
        result: Tensor = handle_torch_function(mix_experts, (x, gate), *arguments)
        return result
    mixed = torch.zeros_like(x)
    if x.is_meta:  # routes are values; on meta tensors only shapes matter
        return mixed
    stacks = [stack.unbind() for stack in (gate, up, down)]
    none: list[Sequence[Tensor | None]] = [[None] * len(gate)] * 3
    added = [stack.unbind() for stack in biases] or none
    for number in chosen.unique().tolist():
        rows, places = (chosen == number).nonzero(as_tuple=True)  # (N,) each, for N tokens
        tokens = x[rows]
        gates, ups, downs = ((stack[number], bias[number]) for stack, bias in zip(stacks, added, strict=True))
        gated, linear = F.linear(tokens, *gates), F.linear(tokens, *ups)  # (N, F)
        if limit is not None:
            gated, linear = gated.clamp(max=limit), linear.clamp(-limit, limit) + 1
        outputs = F.linear(ACTIVATIONS[activation](gated) * linear, *downs)  # (N, E)
        outputs = outputs * weights[rows, places].unsqueeze(-1)
        mixed = mixed.index_add(0, rows, outputs)
    return mixed


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
        bias: whether a bias is added to the logits.

    Raises:
        ValueError: k is not from 1 to X.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, *, top_k: int, renormalize: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to num_experts {num_experts}, got {top_k}")
        self.top_k = top_k
        self.renormalize = renormalize
        self.scores = nn.Linear(hidden_size, num_experts, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(M, E) -> weights (M, k) in the dtype of ``x``, largest first, and the numbers of the experts (M, k)."""
        logits = self.logits(x)
        best, chosen = logits.topk(self.top_k)
        if (record := _ROUTES.get()) is not None:
            record.append((logits, chosen))
        shift = best if self.renormalize else logits
        weights = (best - shift.logsumexp(-1, keepdim=True)).exp()
        return weights.to(x.dtype), chosen

    def logits(self, x: Tensor) -> Tensor:
        """(M, E) -> (M, X), in float32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.dtype == wide:
            scores: Tensor = self.scores(x)
        else:  # all parameters, those of an adapter too
            widened = {name: value.to(wide) for name, value in self.scores.named_parameters()}
            scores = functional_call(self.scores, widened, x.to(wide))
        return scores


class GroupedRouter(TopKRouter):
    """The k best experts of the best groups, as in DeepSeek-V2 (DeepSeek-AI 2024, section 2.1.2) and V3.

    The experts are divided into G groups of equal size, of which a token uses M. With ``softmax``, experts are ranked
    by their logits, and a group has the rank of its best one. With ``sigmoid``, as in DeepSeek-V3 (section 2.1.2,
    equations 12 to 16), an expert has the score sigmoid(W x) and is ranked by the score plus ``correction``, a buffer
    that training moves to balance the load; a group has the sum of its two best ranks. Weights never include the
    correction.

    Args:
        hidden_size: E.
        num_experts: X.
        top_k: k.
        num_groups: G.
        top_groups: M.
        scores: how logits become weights: the softmax over all experts, or the sigmoid of each.
        renormalize: whether the k weights are divided by their sum.
        factor: factor of the weights.

    Raises:
        ValueError: X is not divisible by G, M is not from 1 to G, M groups have fewer than k experts, or a group has
            fewer than two experts with ``sigmoid``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int,
        num_groups: int = 1,
        top_groups: int = 1,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k=top_k, renormalize=renormalize)
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(f"num_experts {num_experts} is not divisible by num_groups {num_groups}")
        size = num_experts // num_groups
        if not 0 < top_groups <= num_groups:
            raise ValueError(f"top_groups must be from 1 to num_groups {num_groups}, got {top_groups}")
        if top_k > top_groups * size:
            raise ValueError(f"top_k {top_k} is above the {top_groups * size} experts of {top_groups} groups")
        self.is_sigmoid = scores == "sigmoid"
        if self.is_sigmoid and size < 2:
            raise ValueError(f"groups must have two experts or more, got num_experts {num_experts} in {num_groups}")
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.factor = factor
        if self.is_sigmoid:
            self.correction: Tensor
            self.register_buffer("correction", torch.zeros(num_experts))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedRouter:
        """Keep the correction in float32 at least, as published models do: the choice depends on small differences."""
        before = self.correction if self.is_sigmoid else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.correction.dtype in (torch.float16, torch.bfloat16):
            self.correction = before.to(self.correction.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(M, E) -> weights (M, k) in the dtype of ``x``, best rank first, and the numbers of the experts (M, k)."""
        logits = self.logits(x)
        scores = logits.sigmoid() if self.is_sigmoid else logits
        chosen = self._limited(scores + self.correction if self.is_sigmoid else logits).topk(self.top_k).indices
        if (record := _ROUTES.get()) is not None:
            record.append((logits, chosen))
        weights = scores.gather(1, chosen)
        if not self.is_sigmoid:
            weights = (weights - (weights if self.renormalize else logits).logsumexp(-1, keepdim=True)).exp()
        elif self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * self.factor).to(x.dtype), chosen

    def _limited(self, ranks: Tensor) -> Tensor:
        """Set the ranks (M, X) of experts outside the best groups to -inf."""
        if self.top_groups == self.num_groups:
            return ranks
        groups = ranks.unflatten(1, (self.num_groups, -1))  # (M, G, X / G)
        best = groups.topk(2, dim=-1).values.sum(-1) if self.is_sigmoid else groups.amax(-1)  # (M, G)
        kept = torch.zeros_like(best).scatter(1, best.topk(self.top_groups).indices, 1.0) > 0
        return groups.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(1)


class Experts(nn.Module):
    """X gated feed-forward networks, and their weighted sum for each token.

    Their matrices are stacked, in the layout of ``nn.Linear``: ``gate`` and ``up`` (X, F, E), ``down`` (X, E, F). So
    are their biases, if they have any: ``gate_bias`` and ``up_bias`` (X, F), ``down_bias`` (X, E).

    Args:
        hidden_size: E.
        intermediate_size: F.
        num_experts: X.
        activation: the activation of the gates.
        bias: whether the matrices have biases.
        limit: that of gates and products, see :func:`mix_experts`; none by default.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.has_bias = bias
        if bias:
            self.gate_bias = nn.Parameter(torch.zeros(num_experts, intermediate_size))
            self.up_bias = nn.Parameter(torch.zeros(num_experts, intermediate_size))
            self.down_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.activation: Activation = activation
        self.limit = limit
        for stack in self.matrices:
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """``gate``, ``up`` and ``down``."""
        return self.gate, self.up, self.down

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """Biases of ``gate``, ``up`` and ``down``; empty for experts without biases."""
        return (self.gate_bias, self.up_bias, self.down_bias) if self.has_bias else ()

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """(M, E), weights (M, k) and numbers of experts (M, k) -> sum of weight times output, (M, E)."""
        return mix_experts(x, weights, chosen, *self.matrices, self.activation, self.biases, self.limit)


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
        bias: whether the router and the experts have biases; the shared expert has none.
        limit: that of gates and products, see :func:`mix_experts`; none by default.
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
        bias: bool = False,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size, num_experts, top_k=top_k, renormalize=renormalize, bias=bias)
        self.experts = Experts(
            hidden_size, intermediate_size, num_experts, activation=activation, bias=bias, limit=limit
        )
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
