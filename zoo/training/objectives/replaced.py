"""Replaced-token detection, the objective of ELECTRA's discriminator (Clark et al. 2020, section 2)."""

from __future__ import annotations

import numpy as np
from torch import nn
from torch.nn import functional as F

from zoo.training.criterion import IGNORED, Batch, Ids, Loss, wide
from zoo.training.objectives.masked import Corruption

__all__ = ["ReplacedTokenDetection"]


class ReplacedTokenDetection(Corruption):
    """The binary cross-entropy of whether each token was replaced, special tokens included.

    Replacements are drawn uniformly from the vocabulary. There is no generator, which ELECTRA trains beside the
    discriminator, so replaced tokens are easier to detect than in the paper. A replacement that happens to equal the
    original counts as original, as in the paper.
    """

    def corrupt(self, ids: Ids, chosen: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
        read = ids.copy()
        read[chosen] = self.random_tokens(len(chosen), random)
        return read, (read != ids).astype(np.int32)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        counted = batch["targets"].ne(IGNORED)
        targets = batch["targets"][counted]
        logits = wide(self.outputs(model, batch)["logits"])[counted]
        total = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")
        return Loss(total, len(targets), int(logits.gt(0).eq(targets.gt(0)).sum()))
