"""Sequence-to-sequence learning: predict each token of a target from the source and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.contract import standard_fields
from zoo.nn.loss import label_smoothing_loss
from zoo.training.criterion import IGNORED, Batch, Criterion, Loss, Row, mask_of, padded
from zoo.training.data.examples import Example
from zoo.training.objectives.causal import token_loss
from zoo.training.options import SequenceToSequenceOptions

__all__ = ["SequenceToSequence"]


class SequenceToSequence(Criterion):
    """The cross-entropy of each target token, with teacher forcing and label smoothing (Vaswani et al. 2017, 5.4).

    The decoder reads the start token and the target without its last token. The target ends with the end token. It
    needs no mask: padding is on the right, which no earlier position attends to.
    """

    settings: SequenceToSequenceOptions
    models_language = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._start = standard_fields(self.config).decoder_start_token_id
        if self._start is None:
            raise ValueError("decoder_start_token_id is not set, so the first token of targets is unknown")
        if self.settings.smoothing_convention == "excluding" and standard_fields(self.config).pad_token_id is None:
            raise ValueError("smoothing_convention 'excluding' needs a model with a pad_token_id")

    def encode(self, row: Row) -> Example:
        target = self.token_ids(row, "target")
        if self.end_id is not None and target[-1] != self.end_id:
            target = np.append(target[: self.max_length - 1], np.int32(self.end_id))
        return {"input_ids": self.token_ids(row), "target": target}

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        sources, targets = ([example[name] for example in examples] for name in ("input_ids", "target"))
        read = [np.insert(target[:-1], 0, self._start or 0) for target in targets]
        return {
            "input_ids": padded(sources, self.pad_id),
            "attention_mask": mask_of(sources),
            "decoder_input_ids": padded(read, self.pad_id),
            "targets": padded(targets, IGNORED),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        targets, options = batch["targets"], self.settings
        logits = self.outputs(model, batch)["logits"]
        loss = token_loss(logits, targets)
        if not options.label_smoothing or not torch.is_grad_enabled():  # evaluation reports the plain cross-entropy
            return loss
        excluding = options.smoothing_convention == "excluding"
        padding = self.pad_id if excluding else IGNORED
        mean = label_smoothing_loss(
            logits,
            targets.masked_fill(targets.eq(IGNORED), padding),
            options.label_smoothing,
            convention=options.smoothing_convention,
            padding_id=padding,
        )
        return Loss(mean * loss.count, loss.count, loss.correct)
