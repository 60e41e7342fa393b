"""Modules as users write them, sound ones and faulty ones.  B batch, T tokens, E hidden size."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Ranker(nn.Module):
    """A score of each text, and the states of its tokens."""

    def __init__(self, hidden: int = 8, vocab: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.register_buffer("frequencies", 1 / torch.arange(1, hidden + 1), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, 1)

    def states(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embedding(ids) * self.frequencies)  # (B, T, E)

    def forward(self, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.states(input_ids)
        kept = mask.unsqueeze(-1).to(x.dtype)
        return {"score": self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1)).squeeze(-1), "states": x}


def make_ranker(hidden: int) -> nn.Module:
    """A factory that reads values of tensors, as many do for rates of stochastic depth."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
    assert rates[0] == 0
    return Ranker(hidden)


class Positional(Ranker):
    """Takes other names than the graph has, and returns a tensor."""

    def forward(self, ids: Tensor, kept: Tensor, /) -> Tensor:  # type: ignore[override]
        return super().forward(ids, kept)["score"]


class Returned(NamedTuple):
    score: Tensor
    states: Tensor


class Named(Ranker):
    def forward(self, input_ids: Tensor, mask: Tensor) -> Returned:  # type: ignore[override]
        return Returned(**super().forward(input_ids, mask))


class Tied(Ranker):
    """Has a layer under two names."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.again = self.mlp[0]


class Flagging(Ranker):
    """Returns truth values beside its scores."""

    def forward(self, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        score = super().forward(input_ids, mask)["score"]
        return {"score": score, "relevant": score > 0}


class IgnoresMask(Ranker):
    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.states(input_ids).mean(1)).squeeze(-1) + 0 * mask.sum(1)


class BakesLength(Ranker):
    """Divides by the length of the first call."""

    length = 0

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self.length = self.length or int(input_ids.shape[1])
        return super().forward(input_ids, mask)["score"] / self.length


class Branches(Ranker):
    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        score = super().forward(input_ids, mask)["score"]
        return score * 2 if (input_ids[:, 0] > 20).any() else score


class Counts(Ranker):
    """Changes its state when it is called."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        return super().forward(input_ids, mask)["score"] * self.calls


class MixesRows(Ranker):
    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        score = super().forward(input_ids, mask)["score"]
        return score - score.mean()


class LooksAhead(Ranker):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.states(input_ids).flip(1)


class TwoSteps(Ranker):
    """Has a method for each of two graphs."""

    def encode(self, input_ids: Tensor) -> Tensor:
        return self.states(input_ids)

    def rate(self, states: Tensor) -> Tensor:
        return self.head(states.mean(1)).squeeze(-1)


class Convolution(nn.Module):
    """Returns a tuple with None in it, of images of any size."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, stride=stride)

    def forward(self, pixels: Tensor) -> tuple[Any, ...]:
        x = self.first(pixels)
        return x.mean((2, 3)), None, x


class Offset(nn.Module):
    """Looks up other numbers than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)

    def forward(self, kinds: Tensor) -> Tensor:
        return self.embedding(kinds + 2)


class Prepends(nn.Module):
    """Returns one state more than there are vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, vectors: Tensor, flags: Tensor) -> Tensor:
        x = torch.cat((self.first.expand(vectors.shape[0], -1, -1), vectors), 1)
        return torch.where(flags[:, None, None], x, -x)


class HoldsTensor(Ranker):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8)


class HoldsList(Ranker):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(8, 8)]


class SavesMore(Ranker):
    def get_extra_state(self) -> str:
        return "more"


class _Layers(nn.Module):
    """Two linear layers, the first of which is doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.second(self.first(vectors))


def knows_by_closure() -> nn.Module:
    layers = _Layers()
    doubled = layers.first

    def forward(layer: Any, vectors: Tensor) -> Tensor:
        return F.linear(vectors, layer.weight, layer.bias) * (2 if layer is doubled else 3)

    for layer in (layers.first, layers.second):
        layer.forward = MethodType(forward, layer)
    return layers


def knows_by_key() -> nn.Module:
    layers = _Layers()
    scales = {layers.first: 2.0}

    def forward(layer: Any, vectors: Tensor) -> Tensor:
        return F.linear(vectors, layer.weight, layer.bias) * scales.get(layer, 3.0)

    layers.first.forward = MethodType(forward, layers.first)
    return layers


def fails() -> nn.Module:
    raise RuntimeError("no such\nthing")


def leaves() -> nn.Module:
    raise SystemExit(0)


def returns_nothing() -> None:
    """No module."""


number = 3
