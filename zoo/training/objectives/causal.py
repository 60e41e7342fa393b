"""Causal language modelling: predict each token of a text from those before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from zoo.training.criterion import IGNORED, Batch, Criterion, Loss, Row, wide
from zoo.training.data.examples import Example

__all__ = ["CausalLM", "token_loss"]


class CausalLM(Criterion):
    """The cross-entropy of each token given those before it (Radford et al. 2018, equation 1), in nats.

    The texts form one stream, each followed by the end token, if the model has one. Blocks of ``max_length`` tokens are
    cut from it, so no token is padding and nothing is truncated.
    """

    packed = True

    def encode(self, row: Row) -> Example:
        """Return the tokens of a text. Its end is marked unless ``continues`` is set: the next row continues it."""
        ids = self.token_ids(row)
        end = self.end_id
        if end is not None and not row.get("continues") and ids[-1] != end:
            ids = self.checked([*ids.tolist(), end], "the end of text")
        return {"input_ids": ids}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        ids = torch.from_numpy(np.stack([example["input_ids"] for example in examples]).astype(np.int64))
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return token_loss(self.outputs(model, batch)["logits"], batch["targets"])


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> Loss:
    """Return the cross-entropy of logits (B, T, V) at targets (B, T); those that are ``IGNORED`` do not count."""
    counted = targets.ne(IGNORED)
    total = F.cross_entropy(wide(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    correct = logits.detach().argmax(-1).eq(targets) & counted
    return Loss(total, int(counted.sum()), int(correct.sum()))
