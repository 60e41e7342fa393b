"""Cross-entropy with label smoothing, in both common conventions.

N targets, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["label_smoothing_loss"]

_Convention = Literal["uniform", "excluding"]


def label_smoothing_loss(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    *,
    convention: _Convention = "uniform",
    padding_id: int | None = None,
) -> Tensor:
    """Mean over targets of the cross-entropy -sum_v q(v) log p(v) of smoothed targets q and p = softmax(logits).

    - ``uniform`` (Szegedy et al. 2016, section 7, and torch): q is 1 - smoothing + smoothing / V at the target and
      smoothing / V everywhere else, padding included.
    - ``excluding`` (Rush 2018, The Annotated Transformer): q is 1 - smoothing at the target, 0 at ``padding_id``, and
      smoothing / (V - 2) everywhere else.

    The second was published as a Kullback-Leibler divergence, which is this loss minus the entropy of q. The entropy
    depends only on smoothing and V, so gradients are the same. Without smoothing both are the plain cross-entropy.

    Args:
        logits: (..., V).
        targets: (...), integers in [0, V), or ``padding_id``.
        smoothing: the probability removed from the target, from 0 to less than 1.
        convention: how the removed probability is distributed.
        padding_id: the target to ignore. ``excluding`` requires one within the vocabulary.

    Returns:
        A scalar in nats, in float32 or wider; 0 if all targets are ignored.

    Raises:
        ValueError: the shapes do not match, or smoothing, convention or padding_id is invalid.

    >>> logits = torch.tensor([[2.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    >>> targets = torch.tensor([0, 3])
    >>> round(label_smoothing_loss(logits, targets, 0.1).item(), 4)
    1.0026
    >>> round(label_smoothing_loss(logits, targets, 0.1, convention="excluding", padding_id=3).item(), 4)
    0.6438
    """
    size = logits.shape[-1] if logits.ndim else 0
    if logits.shape[:-1] != targets.shape or not size:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be from 0 to less than 1, got {smoothing}")
    if convention not in get_args(_Convention):
        raise ValueError(f"convention must be one of {', '.join(map(repr, get_args(_Convention)))}, got {convention!r}")
    if convention == "excluding":
        if padding_id is None or not 0 <= padding_id < size:
            raise ValueError(f"convention 'excluding' needs a padding_id within {size} logits, got {padding_id}")
        if size < 3:
            raise ValueError(f"convention 'excluding' needs 3 logits or more, got {size}")
    counts = torch.ones_like(targets, dtype=torch.bool) if padding_id is None else targets.ne(padding_id)
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # (..., V)
    at_target = log_p.gather(-1, targets.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)  # (...)
    if convention == "uniform":
        losses = -(1 - smoothing) * at_target - smoothing * log_p.mean(-1)
    else:
        assert padding_id is not None
        padding = torch.arange(size, device=logits.device).eq(padding_id)
        others = log_p.masked_fill(padding, 0).sum(-1) - at_target
        losses = -(1 - smoothing) * at_target - smoothing / (size - 2) * others
    return losses.masked_fill(~counts, 0).sum() / counts.sum().clamp(min=1)
