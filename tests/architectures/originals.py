"""Models of transformers for tests of their import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from zoo.checkpoints import Exact

__all__ = [
    "AMINO_ACIDS",
    "generated_ids",
    "random_pictures",
    "require_same_ids",
    "save_random",
    "word_tokenizer",
]

_GRIDS = ("image_grid_thw", "mm_token_type_ids")
"""Outputs of processors that cut images into patches: the grid of each image, and the type of each token."""
AMINO_ACIDS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
"""The tokens of the published ESM-2."""


def save_random(model_class: str, config: Any, folder: Path) -> Any:
    """Save a random model of a class, whose parameters are large enough for its answers to differ, and return it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def word_tokenizer(vocabulary: Sequence[str], special: Sequence[str] = (), **options: Any) -> Any:
    """Return a tokenizer of words, with the options of transformers' class."""
    numbers = {word: number for number, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    backend.add_special_tokens([*special])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles, **options)


def random_pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    """Return random pictures of widths and heights, in turn of medium brightness, dark, bright and rather dark."""
    random, powers = np.random.default_rng(1), (1, 9, 0.1, 3)
    return [
        Image.fromarray((random.random((height, width, 3)) ** power * 255).astype(np.uint8))
        for (width, height), power in zip(sizes, powers, strict=False)
    ]


def generated_ids(model: Any, inputs: Any, **options: Any) -> list[list[int]]:
    """Return the ids that a model generates in float64 after prompts, given ids, mask, pixels and grids by name."""
    model = model.double()
    names = ("input_ids", "attention_mask", *(_GRIDS if _GRIDS[0] in inputs else ()))
    feeds = {name: inputs[name] for name in names}
    with Exact(model), torch.inference_mode():
        rows = model.generate(**feeds, pixel_values=inputs["pixel_values"].double(), do_sample=False, **options)
    return [list(map(int, row)) for row in rows[:, feeds["input_ids"].shape[1] :]]


def require_same_ids(answers: list[dict[str, Any]], wanted: list[list[int]], padding: int = 1) -> None:
    """Check the generated ids of answers, without the padding after them."""
    for answer, row in zip(answers, wanted, strict=True):
        ids = answer["generated_ids"]
        assert row[: len(ids)] == ids
        assert set(row[len(ids) :]) <= {padding}
