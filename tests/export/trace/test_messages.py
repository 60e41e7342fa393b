"""Errors about constructs that no graph contains lead to the change that helps."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.export.trace.test_blocks import WIDTH, traced
from zoo.contract import Graph, floats
from zoo.errors import ParityError, PluginError
from zoo.probe.module import TorchExecutor
from zoo_export.parity.running import running

GRAPH = Graph(
    inputs=(floats("x", "batch", "tokens", WIDTH),), outputs=(floats("y", "batch", "tokens", WIDTH),), method="forward"
)


@dataclass
class Out:
    y: Tensor


Named = namedtuple("Named", "y")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None


class GrownTable(Inner):
    """As tables of positions are often kept."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(100, device=x.device).float()[:, None]
        return self.dense(x) + self.kept[: x.shape[1]]


class PlainTensor(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.arange(float(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) * self.kept


class KeptWeight(Inner):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.is_meta:
            self.kept = nn.Parameter(self.dense.weight.sum(0).detach())
        return self.dense(x) * self.kept


class OtherHeads(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.dense(x), x[..., :1]], dim=1)


class Bag(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) + self.bag(x.argmax(-1))[:, None]


class Pooled(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool1d(self.dense(x).mT, 3, stride=1, padding=1).mT


class Returns(Inner):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.dense(x))


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (GrownTable, "register what is kept as a persistent buffer"),
        (PlainTensor, "register what is kept as a persistent buffer"),
        pytest.param(KeptWeight, "compute it in each call of forward", marks=pytest.mark.slow),
        (OtherHeads, "declares another num_kv_heads"),
        (
            lambda: Returns(Out),
            "Returns returns a value of type Out: return a tensor, or a dictionary of the outputs of graph 'model'",
        ),
        (lambda: Returns(Named), "Returns returns a value of type Named: return a tensor, or a dictionary"),
        (lambda: Returns(lambda x: (x,)), "Returns returns a value of type tuple: return a tensor, or a dictionary"),
    ],
)
def test_error_names_the_remedy(model: Callable[[], nn.Module], remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError) as caught:
        traced(model().eval(), monkeypatch, GRAPH)
    assert remedy in str(caught.value)


def test_wrong_translations_name_the_operator_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match=r"translation of aten\.embedding_bag\.padding_idx .* not a valid") as caught:
        traced(Bag().eval(), monkeypatch, GRAPH)
    assert "`return self.dense(x) + self.bag(x.argmax(-1))[:, None]`" in str(caught.value)


def test_functions_of_torch_that_need_numbers_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParityError, match="turns a size") as caught:
        traced(Pooled().eval(), monkeypatch, GRAPH)
    assert "if torch does it, as in max_pool1d, call another function" in str(caught.value)


@pytest.mark.parametrize("kind", ["size", "dtype"])
def test_failures_of_the_model_in_pytorch_are_named(kind: str) -> None:
    graph = Graph(inputs=(floats("x", "batch", WIDTH, "tokens"),), outputs=(floats("y", "batch", WIDTH, "tokens"),))
    model: nn.Module = Normalised() if kind == "size" else PlainProduct().half()
    message, remedy = {
        "size": (r"the model fails in PyTorch at length 1 \(Expected more than 1 spatial", "zoo.Size(min=2)"),
        "dtype": (r"the model fails in PyTorch at length 1 \(expected .*", "register a tensor that is kept"),
    }[kind]
    with pytest.raises(ParityError, match=message) as caught, running("at length 1", Path("model")):
        TorchExecutor(model)(graph, {"x": np.zeros((2, WIDTH, 1), np.float32)})
    assert remedy in str(caught.value)


class Normalised(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.instance_norm(x)


class PlainProduct(PlainTensor):
    def forward(self, x: Tensor) -> Tensor:
        return torch.diag(self.kept) @ x
