"""Functions that torch translates wrongly, or not at all, give the same results as in PyTorch at every length."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.export.trace.test_blocks import traced, with_values
from tests.export.trace.test_guards import GRAPH, Model


def number_of_chunks(x: Tensor) -> Tensor:
    """-(-T // 3) rounds up; the operator Div rounds a negative quotient up, and the number of chunks down."""
    return x * -(-x.shape[1] // 3)


def divided_by_a_negative_number(x: Tensor) -> Tensor:
    return x * (x.shape[1] // -3)


def rounded(x: Tensor) -> Tensor:
    return x * round(x.shape[1] * 0.5)


def pooled(x: Tensor) -> Tensor:
    return x + F.adaptive_avg_pool1d(x.transpose(1, 2), 10).transpose(1, 2).cumsum(1).mean(1, keepdim=True)


def group_normed(x: Tensor) -> Tensor:
    """The mean is large, so that the mean of squares has few digits left for the variance."""
    scale, shift = torch.linspace(1, 2, 4), torch.linspace(-1, 1, 4)
    return F.group_norm((x + 3).transpose(1, 2), 2, scale, shift).transpose(1, 2)


def masked_keys(x: Tensor) -> Tensor:
    """A mask with one row for all queries."""
    visible = (torch.arange(x.shape[1]) != 1).expand(x.shape[0], 1, 1, -1)
    heads = x.unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, visible).transpose(1, 2).flatten(2)


def negative_scale(x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 2)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, scale=-0.3)
    return mixed.transpose(1, 2).flatten(2)


def scale_of_0(x: Tensor) -> Tensor:
    """Every key has the same weight."""
    heads = x.unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, scale=0.0).transpose(1, 2).flatten(2)


class PaddedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]).expand(x.shape[0], -1) == 1
        output: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ceil": lambda: Model(number_of_chunks),
    "group norm": lambda: Model(group_normed),
    "masked keys": lambda: Model(masked_keys),
    "padded attention": PaddedAttention,
    "pool": lambda: Model(pooled),
    "round": lambda: Model(rounded),
    "negative scale": lambda: Model(negative_scale),
    "scale of 0": lambda: Model(scale_of_0),
    "negative divisor": lambda: Model(divided_by_a_negative_number),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_translation_is_right_at_every_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    session = ort.InferenceSession(with_values(traced(model, monkeypatch, GRAPH), model))
    for length in range(1, 25):
        x = torch.randn(2, length, 4)
        with torch.no_grad():
            wanted = model(x).numpy()
        (found,) = session.run(None, {"x": x.numpy()})
        assert found == pytest.approx(wanted, abs=2e-6 * float(abs(wanted).max()))
