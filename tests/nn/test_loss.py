"""Label smoothing against torch's two losses, with explicit target distributions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from zoo.nn import label_smoothing_loss


def make(rows: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw float64 logits with gradients, and targets of which a third are the vocabulary's last entry."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, size, (rows,), generator=generator)
    targets[::3] = size - 1
    return logits.requires_grad_(), targets


def distribution(target: int, size: int, smoothing: float, padding_id: int) -> list[float]:
    """Build the target distributions of The Annotated Transformer in loops."""
    row = [smoothing / (size - 2)] * size
    row[target] = 1 - smoothing
    row[padding_id] = 0.0
    return row


CASES = {
    "rows": st.integers(2, 7),
    "size": st.integers(3, 9),
    "smoothing": st.floats(0, 0.99),
    "seed": st.integers(0, 99),
}


@settings(deadline=None, max_examples=50)
@given(**CASES, padded=st.booleans())
def test_uniform_equals_torch_cross_entropy(rows: int, size: int, smoothing: float, seed: int, padded: bool) -> None:
    """Values and gradients agree, with padding and without."""
    logits, targets = make(rows, size, seed)
    targets[-1] = 0  # at least one target is not padding
    padding_id = size - 1 if padded else None
    ignored = {} if padding_id is None else {"ignore_index": padding_id}
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing, **ignored)
    found = label_smoothing_loss(logits, targets, smoothing, padding_id=padding_id)
    assert_close(found, expected, rtol=0, atol=1e-12)
    assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found, expected)), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(**CASES, padding=st.integers(0, 8))
def test_excluding_equals_divergence_from_explicit_targets(
    rows: int, size: int, smoothing: float, seed: int, padding: int
) -> None:
    """The loss is the divergence plus the entropy of the targets, so gradients are equal."""
    logits, targets = make(rows, size, seed)
    padding_id = padding % size
    targets[-1] = (padding_id + 1) % size
    kept = [row for row, target in enumerate(targets.tolist()) if target != padding_id]
    wanted = [distribution(int(targets[row]), size, smoothing, padding_id) for row in kept]
    assert all(math.isclose(sum(row), 1) for row in wanted)
    expected = torch.nn.KLDivLoss(reduction="batchmean")(
        logits.log_softmax(-1)[kept], torch.tensor(wanted, dtype=torch.float64)
    )
    entropy = -sum(q * math.log(q) for q in wanted[0] if q)
    found = label_smoothing_loss(logits, targets, smoothing, convention="excluding", padding_id=padding_id)
    assert_close(found.item(), expected.item() + entropy, rtol=0, atol=1e-11)
    assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found, expected)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("convention", ["uniform", "excluding"])
def test_without_smoothing_equals_cross_entropy(convention: str) -> None:
    """Any number of leading dimensions is accepted, too."""
    logits, targets = make(12, 6, 1)
    expected = F.nll_loss(logits.log_softmax(-1), targets, ignore_index=2)
    found = label_smoothing_loss(
        logits.view(3, 4, 6), targets.view(3, 4), 0.0, convention=convention, padding_id=2
    )  # fmt: skip
    assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("convention", ["uniform", "excluding"])
def test_padding_does_not_contribute(convention: str) -> None:
    """Logits and amount of padding do not matter; with padding only, the loss and its gradient are 0."""
    logits, targets = make(5, 6, 2)
    targets[:] = torch.tensor([1, 4, 0, 0, 3])
    options = {"convention": convention, "padding_id": 0}
    whole = label_smoothing_loss(logits, targets, 0.1, **options)
    assert_close(whole, label_smoothing_loss(logits[[0, 1, 4]], targets[[0, 1, 4]], 0.1, **options))
    gradient = torch.autograd.grad(whole, logits)[0]
    assert not gradient[2:4].any()
    assert gradient[[0, 1, 4]].any()
    nothing = label_smoothing_loss(logits, torch.zeros_like(targets), 0.1, **options)
    assert nothing.item() == 0
    assert not torch.autograd.grad(nothing, logits)[0].any()


def test_padding_id_outside_the_vocabulary() -> None:
    """Other libraries mark ignored targets this way."""
    logits, targets = make(5, 6, 3)
    targets[2] = -100
    expected = F.cross_entropy(logits, targets, label_smoothing=0.3)
    assert_close(label_smoothing_loss(logits, targets, 0.3, padding_id=-100), expected, rtol=0, atol=1e-12)


def test_padding_logit_may_be_minus_infinity() -> None:
    """Its logit may be minus infinity, since its target probability is 0."""
    logits, targets = make(4, 5, 4)
    targets[:] = torch.tensor([1, 2, 3, 4])
    logits = logits.detach().clone()
    logits[:, 0] = -math.inf
    logits.requires_grad_()
    loss = label_smoothing_loss(logits, targets, 0.1, convention="excluding", padding_id=0)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_half_precision_is_summed_in_float32() -> None:
    """A sum over a vocabulary of 4,000 would lose digits in half precision."""
    logits, targets = make(8, 4000, 5)
    half = logits.detach().half()
    found = label_smoothing_loss(half, targets, 0.1)
    assert found.dtype == torch.float32
    assert_close(found.double(), label_smoothing_loss(half.double(), targets, 0.1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("shape", "targets", "options", "message"),
    [
        ((2, 4), (3,), {}, r"targets \(3,\) do not fit logits \(2, 4\)"),
        ((2, 0), (2,), {}, r"targets \(2,\) do not fit logits \(2, 0\)"),
        ((2, 4), (2,), {"smoothing": 1.0}, "smoothing must be from 0 to less than 1, got 1.0"),
        ((2, 4), (2,), {"smoothing": -0.1}, "smoothing must be from 0 to less than 1, got -0.1"),
        ((2, 4), (2,), {"smoothing": math.nan}, "smoothing must be from 0 to less than 1, got nan"),
        ((2, 4), (2,), {"convention": "unifrom"}, "convention must be one of 'uniform', 'excluding', got 'unifrom'"),
        ((2, 4), (2,), {"convention": "excluding"}, "'excluding' needs a padding_id within 4 logits, got None"),
        ((2, 4), (2,), {"convention": "excluding", "padding_id": 4}, "needs a padding_id within 4 logits, got 4"),
        ((2, 2), (2,), {"convention": "excluding", "padding_id": 0}, "'excluding' needs 3 logits or more, got 2"),
    ],
)
def test_invalid_arguments_are_rejected(
    shape: tuple[int, ...], targets: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        label_smoothing_loss(
            torch.zeros(shape), torch.zeros(targets, dtype=torch.long), **{"smoothing": 0.1, **options}
        )
