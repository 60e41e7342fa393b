"""wav2vec 2.0: positions against torch's weight norm, lengths, masks, and configurations that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

import zoo
from zoo.contract.dims import dim_size
from zoo_plugins.wav2vec2.config import Wav2Vec2Config
from zoo_plugins.wav2vec2.model import ConvolutionalPositions, Wav2Vec2

SIZES: dict[str, Any] = {
    "vocab_size": 11, "convolution_sizes": (6, 8), "convolution_kernels": (10, 3), "convolution_strides": (5, 2),
    "convolution_norm": "layer", "hidden_size": 12, "num_layers": 2, "num_heads": 3, "intermediate_size": 20,
    "position_kernel": 4, "position_groups": 2,
}  # fmt: skip


def make(**options: object) -> Wav2Vec2:
    """Build a small float64 model in evaluation mode with random weights."""
    torch.manual_seed(0)
    model = Wav2Vec2(Wav2Vec2Config(**{**SIZES, **options})).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kernel", [1, 4, 7])
def test_positions_equal_a_convolution_with_weight_norm(kernel: int) -> None:
    ours = make(position_kernel=kernel).positions
    theirs = weight_norm(nn.Conv1d(12, 12, kernel, padding=kernel // 2, groups=2), name="weight", dim=2).double()
    weights = theirs.parametrizations.weight
    with torch.no_grad():
        weights.original0.copy_(ours.length)
        weights.original1.copy_(ours.direction)
        theirs.bias.copy_(ours.bias)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    expected = nn.functional.gelu(theirs(x.transpose(1, 2))[:, :, :9]).transpose(1, 2)
    assert_close(ours(x), expected)


def test_fresh_positions_are_of_the_size_of_their_inputs() -> None:
    positions = ConvolutionalPositions(Wav2Vec2Config())
    x = torch.randn(1, 200, 768)
    before_activation = nn.functional.conv1d(x.transpose(1, 2), positions.direction, padding=64, groups=16)
    assert 0.1 < before_activation.std() < 2
    assert_close(positions.length, torch.linalg.vector_norm(positions.direction, dim=(0, 1), keepdim=True))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=3), st.integers(0, 40))
def test_positions_are_counted_as_the_convolutions_make_them(layers: list[tuple[int, int]], more: int) -> None:
    kernels, strides = zip(*layers, strict=True)
    sizes = {"convolution_sizes": (6,) * len(layers), "convolution_kernels": kernels, "convolution_strides": strides}
    model = make(**sizes)
    samples = model.config.min_samples + more
    (graph,) = model.config.graphs()
    found = model(torch.zeros(1, samples, dtype=torch.float64))
    assert found.shape[1] == dim_size(graph.output_tensors()[0].dims[1], {"samples": samples})
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, model.config.min_samples - 1, dtype=torch.float64))


@pytest.mark.parametrize("task", ["ctc-speech-recognition", "audio-classification"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_padding_changes_nothing(task: str, norm_first: bool) -> None:
    model = make(task=task, norm_first=norm_first)
    lengths = (70, 41, 20)
    sounds: list[Tensor] = [torch.randn(length, dtype=torch.float64) for length in lengths]
    mask = (torch.arange(70) < torch.tensor(lengths)[:, None]).long()
    rows = torch.full((3, 70), torch.nan, dtype=torch.float64)
    for row, sound in zip(rows, sounds, strict=True):
        row[: len(sound)] = sound
    found = model(rows, mask)
    for row, sound in zip(found, sounds, strict=True):
        (alone,) = model(sound[None], torch.ones(1, len(sound), dtype=torch.long))
        assert_close(row if row.ndim == 1 else row[: len(alone)], alone)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"convolution_strides": (5,)}, "must have as many numbers as each other, got [2, 2, 1]"),
        ({"convolution_kernels": (10, 0)}, "convolution_kernels must be positive numbers, got (10, 0)"),
        ({"position_groups": 5}, "hidden_size 12 is not divisible by position_groups 5"),
        ({"pad_token_id": 11}, "pad_token_id 11 lies outside vocab_size 11"),
    ],
    ids=str,
)
def test_bad_configurations_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Wav2Vec2Config(**{**SIZES, **settings_})
    assert message in str(caught.value)


def test_another_task_keeps_the_encoder() -> None:
    model = zoo.create_model("wav2vec2-tiny")
    other = zoo.create_model("wav2vec2-tiny", task="audio-classification", num_classes=3)
    assert {name for name in model.state_dict() if not name.startswith("head")} == {
        name for name in other.state_dict() if not name.startswith(("projector", "classifier"))
    }
