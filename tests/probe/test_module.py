"""Noise on the weights of a model, and the declarations that limit it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.errors import PluginError
from zoo.probe.module import add_noise, declared_tensors, not_perturbed, perturb, weights_of


class Layer(nn.Module):
    fixed_tensors: ClassVar[Any] = ("order",)
    positive_tensors: ClassVar[Any] = {"decay": 1.0, "sc*": math.inf}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(4.0))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.decay = nn.Parameter(torch.full((500,), 0.9))
        self.scale = nn.Parameter(torch.zeros(500))
        self.bias = nn.Parameter(torch.zeros(500))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("order", self.layers[0].order)  # tied


def test_noise_respects_declarations() -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    perturb(model)
    after = model.state_dict()
    unchanged = {name for name in after if torch.equal(before[name], after[name])}
    assert sorted(unchanged) == not_perturbed(model)
    assert unchanged == {"order", *(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("order", "steps"))}
    for layer in (0, 1):
        decay, scale, bias = (after[f"layers.{layer}.{name}"] for name in ("decay", "scale", "bias"))
        assert 0 < decay.min() < 0.7
        assert 0.99 < decay.max() < 1
        assert 0 < scale.min() < scale.max()
        assert bias.min() < 0 < bias.max()


def test_weights_that_may_have_any_value() -> None:
    model = Model()
    assert [id(weight) for weight in weights_of(model)] == [
        id(tensor) for layer in model.layers for tensor in (layer.decay, layer.scale, layer.bias)
    ]


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), st.sampled_from([0.01, 0.7, 1, 3])
)
def test_positive_weights_stay_below_their_limit(dtype: torch.dtype, upper: float) -> None:
    """Also after rounding to their dtype."""
    weight: Tensor = torch.full((4000,), upper / 2, dtype=dtype)
    found = add_noise(weight, torch.Generator().manual_seed(0), upper=upper).double()
    assert found.min() > 0
    assert found.max() < torch.tensor(upper, dtype=dtype).double()


def test_noise_does_not_grow_through_convolutions() -> None:
    """Trained kernels are small, and batch norm divides by the variance that they gave in training."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(40)
        for layer in (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, momentum=None), nn.ReLU())
    ]
    model, images = nn.Sequential(*layers), torch.randn(8, 16, 6, 6)
    for layer in layers[::3]:
        layer.weight.data.mul_(0.2)
    model(images)
    model.eval()
    before = model(images).std()
    perturb(model)
    assert model(images).std() < 1000 * before


def test_kernels_without_values_get_noise() -> None:
    """Zero at first, so that a block does nothing, or a constant average."""
    generator = torch.Generator().manual_seed(0)
    assert add_noise(torch.zeros(64, 8, 3, 3), generator).std().item() == pytest.approx(72**-0.5, rel=0.05)
    average = add_noise(torch.full((64, 8, 3, 3), 1 / 9), generator)
    assert 0 < average.min() < 0.08
    assert average.max() > 0.15


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("fixed_tensors", ("bias",), "bias is declared fixed, but is trainable: Layer.fixed_tensors"),
        ("fixed_tensors", "order", "must be a tuple, got 'order': Layer.fixed_tensors"),
        ("fixed_tensors", ("ordre",), "the module has no stored tensor 'ordre': Layer.fixed_tensors"),
        ("fixed_tensors", ("scratch",), "the module has no stored tensor 'scratch'"),
        ("positive_tensors", ("decay",), "must be a mapping, got .*: Layer.positive_tensors"),
        ("positive_tensors", {"decay": 0}, "the upper limit of decay must be positive, got 0"),
        ("positive_tensors", {"decay": None}, "the upper limit of decay must be positive, got None"),
    ],
)
def test_malformed_declaration(monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, said: str) -> None:
    monkeypatch.setattr(Layer, attribute, value)
    with pytest.raises(PluginError, match=said):
        declared_tensors(Model())
