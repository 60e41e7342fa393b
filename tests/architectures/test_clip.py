"""CLIP and SigLIP: which token represents a text, what padding and proportions of images do, and their settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.rows import each_row
from zoo.errors import ArtifactError
from zoo.images import ImageReader
from zoo_plugins.clip.config import CLIPConfig
from zoo_plugins.clip.model import CLIP

SIZES: dict[str, Any] = {
    "embedding_size": 12, "vocab_size": 50, "max_seq_len": 16, "text_hidden_size": 16, "text_num_layers": 2,
    "text_num_heads": 2, "image_size": 8, "patch_size": 4, "image_hidden_size": 12, "image_num_layers": 2,
    "image_num_heads": 3,
}  # fmt: skip
SIGLIP: dict[str, Any] = {
    "causal": False, "pad_texts": True, "text_pooling": "last", "text_head_bias": True, "patch_bias": True,
    "pre_norm": False, "image_pooling": "attention", "image_head": False, "logit_bias": True,
    "label_probabilities": "sigmoid", "activation": "gelu_tanh",
}  # fmt: skip


def make(**options: Any) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(CLIPConfig(**{**SIZES, **options})).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, 3),
        ({"end_token_id": 7}, 1),
        ({"end_token_id": 11}, 0),
        ({"text_pooling": "largest"}, 3),
        ({"text_pooling": "last"}, 5),
    ],
)
def test_a_text_is_represented_by_one_token(options: dict[str, Any], place: int) -> None:
    """The first of several; the first token of all, if there is no end. A causal encoder reads nothing after it."""
    model = make(**options)
    ids = torch.tensor([[3, 7, 9, 49, 7, 49, 30, 30]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    length = place + 1
    last = make(**options | {"text_pooling": "last", "end_token_id": None})
    assert_close(model.embed_texts(ids, mask), last.embed_texts(ids[:, :length], mask[:, :length]))
    other = ids.clone()
    other[:, length:] = 5 if options.get("text_pooling") != "largest" else 48
    assert_close(model.embed_texts(other, mask), model.embed_texts(ids, mask))


@pytest.mark.parametrize("pooling", ["end", "largest", "last"])
def test_padding_changes_nothing(pooling: str) -> None:
    """Even if it contains ends, and larger ids than the text."""
    model = make(text_pooling=pooling)
    ids = torch.tensor([[3, 9, 49, 4], [5, 49, 49, 48], [6, 8, 49, 49]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    found = model.embed_texts(ids, mask)
    for row, length in enumerate((4, 2, 2)):
        assert_close(found[row : row + 1], model.embed_texts(ids[row : row + 1, :length]))


def test_siglip_reads_padding_and_later_tokens() -> None:
    model = make(**SIGLIP)
    ids = torch.randint(2, 50, (1, 16), generator=torch.Generator().manual_seed(1))
    base = model.embed_texts(ids)
    for place in range(16):
        changed = ids.clone()
        changed[0, place] = (ids[0, place] + 1) % 50
        assert (model.embed_texts(changed) - base).abs().max() > 1e-4


@pytest.mark.parametrize("options", [{}, SIGLIP])
def test_logits_are_scaled_cosines(options: dict[str, Any]) -> None:
    """Equation 1 of the paper of SigLIP, without the labels; CLIP has no bias."""
    model = make(**options)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    ids = torch.randint(50, (3, 16), generator=generator)
    found = {name: value.numpy() for name, value in model(ids, pixels).items()}
    texts, images = model.text(ids).numpy(), model.image(pixels).numpy()
    for name, vectors in (("text_embeds", texts), ("image_embeds", images)):
        np.testing.assert_allclose(found[name], vectors / np.sqrt((vectors**2).sum(-1, keepdims=True)), rtol=1e-12)
    bias = 0.0 if model.logit_bias is None else float(model.logit_bias)
    expected = np.exp(float(model.logit_scale)) * found["image_embeds"] @ found["text_embeds"].T + bias
    np.testing.assert_allclose(found["logits_per_image"], expected, rtol=1e-12)


def test_initial_logits_are_those_of_the_papers() -> None:
    """A temperature of 0.07 for CLIP; exp(t) = 10 and b = -10 for SigLIP."""
    clip, siglip = (CLIP(CLIPConfig(**{**SIZES, **own})).requires_grad_(False) for own in ({}, SIGLIP))
    assert float(clip.logit_scale.exp()) == pytest.approx(1 / 0.07)
    assert siglip.logit_bias is not None
    assert (float(siglip.logit_scale.exp()), float(siglip.logit_bias)) == pytest.approx((10, -10))


@pytest.mark.parametrize(
    ("width", "height", "resized", "crop"),
    [(40, 20, (16, 8), (4, 0)), (20, 41, (8, 16), (0, 4)), (8, 8, (8, 8), (0, 0)), (9, 100, (8, 88), (0, 40))],
)
def test_images_keep_their_proportions(
    width: int, height: int, resized: tuple[int, int], crop: tuple[int, int]
) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = image.fromarray(pixels)
    config = CLIPConfig(**SIZES)
    reader = ImageReader.of(config.to_dict().get, 3, 8, 8)
    expected = picture.resize(resized, image.Resampling.BICUBIC).crop((*crop, crop[0] + 8, crop[1] + 8))
    assert np.array_equal(reader.read(picture), np.asarray(expected))


def test_a_narrow_strip_is_refused() -> None:
    image = pytest.importorskip("PIL.Image")
    config = CLIPConfig(**SIZES)
    reader = ImageReader.of(config.to_dict().get, 3, 64, 64)
    with pytest.raises(ArtifactError, match="60000 x 1 pixels would become 3840000 x 64, so crop the image: at most"):
        reader.read(image.new("RGB", (60_000, 1)))


@each_row(
    ("options", "message"),
    [
        ({"image_hidden_size": 10}, "image_hidden_size 10 is not divisible by image_num_heads 3"),
        ({"text_num_heads": 3}, "text_hidden_size 16 is not divisible by text_num_heads 3"),
        ({"patch_size": 9}, "patch_size 9 is larger than image_size 8"),
        ({"end_token_id": 50}, "end_token_id 50 lies outside vocab_size 50"),
        ({"pad_token_id": None, "pad_texts": True}, "pad_texts needs pad_token_id, but it is None"),
        ({"pad_token_id": -1}, "pad_token_id -1 lies outside vocab_size 50"),
        ({"text_pooling": "last", "end_token_id": 3}, "end_token_id is for text_pooling 'end', but that is 'last'"),
        ({"image_head": False, "embedding_size": 9}, "embedding_size 9 and image_hidden_size 12 must be equal"),
        ({"image_std": (1.0, 0.0, 1.0)}, "image_std must be positive"),
        ({"image_mean": (0.5,)}, "has 1 numbers for num_channels 3"),
        ({"image_crop": 1.5}, "image_crop must lie in"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CLIPConfig(**{**SIZES, **options})
