"""Causal convolutions and the short convolution of LFM2, compared with torch's and transformers' layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from tests.nn.recurrences import random
from zoo import cost
from zoo.nn import CausalConvolution, LayerStates, ShortConvolution


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_convolution_equals_that_of_torch(bias: bool, size: int) -> None:
    ours = CausalConvolution(5, size, bias=bias).double()
    theirs = nn.Conv1d(5, 5, size, padding=size - 1, groups=5, bias=bias).double()
    theirs.load_state_dict(ours.state_dict())
    x = random(2, 9, 5)
    expected = theirs(x.transpose(1, 2))[:, :, :9].transpose(1, 2)
    assert_close(ours(x), expected)
    for cut in range(1, 9):
        (states,) = LayerStates.empty(1)
        parts = [ours(x[:, :cut], states), ours(x[:, cut:], states)]
        assert_close(torch.cat(parts, 1), expected)
        assert states["convolution"].shape == (2, 5, size - 1)


def test_kernel_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a kernel_size of 2 or more, got 1"):
        CausalConvolution(5, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_short_convolution_equals_that_of_transformers(bias: bool, size: int) -> None:
    config = Lfm2Config(hidden_size=6, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=size, conv_bias=bias)
    theirs = Lfm2ShortConv(config, 0).double()
    ours = ShortConvolution(6, kernel_size=size, bias=bias).double()
    for place, parameter in enumerate(theirs.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(place))
    names = {"convolution": "conv", "output": "out_proj"}
    state: dict[str, Tensor] = {}
    for name, value in theirs.state_dict().items():
        module, part = name.rsplit(".", 1)
        if module == "in_proj":
            state |= {f"{ours_}.{part}": piece for ours_, piece in zip(PROJECTIONS, value.chunk(3), strict=True)}
        else:
            state |= {f"{ours_}.{part}": value for ours_, theirs_ in names.items() if theirs_ == module}
    ours.load_state_dict(state)
    x = random(2, 9, 6)
    expected = theirs(x)
    assert_close(ours(x), expected)
    for cut in range(1, 9):
        (states,) = LayerStates.empty(1)
        assert_close(torch.cat([ours(x[:, :cut], None, states), ours(x[:, cut:], None, states)], 1), expected)
    assert cost.short_convolution(6, kernel_size=size, bias=bias).parameters == sum(
        parameter.numel() for parameter in theirs.parameters()
    )


PROJECTIONS = ("input_gate", "output_gate", "value")
"""The rows of the original's joint projection, in its order."""


def test_padding_does_not_reach_a_token() -> None:
    """Whatever the biases are: what is masked is the input of the convolution."""
    layer = ShortConvolution(6, kernel_size=3, bias=True).double()
    for place, parameter in enumerate(layer.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(place))
    x = random(1, 5, 6)
    padded = torch.cat((random(1, 4, 6, seed=1), x), 1)
    (alone,), (beside,) = LayerStates.empty(1), LayerStates.empty(1)
    tokens = torch.tensor([[0] * 4 + [1] * 5])
    assert_close(layer(padded, tokens, beside)[:, 4:], layer(x, None, alone))
    assert_close(dict(beside), dict(alone))
