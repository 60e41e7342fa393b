"""SegFormer's parts against their equations, and the declared sizes of maps.

``tests/checkpoints/test_segformer.py`` compares outputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.rows import each_row
from zoo.nn import recorded_attentions
from zoo_plugins.segformer.config import SegFormerConfig
from zoo_plugins.segformer.model import Decoder, MixFeedForward, Reduction, SegFormer

TWO: dict[str, Any] = {
    "image_size": 24, "num_channels": 1, "hidden_sizes": (6, 8), "num_stage_layers": (2, 1), "num_heads": (2, 2),
    "patch_sizes": (3, 3), "strides": (2, 2), "reductions": (2, 1), "mlp_ratios": (2, 3), "decoder_hidden_size": 5,
    "num_classes": 3,
}  # fmt: skip


@torch.no_grad()
def test_reduced_positions() -> None:
    """Equation 2: the numbers of R x R positions are joined and projected. Margins of fewer positions are ignored."""
    reduction = Reduction(3, 2).double()
    x = torch.randn(2, 5, 4, 3, dtype=torch.float64)
    weight = reduction.convolution.weight.permute(2, 3, 1, 0).flatten(0, 2)  # rows, columns, channels
    joined = torch.stack(
        [x[:, row : row + 2, column : column + 2].flatten(1) for row in (0, 2) for column in (0, 2)], 1
    )
    assert reduction.convolution.bias is not None
    wanted = reduction.norm(joined @ weight + reduction.convolution.bias)
    assert_close(reduction(x).flatten(1, 2), wanted)


@torch.no_grad()
def test_mixed_feed_forward() -> None:
    """Equation 3, position by position: the convolution reads each channel of the neighbours."""
    layer = MixFeedForward(SegFormerConfig(**TWO), 0).double()
    x = torch.randn(1, 4, 5, 6, dtype=torch.float64)
    up = F.pad(layer.up(x), (0, 0, 1, 1, 1, 1))
    kernel = layer.convolution.weight[:, 0]  # (I, 3, 3)
    row, column = 3, 2
    assert layer.convolution.bias is not None
    mixed = torch.einsum("abi,iab->i", up[0, row : row + 3, column : column + 3], kernel) + layer.convolution.bias
    assert_close(layer(x)[0, row, column], layer.down(F.gelu(mixed)))


@torch.no_grad()
def test_decoder_reads_all_maps() -> None:
    """Equation 4, with maps of one size, of which none is resized; the last map is joined first."""
    decoder = Decoder(SegFormerConfig(**TWO, task="semantic-segmentation")).double().eval()
    maps = [torch.randn(2, size, 3, 3, dtype=torch.float64) for size in (6, 8)]
    read = [part(x.permute(0, 2, 3, 1)) for part, x in zip(decoder.projections, maps, strict=True)]
    fused = torch.cat(read[::-1], -1) @ decoder.fuse.weight[:, :, 0, 0].T
    wanted = torch.relu(decoder.norm(fused.permute(0, 3, 1, 2)))
    assert_close(decoder(maps), decoder.classifier(wanted))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), size=st.integers(16, 90), stages=st.integers(1, 3))
def test_maps_have_their_declared_sizes(data: Any, size: int, stages: int) -> None:
    def draw(least: int, most: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(least, most)) for _ in range(stages))

    tasks = ["semantic-segmentation", "image-feature-extraction"]
    fields: dict[str, Any] = {
        "image_size": size, "hidden_sizes": (4,) * stages, "num_stage_layers": (1,) * stages,
        "num_heads": (2,) * stages, "patch_sizes": draw(1, 7), "strides": draw(1, 2), "reductions": draw(1, 2),
        "mlp_ratios": (1,) * stages, "num_channels": 1, "task": data.draw(st.sampled_from(tasks)),
    }  # fmt: skip
    c = SegFormerConfig(**fields)
    with torch.device("meta"), recorded_attentions() as weights:
        (found,) = SegFormer(c).eval()(torch.empty(3, 1, size, size)).values()
    (graph,) = c.graphs()
    assert found.shape == (3, *graph.output_tensors()[0].dims[1:])
    assert [tensor.shape for tensor in weights] == [(3, *tensor.dims[1:]) for tensor in graph.attentions]


@each_row(
    ("changes", "message"),
    [
        ({"hidden_sizes": (8,)}, "hidden_sizes has 1 stages, but num_stage_layers 2"),
        ({"strides": (2,)}, "strides has 1 stages, but hidden_sizes 2"),
        ({"reductions": (2, 0)}, r"reductions must be positive, got \[2, 0\]"),
        ({"num_heads": (2, 3)}, "8 is not divisible by num_heads 3"),
        ({"reductions": (2, 7)}, "the map of stage 1 has a side of 6, less than its reduction"),
        ({"decoder_hidden_size": 0}, "decoder_hidden_size must be positive, got 0"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegFormerConfig(**{**TWO, **changes})
