"""Models of transformers for tests of their import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from zoo.checkpoints import Exact

__all__ = ["AMINO_ACIDS", "generated_ids", "require_same_ids", "save_random"]

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


def generated_ids(model: Any, inputs: Any, **options: Any) -> list[list[int]]:
    """Return the ids that a model generates in float64 after prompts, given ids, mask and pixels by name."""
    model = model.double()
    feeds = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with Exact(model), torch.inference_mode():
        rows = model.generate(**feeds, pixel_values=inputs["pixel_values"].double(), do_sample=False, **options)
    return [list(map(int, row)) for row in rows[:, feeds["input_ids"].shape[1] :]]


def require_same_ids(answers: list[dict[str, Any]], wanted: list[list[int]], padding: int = 1) -> None:
    """Check the generated ids of answers, without the padding after them."""
    for answer, row in zip(answers, wanted, strict=True):
        ids = answer["generated_ids"]
        assert row[: len(ids)] == ids
        assert set(row[len(ids) :]) <= {padding}
