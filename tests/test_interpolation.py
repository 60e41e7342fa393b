"""Interpolation of maps, against PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate as reference

from zoo import interpolation
from zoo.interpolation import interpolate, likeliest_classes

SIZES = [(7, 5), (40, 33), (1, 1), (3, 64), (16, 9)]
METHODS: dict[Any, dict[str, Any]] = {
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "bicubic": {"mode": "bicubic", "align_corners": False},
    "bilinear_corners": {"mode": "bilinear", "align_corners": True},
}


@pytest.mark.parametrize("method", METHODS)
def test_interpolated_maps(method: Any) -> None:
    values = torch.randn(3, 16, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for size in SIZES:
        expected = reference(values[None], size, **METHODS[method])[0]
        np.testing.assert_allclose(interpolate(values.numpy(), size, method), expected, rtol=0, atol=1e-12)
        found = interpolate(values.float().numpy(), size, method)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_classes_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = reference(logits[None], (50, 37), mode="bilinear", align_corners=False)[0].argmax(0)
    assert (likeliest_classes(logits.numpy(), (50, 37)) == expected.numpy()).all()
    monkeypatch.setattr(interpolation, "_STRIP", 4 * 37 * 7)
    assert (likeliest_classes(logits.numpy(), (50, 37)) == expected.numpy()).all()
