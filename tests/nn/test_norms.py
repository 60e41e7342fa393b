"""The norm of The Annotated Transformer, against its formula in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from zoo.nn import AnnotatedLayerNorm, OffsetLayerNorm, Residual, build_norm


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal float64 numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(hidden_size: int, eps: float, *, bias: bool = True) -> AnnotatedLayerNorm:
    """Build a float64 norm with random parameters."""
    layer = AnnotatedLayerNorm(hidden_size, eps=eps, bias=bias).double().requires_grad_(False)
    for seed, parameter in enumerate(layer.parameters(), 1):
        parameter.copy_(normal(hidden_size, seed=seed))
    return layer


def formula(layer: AnnotatedLayerNorm, x: Tensor) -> Tensor:
    """a_2 (x - mean) / (std + eps) + b_2, one row at a time."""
    rows = x.numpy().reshape(-1, x.shape[-1])
    scaled = [(row - np.mean(row)) / (np.std(row, ddof=1) + layer.eps) for row in rows]
    y = torch.from_numpy(np.array(scaled)).reshape(x.shape) * layer.weight
    return y if layer.bias is None else y + layer.bias


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 9), st.sampled_from([1e-6, 0.1, 2.0]), st.booleans(), st.floats(-3, 3), st.floats(1e-3, 1e3))
def test_annotated_norm_equals_the_formula(size: int, eps: float, bias: bool, mean: float, scale: float) -> None:
    """At any width, epsilon and magnitude, with and without a bias."""
    layer, x = make(size, eps, bias=bias), mean + scale * normal(2, 3, size)
    assert_close(layer(x), formula(layer, x), atol=1e-11, rtol=1e-11)


def test_annotated_norm_differs_from_layer_norm_by_its_deviation_and_epsilon() -> None:
    """Without epsilon, the two differ by the factor sqrt((E - 1) / E) alone."""
    x, layer = normal(4, 6), AnnotatedLayerNorm(6, eps=0.0).double()
    plain = nn.LayerNorm(6, eps=0.0).double()
    assert_close(layer(x), plain(x) * (5 / 6) ** 0.5, atol=1e-12, rtol=0)
    assert (make(6, 0.5)(x) - make(6, 1e-6)(x)).abs().max() > 0.1


def test_constant_rows_give_the_bias_and_finite_gradients() -> None:
    """Rows without variance, as of padding, divide 0 by epsilon."""
    layer, x = make(4, 1e-6), torch.full((2, 4), 3.0, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert_close(y, layer.bias.expand(2, 4), atol=0, rtol=0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    """The sum of squares would overflow in float16; the result is rounded once."""
    layer, x = make(64, 1e-6), (1000 * normal(3, 64)).to(dtype)
    narrow = layer.to(dtype)
    assert_close(narrow(x), formula(narrow.double(), x.double()).to(dtype), atol=0, rtol=torch.finfo(dtype).eps)


def test_norms_by_name() -> None:
    """Both kinds have the same parameters; a residual takes either."""
    for bias in (True, False):
        layer, annotated = (build_norm(5, eps=1e-3, kind=kind, bias=bias) for kind in ("layer", "annotated"))
        assert type(layer) is nn.LayerNorm
        assert type(annotated) is AnnotatedLayerNorm
        assert layer.eps == annotated.eps == 1e-3
        assert layer.state_dict().keys() == annotated.state_dict().keys()
    block = Residual(5, eps=1e-3, norm_first=False, norm="annotated").double()
    x = normal(2, 3, 5)
    assert_close(block(x, torch.sin), formula(block.norm.requires_grad_(False), x + x.sin()), atol=1e-12, rtol=0)


def test_one_number_has_no_unbiased_deviation() -> None:
    with pytest.raises(ValueError, match="at least 2 numbers, got hidden_size 1"):
        AnnotatedLayerNorm(1)


@pytest.mark.parametrize("bias", [True, False])
def test_offset_layer_norm_equals_nemotron(bias: bool) -> None:
    """At any weights; without training, it is a plain layer norm, because weights start at 0."""
    ours, theirs = (
        OffsetLayerNorm(6, eps=1e-2, bias=bias).double(),
        NemotronLayerNorm1P(6, eps=1e-2, bias=bias).double(),
    )
    x = 2 + 3 * normal(2, 3, 6)
    assert_close(ours(x), torch.nn.functional.layer_norm(x, (6,), eps=1e-2), atol=1e-14, rtol=0)
    for seed, parameter in enumerate(ours.requires_grad_(False).parameters(), 1):
        parameter.copy_(normal(6, seed=seed))
    theirs.load_state_dict(ours.state_dict())
    assert_close(ours(x), theirs(x), atol=1e-14, rtol=0)


def test_offset_layer_norm_adds_one_in_float32() -> None:
    """In bfloat16, 1 + 2^-9 would be 1."""
    layer = OffsetLayerNorm(4, eps=1e-5, bias=False).bfloat16().requires_grad_(False)
    layer.weight.fill_(2.0**-9)
    x = normal(5, 4).bfloat16()
    wanted = torch.nn.functional.layer_norm(x.float(), (4,), torch.full((4,), 1 + 2.0**-9), eps=1e-5)
    assert_close(layer(x), wanted.bfloat16(), atol=0, rtol=0)
