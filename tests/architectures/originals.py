"""Models of transformers for tests of their import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["AMINO_ACIDS", "save_random"]

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
