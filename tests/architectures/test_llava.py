"""LLaVA: parts of a text with an image, padding, the layers of features, settings and published sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import LlavaConfig as HubConfig
from transformers import LlavaForConditionalGeneration

import zoo as library
from tests.architectures.equations import random_ids, randomized
from zoo.nn import Cache, insert_features, number_features
from zoo.registry import registry
from zoo_plugins.llama.model import Llama
from zoo_plugins.llava.config import LlavaConfig
from zoo_plugins.llava.model import Llava

IMAGE = 22
SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 12, "num_layers": 2, "max_seq_len": 40, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 6, "intermediate_size": 17, "image_token_id": IMAGE, "image_size": 9, "patch_size": 4,
    "image_hidden_size": 10, "image_num_layers": 3, "image_num_heads": 2, "image_intermediate_size": 14,
}  # fmt: skip
SIGLIP = {"patch_bias": True, "image_class_token": False, "image_pre_norm": False, "image_feature_layers": (-1,)}
VARIANTS: list[dict[str, Any]] = [
    {},
    SIGLIP,
    {"image_feature_layers": (0, 2, -1), "image_class_feature": True, "projector_bias": False},
    {"sliding_windows": (0, 7), "attention_bias": True, "tie_embeddings": True},
]


def make(**options: Any) -> Llava:
    torch.manual_seed(0)
    return randomized(Llava(LlavaConfig(**{**SIZES, **options})), scale=0.3)


def inputs(model: Llava, length: int = 30) -> tuple[Tensor, Tensor]:
    """Return two texts with an image at different places, and their images."""
    ids = random_ids(2, length) % IMAGE
    count = model.config.num_features
    ids[0, 3 : 3 + count] = IMAGE
    ids[1, 11 : 11 + count] = IMAGE
    pixels = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return ids, pixels


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (4, 5, 13), tuple(range(1, 30))], ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    """Wherever a text is cut, also among the tokens of its image."""
    model = make(**options)
    ids, pixels = inputs(model)
    features = model.encode_image(pixels)
    indices = number_features(ids, IMAGE, features.shape[1])
    cache, parts = Cache.empty(2), []
    for start, stop in pairwise((0, *cuts, 30)):
        embeddings = model.embed_with_image(ids[:, start:stop], indices[:, start:stop], features)
        parts.append(model.decode_embeddings(embeddings, None, cache))
    assert_close(torch.cat(parts, 1), model(ids, pixel_values=pixels))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    """Padding may have the token of an image, too."""
    model = make()
    ids, pixels = inputs(model, 20)
    padding = torch.full((2, 9), IMAGE)
    parts = [padding, ids] if side == "left" else [ids, padding]
    mask = torch.cat([torch.full_like(part, part is ids) for part in parts], 1)
    found = model(torch.cat(parts, 1), mask, pixel_values=pixels)
    assert_close(found[:, 9:] if side == "left" else found[:, :20], model(ids, pixel_values=pixels))


def test_text_alone_is_read_as_by_the_decoder() -> None:
    model = make()
    decoder = Llama(model.config.text).double().eval()
    names = decoder.state_dict().keys()
    decoder.load_state_dict({name: value for name, value in model.state_dict().items() if name in names})
    assert_close(model(random_ids(2, 20)), decoder(random_ids(2, 20)))


def test_only_the_image_of_a_row_matters_to_it() -> None:
    model = make()
    ids, pixels = inputs(model)
    before = model(ids, pixel_values=pixels)
    after = model(ids, pixel_values=torch.cat((pixels[:1], pixels[:1])))
    assert_close(after[0], before[0])
    assert_close(after[1, :11], before[1, :11])
    assert not torch.allclose(after[1, 11:], before[1, 11:])


def test_features_are_numbered_and_put_in_their_places() -> None:
    """Compared with a loop over tokens."""
    ids = torch.tensor([[5, 9, 9, 3, 9], [9, 9, 9, 9, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    indices = number_features(ids, 9, 2, mask)
    assert indices.tolist() == [[0, 1, 2, 0, 2], [0, 1, 2, 2, 0]]
    x, features = torch.randn(2, 5, 3), torch.randn(2, 2, 3)
    found = insert_features(x, indices, features, mask).numpy()
    for row in range(2):
        for place in range(5):
            number = int(indices[row, place])
            wanted = features[row, number - 1] if number else x[row, place]
            np.testing.assert_array_equal(found[row, place], wanted * mask[row, place])


def test_positions_of_patches_are_interpolated_for_larger_images(tmp_path: Path) -> None:
    model = library.create_model("llava-tiny")
    adapted = library.adapt(library.save(model, tmp_path / "model"), tmp_path / "larger", image_size=24)
    before, after = (item.image.position_embedding.weight for item in (model, library.load(adapted)))
    assert after.shape == (37, 48)
    assert torch.equal(after[0], before[0])
    grid = before[1:].T.reshape(1, 48, 4, 4)
    wanted = torch.nn.functional.interpolate(grid, (6, 6), mode="bicubic", align_corners=False)
    assert_close(after[1:], wanted.flatten(2)[0].T)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_feature_layers": ()}, r"image_feature_layers must be numbers from -4 to 3 for image_num_layers 3"),
        ({"image_feature_layers": (4,)}, r"image_feature_layers must be numbers from -4 to 3 .*, got \(4,\)"),
        ({"image_class_token": False, "image_class_feature": True}, "image_class_feature needs image_class_token"),
        ({"image_token_id": 23}, "image_token_id 23 lies outside vocab_size 23"),
        ({"patch_size": 10}, "patch_size 10 is larger than image_size 9"),
        ({"max_seq_len": 4}, "an image of 4 tokens leaves no room for a text in max_seq_len 4"),
        ({"image_num_heads": 3}, "image_hidden_size 10 is not divisible by image_num_heads 3"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlavaConfig(**{**SIZES, **options})


@pytest.mark.parametrize(
    ("name", "text", "parameters"),
    [
        ("llava-1.5-7b", {}, 7_063_427_072),
        (
            "llava-1.5-13b",
            {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824},
            13_351_494_656,
        ),
    ],
)
def test_published_sizes_have_as_many_parameters_as_the_original(
    name: str, text: dict[str, Any], parameters: int
) -> None:
    """The section of the decoder in the published files states no more than this."""
    c = registry().resolve(name).config
    hub = HubConfig(text_config={"model_type": "llama", "vocab_size": 32064, **text})
    with torch.device("meta"):
        theirs = LlavaForConditionalGeneration(hub)
    assert c.cost().parameters == sum(value.numel() for value in theirs.parameters()) == parameters
