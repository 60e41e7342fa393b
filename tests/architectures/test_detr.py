"""DETR: its parts, declared sizes, and contradictory configurations.

``tests/checkpoints/test_detr_checkpoints.py`` compares imported models with transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers.models.detr import modeling_detr

from tests.rows import each_row
from zoo.nn import FrozenBatchNorm, MultiHeadAttention, recorded_attentions
from zoo_plugins.detr.config import DETRConfig
from zoo_plugins.detr.model import DETR, LearnedGrid, SinusoidalGrid


def test_frozen_norm_equals_a_batch_norm_in_inference() -> None:
    torch.manual_seed(0)
    theirs: Any = nn.BatchNorm2d(5).double().eval()
    for tensor in (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var):
        tensor.detach().uniform_(0.2, 2.0)
    ours = FrozenBatchNorm(5).double()
    ours.load_state_dict({name: tensor for name, tensor in theirs.state_dict().items() if "batches" not in name})
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    assert_close(ours.train()(x), theirs(x), rtol=0, atol=1e-14)
    assert not list(ours.parameters())


def test_positions_of_keys_do_not_change_values() -> None:
    """The same weights as sequences that are projected apart, in an attention of torch."""
    torch.manual_seed(0)
    ours = MultiHeadAttention(12, 3).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    parts = [ours.query, ours.key, ours.value]
    theirs.in_proj_weight.data = torch.cat([part.weight.detach() for part in parts])
    theirs.in_proj_bias.data = torch.cat([part.bias.detach() for part in parts])
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, memory = (torch.randn(2, length, 12, dtype=torch.float64) for length in (4, 7))
    places = torch.randn(7, 12, dtype=torch.float64)
    found = ours(x, memory=ours.keys_values(memory, places))
    assert_close(found, theirs(x, memory + places, memory, need_weights=False)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("masked", [False, True])
def test_sinusoids_of_a_grid(*, masked: bool) -> None:
    x = torch.zeros(2, 12, 5, 9, dtype=torch.float64)
    mask = torch.ones(2, 5, 9, dtype=torch.bool)
    if masked:
        mask[0, 3:], mask[1, :, 6:] = False, False
    theirs = modeling_detr.DetrSinePositionEmbedding(6, normalize=True)(x.shape, "cpu", x.dtype, mask)
    found = SinusoidalGrid(12)(x, mask if masked else None)
    assert_close(found.expand(2, -1, -1), theirs.flatten(2).transpose(1, 2), rtol=0, atol=1e-13)


def test_learned_positions_of_a_grid() -> None:
    torch.manual_seed(0)
    learned: Any = modeling_detr.DetrLearnedPositionEmbedding
    theirs = learned(6)
    ours = LearnedGrid(50, 12)
    ours.row.load_state_dict(theirs.row_embeddings.state_dict())
    ours.column.load_state_dict(theirs.column_embeddings.state_dict())
    x = torch.zeros(1, 12, 5, 9)
    assert torch.equal(ours(x, None), theirs(x.shape, "cpu", x.dtype).flatten(2).transpose(1, 2))


@settings(max_examples=20, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 90), st.integers(1, 90)), stages=st.integers(1, 4), halves=st.booleans(),
    dilated=st.booleans(),
)  # fmt: skip
def test_declared_attentions_have_their_sizes(
    sides: tuple[int, int], stages: int, *, halves: bool, dilated: bool
) -> None:
    """For images of one size, a graph declares weights of the encoder, of self-attention and of cross-attention."""
    c = DETRConfig(
        image_size=sides, image_resize="stretch", num_channels=1, num_queries=3, hidden_size=8, num_layers=1,
        num_heads=2, num_decoder_heads=4, intermediate_size=8, backbone_stem_size=4,
        backbone_hidden_sizes=(4,) * stages, backbone_num_stage_layers=(2,) * stages,
        backbone_downsample_in_first_stage=halves, backbone_dilated=dilated,
    )  # fmt: skip
    with torch.device("meta"), recorded_attentions() as weights:
        outputs = DETR(c).eval()(torch.empty(2, 1, *sides))
    (graph,) = c.graphs()
    assert [tuple(item.shape) for item in weights] == [item.shape({"batch": 2}) for item in graph.attentions]
    assert {name: tuple(value.shape) for name, value in outputs.items()} == {
        "logits": (2, 3, 92), "pred_boxes": (2, 3, 4),
    }  # fmt: skip


def test_images_of_many_sizes() -> None:
    (graph,) = DETRConfig().graphs()
    assert graph.input_tensors()[0].dims == ("batch", 3, "height", "width")
    assert (graph.sizes["height"].min, graph.sizes["width"].max) == (1, 1333)
    assert not graph.attentions


def test_sizes_of_timm() -> None:
    """The library of the backbone is timm where it has one of these sizes."""
    assert DETRConfig().timm_backbone == "resnet50"
    assert DETRConfig().backbone_library == DETRConfig(backbone_dilated=True).backbone_library == "timm"
    other = DETRConfig(backbone_activation="gelu")
    assert (other.timm_backbone, other.backbone_library) == (None, "transformers")


@each_row(
    ("changes", "message"),
    [
        ({"hidden_size": 6, "num_heads": 2}, "positions 'sinusoidal' of rows and columns cannot share 6 numbers"),
        ({"max_detections": 101}, "max_detections 101 exceeds num_queries 100"),
        ({"image_crop": 0.5}, "images are not cropped, but image_crop is 0.5"),
        ({"problem_type": "regression"}, "a query has a single class, but problem_type is 'regression'"),
        ({"positions": "learned", "image_size": (800, 1601)}, "learned positions are for sides of 1600 pixels"),
        ({"backbone_dilated": True, "backbone_block": "basic"}, "dilated is for block 'bottleneck'"),
        ({"backbone_num_stage_layers": (3, 4)}, "hidden_sizes has 4 stages, but num_stage_layers 2"),
        ({"num_decoder_heads": 7}, "hidden_size 256 is not divisible by num_decoder_heads 7"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DETRConfig(**changes)
