"""Models in float64 that take the branches of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.probe.claimed import Asked, AskedDtypes, ClaimedDtype

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
X = torch.arange(1, 4, dtype=torch.float64) / 3


def both(code: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return the result of code on float64 numbers as it is, and where they claim a dtype."""
    asked: list[Asked] = []
    with AskedDtypes(asked):
        wanted = code(X.clone())
    with ClaimedDtype(dtype, iter(asked)):
        return wanted, code(X.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_claim_the_dtype(dtype: torch.dtype) -> None:
    weight = torch.nn.Linear(2, 2).double().weight
    for code in (
        lambda x: x.dtype,
        lambda x: (x + 1).dtype,
        lambda x: weight.dtype,
        lambda x: torch.result_type(x, 1),
        lambda x: x.sum().dtype,
        lambda x: torch.zeros(2, dtype=x.dtype).dtype,
        lambda x: x.chunk(3)[0].dtype,
    ):
        assert both(code, dtype) == (torch.float64, dtype)
    for code in (lambda x: x.element_size(), lambda x: x.itemsize, lambda x: x.nbytes // 3):
        assert both(code, dtype) == (8, dtype.itemsize)
    assert both(lambda x: x.type(), dtype)[1] == torch.empty(0, dtype=dtype).type()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_converted_claims_the_new_dtype(dtype: torch.dtype) -> None:
    half = dtype != torch.float32
    for code, claimed in (
        (lambda x: x.float() * 2, torch.float32),
        (lambda x: F.softmax(x, 0, dtype=torch.float32), torch.float32),
        (lambda x: x.double(), torch.float64),
        (lambda x: x.double() + x, torch.float64),
        (lambda x: x.float().to(x.dtype), dtype),
        (lambda x: x + torch.ones(3), torch.float32),
        (lambda x: x * torch.ones(()), dtype),
        (lambda x: torch.arange(3).float() * x, torch.float32),
        (lambda x: torch.cat([x, x.float()]), torch.float32),
        (lambda x: torch.fft.rfft(x), torch.complex64),
    ):
        if not (half and claimed is torch.complex64):
            assert both(lambda x, code=code: code(x).dtype, dtype)[1] == claimed


def sines(positions: Tensor) -> Tensor:
    return (positions / 7).sin()


@pytest.mark.parametrize("dtype", DTYPES)
def test_code_computes_in_float64(dtype: torch.dtype) -> None:
    """No number is rounded that the model in float64 does not round, and those that it rounds are rounded."""

    def norm(x: Tensor) -> Tensor:  # in float32 where tensors are narrower, as published code
        return norm(x.float()).to(x.dtype) if x.dtype in (torch.float16, torch.bfloat16) else x / x.norm()

    def code(x: Tensor) -> Tensor:
        container = torch.full((3,), 0.1, dtype=x.dtype)
        container[:2] = (x[:2].float() * 3).to(x.dtype)
        own, single = torch.arange(3, dtype=x.dtype), torch.arange(3, dtype=torch.float32)
        parts = [x.to(x), x.type(x.dtype), norm(x), container, sines(own), sines(single), sines(single.to(x.dtype))]
        return torch.cat([part.double() for part in parts])

    wanted, given = both(code, dtype)
    assert given.dtype == torch.float64
    assert torch.equal(wanted, given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_that_is_wide_enough_is_compared_with_the_claimed_one(dtype: torch.dtype) -> None:
    """As in code that computes in float32 at least, and converts what is narrower."""

    def code(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x if x.dtype == wide else x.to(wide)
        return (x / 3).to(wide) + torch.full((3,), 0.1, dtype=wide)

    assert both(lambda x: x.dtype == torch.promote_types(x.dtype, torch.float32), dtype)[1] == (dtype == torch.float32)
    wanted, given = both(code, dtype)
    assert torch.equal(wanted, given)
