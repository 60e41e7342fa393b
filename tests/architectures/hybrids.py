"""Shared by the tests of LFM2 and Granite 4: parts of a text, padding and states."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.testing import assert_close

from tests.architectures.equations import random_ids
from zoo.nn import Cache, LayerStates

__all__ = ["CUTS", "check_padding", "check_parts"]

CUTS = [(1,), (3, 4, 33), tuple(range(1, 37))]
"""Where a text of 37 tokens is cut."""


def pasts(model: Any) -> tuple[Cache, list[LayerStates]]:
    c = model.config
    return Cache.empty(c.num_attentions), LayerStates.empty(c.num_layers - c.num_attentions)


def check_parts(model: Any, cuts: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    """Calls on parts of a text equal one call, and leave states of these shapes in each layer that keeps any."""
    tokens = random_ids(2, 37)
    cache, states = pasts(model)
    parts = [model(tokens[:, start:stop], None, cache, states) for start, stop in pairwise((0, *cuts, 37))]
    assert_close(torch.cat(parts, 1), model(tokens))
    assert cache.length == 37
    assert all([tuple(value.shape) for value in layer.values()] == shapes for layer in states)


def check_padding(model: Any) -> None:
    """Padding on the left changes neither outputs nor states."""
    tokens = random_ids(1, 20)
    mask = torch.ones(1, 29, dtype=torch.long)
    mask[:, :9] = 0
    padded = torch.cat((random_ids(1, 9), tokens), 1)
    cache, states = pasts(model)
    parts = [model(padded[:, :15], mask[:, :15], cache, states), model(padded[:, 15:], mask, cache, states)]
    other, alone = pasts(model)
    assert_close(torch.cat(parts, 1)[:, 9:], model(tokens, None, other, alone))
    for ours, theirs in zip(states, alone, strict=True):
        assert_close(dict(ours), dict(theirs))
