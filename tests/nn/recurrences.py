"""Shared by the tests of layers with a state: random tensors, and the laws of a recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.testing import assert_close

__all__ = ["assert_parts_equal_the_whole", "random"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_parts_equal_the_whole(
    recurrence: Callable[..., tuple[Tensor, Tensor]], inputs: Mapping[str, Tensor], cut: int
) -> None:
    """Compare one call with two, on the tokens before and after ``cut``, of which the second begins with the state of
    the first. All inputs but ``state`` have one row per token on axis 1."""
    tokens = {name: value for name, value in inputs.items() if name != "state"}
    expected, last = recurrence(**inputs)
    state, parts = inputs["state"], []
    for part in (slice(cut), slice(cut, None)):
        y, state = recurrence(**{name: value[:, part] for name, value in tokens.items()}, state=state)
        parts.append(y)
    assert_close(torch.cat(parts, 1), expected)
    assert_close(state, last)
