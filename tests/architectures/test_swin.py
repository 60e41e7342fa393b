"""Attention in windows against its definition over all pairs of positions, and the declared sizes of Swin's maps.

``tests/checkpoints/test_swin.py`` compares outputs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.rows import each_row
from zoo.nn import ContinuousOffsetBias, OffsetBias, PatchMerging, WindowAttention, recorded_attentions
from zoo_plugins.swin.config import SwinConfig
from zoo_plugins.swin.model import Swin


def fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)


def group(place: int, size: int, window: int, shift: int) -> tuple[int, bool]:
    """Return the window of a position along one axis of the rolled map, and whether it came across the border."""
    rolled = (place - shift) % size
    return rolled // window, rolled >= size - shift


def defined(attention: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """Compute the result pair by pair: a position sees those of its window that did not come across the border."""
    window, shift, heads = attention.window, attention.shift, attention.num_heads
    height, width = x.shape[1:3]
    whole = [-(-side // window) * window for side in (height, width)]
    padded = x.new_zeros(x.shape[0], *whole, x.shape[3])
    padded[:, :height, :width] = x
    query, key, value = (
        part(padded).unflatten(-1, (heads, -1)) for part in (attention.query, attention.key, attention.value)
    )
    bias = attention.positions()[0]
    places = [(row, column) for row in range(whole[0]) for column in range(whole[1])]
    groups = {p: tuple(group(at, size, window, shift) for at, size in zip(p, whole, strict=True)) for p in places}
    result = torch.empty_like(padded)
    for row, column in places:
        seen = [place for place in places if groups[place] == groups[row, column]]
        rolled = [tuple((at - shift) % size % window for at, size in zip(place, whole, strict=True)) for place in seen]
        own = seen.index((row, column))
        for head in range(heads):
            q, keys = query[:, row, column, head], torch.stack([key[:, *place, head] for place in seen], 1)  # (B, S, D)
            if attention.log_scale is None:
                scores = keys @ q.unsqueeze(-1) / math.sqrt(q.shape[-1])
            else:
                factor = attention.log_scale.exp().clamp(max=100)[head]
                cosines = torch.nn.functional.cosine_similarity(keys, q.unsqueeze(1), dim=-1)
                scores = (factor * cosines).unsqueeze(-1)
            first = rolled[own][0] * window + rolled[own][1]
            offsets = [float(bias[head, first, other[0] * window + other[1]]) for other in rolled]
            weights = torch.softmax(scores[..., 0] + torch.tensor(offsets, dtype=x.dtype), -1)
            values = torch.stack([value[:, *place, head] for place in seen], 1)
            size = q.shape[-1]
            result[:, row, column, head * size : (head + 1) * size] = (weights.unsqueeze(-1) * values).sum(1)
    return attention.output(result)[:, :height, :width]


@settings(max_examples=12, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    window=st.integers(1, 4),
    data=st.data(),
    cosine=st.booleans(),
)
@torch.no_grad()
def test_windows_equal_their_definition(sides: tuple[int, int], window: int, data: Any, *, cosine: bool) -> None:
    shift = data.draw(st.integers(0, window - 1))
    attention = WindowAttention(8, 2, window, shift=shift, cosine=cosine, bias=(True, False, True)).double()
    fill(attention)
    x = torch.randn(2, *sides, 8, dtype=torch.float64)
    assert_close(attention(x), defined(attention, x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_one_window_is_full_attention() -> None:
    """With the whole map in one window and the same weights."""
    attention = WindowAttention(12, 3, 4).double()
    fill(attention)
    x = torch.randn(2, 4, 4, 12, dtype=torch.float64)
    bias = attention.positions()
    query, key, value = (
        part(x).flatten(1, 2).unflatten(-1, (3, 4)).transpose(1, 2)
        for part in (attention.query, attention.key, attention.value)
    )
    mixed = torch.softmax(query @ key.mT / 2 + bias, -1) @ value
    assert_close(attention(x).flatten(1, 2), attention.output(mixed.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_maps_may_move_by_whole_windows() -> None:
    """Without a shift, windows are computed alike wherever they are."""
    attention = WindowAttention(8, 2, 3).double()
    fill(attention)
    x = torch.randn(1, 6, 9, 8, dtype=torch.float64)
    assert_close(attention(x.roll((3, 6), (1, 2))), attention(x).roll((3, 6), (1, 2)))


@torch.no_grad()
def test_positions_outside_the_window_change_nothing() -> None:
    attention = WindowAttention(8, 2, 4, shift=2).double()
    fill(attention)
    x = torch.randn(1, 8, 8, 8, dtype=torch.float64)
    other = x.clone()
    other[:, 2:6, 2:6] += 1  # one window
    other[:, :2, :2] += 1  # the corner, which was rolled into a window with three others
    changed = (attention(x) != attention(other)).any(-1)[0]
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[2:6, 2:6] = expected[:2, :2] = True
    assert torch.equal(changed, expected)


@torch.no_grad()
def test_recorded_weights() -> None:
    """The heads of each window count as heads, and shifted windows hide the parts from each other."""
    attention = WindowAttention(8, 2, 3, shift=1)
    with recorded_attentions() as weights:
        attention(torch.randn(5, 6, 9, 8))
    assert weights[0].shape == (5, 6 * 2, 9, 9)
    assert_close(weights[0].sum(-1), torch.ones(5, 12, 9))
    last = weights[0][:, -2:].unflatten(-1, (3, 3)).unflatten(2, (3, 3))  # the lower right window
    assert (last[:, :, :2, :2, 2] == 0).all()
    assert (last[:, :, :2, :2, :2, :2] > 0).all()


@torch.no_grad()
def test_bias_depends_on_the_offset_alone() -> None:
    """Row (y + w - 1) (2 w - 1) + x + w - 1 of the table is for a query at the offset (y, x) from the key."""
    bias = OffsetBias(3, 2)
    fill(bias)
    found = bias()
    assert found.shape == (1, 3, 4, 4)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for query, key in [(0, 0), (0, 3), (2, 1), (3, 3), (1, 2)]:
        y, x = (a - b for a, b in zip(places[query], places[key], strict=True))
        assert torch.equal(found[0, :, query, key], bias.table[(y + 1) * 3 + x + 1])


@each_row(("window", "pretrained"), [(4, None), (4, 9), (1, None), (1, 3)])
@torch.no_grad()
def test_continuous_bias(window: int, pretrained: int | None) -> None:
    """Liu et al. 2022, section 3.3, offset by offset."""
    bias = ContinuousOffsetBias(2, window, pretrained_window=pretrained, hidden_size=5).double()
    fill(bias)
    found = bias()[0]

    def scaled(distance: int) -> float:
        share = 8 * distance / (max((pretrained or window) - 1, 1))
        return math.copysign(math.log2(1 + abs(share)) / 3, share)

    for query in range(window**2):
        for key in range(window**2):
            rows, columns = query // window - key // window, query % window - key % window
            point = torch.tensor([scaled(rows), scaled(columns)], dtype=torch.float64)
            wanted = 16 * torch.sigmoid(bias.down(torch.relu(bias.up(point))))
            assert_close(found[:, query, key], wanted, rtol=0, atol=1e-5)


@each_row("norm_first", [True, False])
@torch.no_grad()
def test_merging_of_patches(*, norm_first: bool) -> None:
    """Four positions, column by column, become one; a map with odd sides is padded with zeros."""
    merging = PatchMerging(2, 6, norm_first=norm_first)
    fill(merging)
    x = torch.randn(1, 3, 4, 2)
    found = merging(x)
    assert found.shape == (1, 2, 2, 6)
    corner = torch.cat((x[0, 2, 2], torch.zeros(2), x[0, 2, 3], torch.zeros(2)))
    wanted = merging.reduction(merging.norm(corner)) if norm_first else merging.norm(merging.reduction(corner))
    assert_close(found[0, 1, 1], wanted)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 90), stages=st.integers(1, 4), patch=st.integers(1, 5), window=st.integers(1, 8))
def test_map_has_its_declared_size(size: int, stages: int, patch: int, window: int) -> None:
    c = SwinConfig(
        image_size=size, hidden_sizes=(4,) * stages, num_stage_layers=(2,) * stages, num_heads=(2,) * stages,
        patch_size=patch, window_size=window, num_channels=1, task="image-feature-extraction",
    )  # fmt: skip
    with torch.device("meta"), recorded_attentions() as weights:
        states = Swin(c)(torch.empty(3, 1, size, size))["last_hidden_state"]
    (graph,) = c.graphs()
    assert states.shape == (3, *graph.output_tensors()[0].dims[1:])
    assert [tensor.shape for tensor in weights] == [(3, *tensor.dims[1:]) for tensor in graph.attentions]


@each_row(
    ("changes", "message"),
    [
        ({"hidden_sizes": (8,)}, "hidden_sizes has 1 stages, but num_stage_layers 4"),
        ({"num_heads": (3, 6, 12)}, "num_heads has 3 stages, but hidden_sizes 4"),
        ({"num_heads": (3, 6, 12, 7)}, "768 is not divisible by num_heads 7"),
        ({"mlp_ratio": 0.001}, "mlp_ratio 0.001 leaves no feed-forward network of a width of 96"),
        ({"pretrained_windows": (4, 4, 4, 4)}, "is for positions 'continuous', but positions is 'table'"),
        ({"positions": "continuous", "pretrained_windows": (4,)}, "pretrained_windows has 1 stages"),
        ({"positions": "continuous", "pretrained_windows": (4, 4, 4, 1)}, "must be 0, or 2 or more"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwinConfig(**changes)


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shift 4 lies outside 0 .+ 3, for a window of 4"):
        WindowAttention(8, 2, 4, shift=4)
    with pytest.raises(ValueError, match="hidden_size 8 is not divisible by num_heads 3"):
        WindowAttention(8, 3, 4)
    with pytest.raises(ValueError, match="pretrained_window must be 2 or more, got 1"):
        ContinuousOffsetBias(2, 4, pretrained_window=1)
