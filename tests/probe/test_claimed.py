"""Models in float64 that take the branches of another dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo.probe.claimed import ClaimedDtype
from zoo.probe.widened import KeptWide

HALVES = [torch.float16, torch.bfloat16]
X = torch.arange(3, dtype=torch.float64) / 3


def test_tensors_claim_the_dtype() -> None:
    with ClaimedDtype(torch.float32, widen=False):
        claims = {X.dtype, (X + 1).dtype, torch.nn.Linear(2, 2).double().weight.dtype, torch.result_type(X, 1)}
        sizes, kind = {X.element_size(), X.itemsize}, X.type()
        other = torch.arange(3).dtype
    assert (claims, sizes, kind, other) == ({torch.float32}, {4}, "torch.FloatTensor", torch.int64)
    assert X.dtype == (X + 1).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_code_computes_in_float64(dtype: torch.dtype) -> None:
    """Conversions to the claimed dtype, by any spelling, round no number, and tensors made in it are as wide."""

    def code(x: Tensor) -> Tensor:
        kept = torch.full((3,), 0.1, dtype=x.dtype)
        kept[:2] = (x[:2].float() * 3).to(x.dtype)
        return torch.cat([x.to(x), x.type(x.dtype), x.float().to(x.dtype) + torch.arange(3).to(x.dtype) / 7, kept])

    with ClaimedDtype(dtype, widen=True):
        claimed = code(X)
    with KeptWide():
        assert torch.equal(claimed, code(X))
    assert claimed.dtype == torch.float64


def test_explicit_float32_may_stay() -> None:
    with ClaimedDtype(torch.float32, widen=False):
        angles = torch.arange(3, dtype=torch.float32) / 7
        assert angles.dtype == torch.float32
    assert angles.dtype == torch.float32
    with ClaimedDtype(torch.float32, widen=True):
        angles = torch.arange(3, dtype=torch.float32) / 7
    assert angles.dtype == torch.float64


@pytest.mark.parametrize("dtype", HALVES)
def test_tensor_converted_to_float32_claims_that(dtype: torch.dtype) -> None:
    """Functions that call themselves in float32, where tensors are narrower, end."""

    def norm(x: Tensor) -> Tensor:
        if x.dtype in HALVES:
            return norm(x.float()).to(x.dtype)
        return x / x.norm()

    with ClaimedDtype(dtype, widen=True):
        claimed = norm(X)
        assert claimed.dtype == dtype
    assert torch.equal(claimed, norm(X))
