"""ConvNeXt: the declared sizes of maps, and the norm of responses.

``tests/checkpoints/test_convolutional.py`` compares outputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from zoo_plugins.convnext.config import ConvNeXtConfig
from zoo_plugins.convnext.model import ConvNeXt, ResponseNorm

STAGES: dict[str, Any] = {"num_channels": 1, "task": "image-feature-extraction"}


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 90), stages=st.integers(1, 4), patch=st.integers(1, 5))
def test_map_of_convnext_has_its_declared_size(size: int, stages: int, patch: int) -> None:
    sizes = {"hidden_sizes": (4,) * stages, "num_stage_layers": (1,) * stages, "patch_size": patch, **STAGES}
    least = patch * 2 ** (stages - 1)
    if size < least:
        with pytest.raises(ValueError, match=f"image_size {size} is smaller than {least}"):
            ConvNeXtConfig(image_size=size, **sizes)
        return
    c = ConvNeXtConfig(image_size=size, **sizes)
    with torch.device("meta"):
        states = ConvNeXt(c)(torch.empty(1, 1, size, size))["last_hidden_state"]
    assert states.shape == (1, 4, c.map_size, c.map_size)


def test_norm_of_responses() -> None:
    """Equations 1 to 3 of Woo et al. 2023, position by position."""
    norm, x = ResponseNorm(3).double(), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    found = norm(x)
    for image in range(2):
        lengths = [float(x[image, :, :, channel].square().sum().sqrt()) for channel in range(3)]
        for channel in range(3):
            relative = lengths[channel] / (sum(lengths) / 3 + 1e-6)
            values = x[image, :, :, channel]
            wanted = norm.weight[channel] * values * relative + norm.bias[channel] + values
            torch.testing.assert_close(found[image, :, :, channel], wanted)


@each_row(
    ("changes", "message"),
    [
        ({"hidden_sizes": (8,)}, "hidden_sizes has 1 stages, but num_stage_layers 4"),
        ({"layer_scale": 0.0}, "layer_scale must be positive, got 0.0"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvNeXtConfig(**changes)
