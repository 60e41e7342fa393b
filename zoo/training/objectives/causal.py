"""Causal language modelling: predict each token of a text from those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from zoo.contract import standard_fields
from zoo.errors import UsageError
from zoo.nn import load_balancing_loss, recorded_routes
from zoo.training.criterion import IGNORED, Batch, Criterion, Loss, Row, wide
from zoo.training.data.examples import Example

__all__ = ["CausalLM", "token_loss"]


class CausalLM(Criterion):
    """The cross-entropy of each token given those before it (Radford et al. 2018, equation 1), in nats.

    The texts form one stream, each followed by the end token, if the model has one. Blocks of ``max_length`` tokens are
    cut from it, so no token is padding and nothing is truncated.

    If the model's configuration has a ``router_aux_loss``, that many times the load-balancing loss of its experts is
    added in training. It depends on the whole batch, so ``micro_batch_size`` must then not differ from ``batch_size``.
    """

    packed = True
    models_language = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._balance = standard_fields(self.config).router_aux_loss
        self.divisible = not self._balance

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
        if not self._balance or not model.training:
            return token_loss(self.outputs(model, batch)["logits"], batch["targets"])
        with recorded_routes() as routes:
            loss = token_loss(self.outputs(model, batch)["logits"], batch["targets"])
        if not routes:
            raise UsageError(f"router_aux_loss is {self._balance}, but no routes were recorded", "the model")
        return replace(loss, total=loss.total + self._balance * loss.count * load_balancing_loss(routes))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> Loss:
    """Return the cross-entropy of logits (B, T, V) at targets (B, T); those that are ``IGNORED`` do not count."""
    counted = targets.ne(IGNORED)
    total = F.cross_entropy(wide(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    correct = logits.detach().argmax(-1).eq(targets) & counted
    return Loss(total, int(counted.sum()), int(correct.sum()))
