"""ResNet: the declared sizes of maps. ``tests/checkpoints/test_convolutional.py`` compares outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from zoo_plugins.resnet.config import ResNetConfig
from zoo_plugins.resnet.model import ResNet

STAGES: dict[str, Any] = {"num_channels": 1, "task": "image-feature-extraction"}


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 90), stages=st.integers(1, 4), halves=st.booleans(), early=st.booleans())
def test_map_of_resnet_has_its_declared_size(size: int, stages: int, *, halves: bool, early: bool) -> None:
    c = ResNetConfig(
        image_size=size, stem_size=4, hidden_sizes=(4,) * stages, num_stage_layers=(1,) * stages,
        downsample_in_first_stage=halves, downsample_in_bottleneck=early, **STAGES,
    )  # fmt: skip
    with torch.device("meta"):
        states = ResNet(c).eval()(torch.empty(1, 1, size, size))["last_hidden_state"]
    assert states.shape == (1, 4, c.map_size, c.map_size)


@each_row(
    ("changes", "message"),
    [
        ({"hidden_sizes": (8, 3), "num_stage_layers": (1, 1)}, "needs hidden_sizes of at least 4"),
        ({"hidden_sizes": (), "num_stage_layers": ()}, "hidden_sizes must be one or more positive"),
        ({"num_stage_layers": (1, 0, 1, 1)}, "num_stage_layers must be one or more positive numbers"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResNetConfig(**changes)
