"""Recurrent layers over padded rows, and additive attention, against torch and the paper's equations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.nn import AdditiveAttention, run_padded, scan_steps

KINDS = {"gru": nn.GRU, "lstm": nn.LSTM}


def random(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6, generator=generator)
    return layer.double().eval().requires_grad_(False)


def parts(last: Tensor | tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    return last if isinstance(last, tuple) else (last,)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), bidirectional=st.booleans(), num_layers=st.integers(1, 2))
def test_row_in_a_batch_equals_row_alone(kind: str, data: st.DataObject, bidirectional: bool, num_layers: int) -> None:
    """Padding may be anywhere in a row, with any content."""
    layer = random(KINDS[kind](3, 5, num_layers, batch_first=True, bidirectional=bidirectional))
    length = data.draw(st.integers(1, 7))
    row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    padding = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*padding.shape, 3, dtype=torch.float64, generator=generator)
    steps, last = run_padded(layer, x, padding)
    other_steps, other_last = run_padded(layer, torch.where(padding.bool().unsqueeze(-1), x, 9.0), padding)
    assert_close((steps, *parts(last)), (other_steps, *parts(other_last)), rtol=0, atol=0)
    for number, mask in enumerate(padding.bool()):
        assert steps[number, ~mask].count_nonzero() == 0
        found = [state[:, number : number + 1] for state in parts(last)]
        if mask.any():
            alone, wanted = layer(x[number : number + 1, mask])
            assert_close(steps[number, mask], alone[0])
            assert_close(found, list(parts(wanted)))
        else:
            assert all(state.count_nonzero() == 0 for state in found)


def test_without_a_mask_equals_the_torch_layer() -> None:
    layer = random(nn.LSTM(3, 5, batch_first=True))
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    assert_close(run_padded(layer, x, None), layer(x), rtol=0, atol=0)


def test_gradients_do_not_flow_from_padding() -> None:
    layer = nn.GRU(3, 5, batch_first=True, bidirectional=True).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]])
    steps, last = run_padded(layer, x, padding)
    (steps.square().sum() + parts(last)[0].square().sum()).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert (x.grad.abs().sum(-1) > 0).long().tolist() == padding.tolist()


def test_scan_passes_the_state_between_steps() -> None:
    x = torch.arange(1.0, 9).reshape(2, 4)
    last, sums = scan_steps(lambda total, part: (total + part, total + part), torch.zeros(2), x)
    assert_close(sums, x.cumsum(1))
    assert_close(last, x.sum(1))


def bahdanau(attention: AdditiveAttention, query: Tensor, memory: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the equations of section 3.1 in scalar loops."""
    w, u, b, v = (
        tensor.numpy()
        for tensor in (attention.query.weight, attention.key.weight, attention.key.bias, attention.score.weight[0])
    )
    (rows, queries, _), keys = query.shape, memory.shape[1]
    weights = np.zeros((rows, queries, keys))
    for row in range(rows):
        for i in range(queries):
            visible = [j for j in range(keys) if seen[row, i, j]]
            scores = [v @ np.tanh(w @ query[row, i].numpy() + u @ memory[row, j].numpy() + b) for j in visible]
            for j, score in zip(visible, scores, strict=True):
                weights[row, i, j] = np.exp(score) / sum(np.exp(scores))
    return torch.from_numpy(np.einsum("bij,bjm->bim", weights, memory.numpy())), torch.from_numpy(weights)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 3), queries=st.integers(1, 3), keys=st.integers(1, 5), seed=st.integers(0, 99))
def test_additive_attention_equals_the_paper(rows: int, queries: int, keys: int, seed: int) -> None:
    """Masked keys have weight 0; for a query that sees no key, all weights are 0."""
    generator = torch.Generator().manual_seed(seed)
    attention = random(AdditiveAttention(4, 3, 6))
    assert isinstance(attention, AdditiveAttention)
    query, memory = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((rows, queries, 4), (rows, keys, 3))
    )
    seen = torch.rand(rows, queries, keys, generator=generator) < 0.6
    wanted = bahdanau(attention, query, memory, seen)
    assert_close(attention.with_weights(query, memory, mask=seen), wanted)
    assert_close(attention(query, memory, keys=attention.keys(memory), mask=seen), wanted[0])
    everything = bahdanau(attention, query, memory, torch.ones_like(seen))
    assert_close(attention.with_weights(query, memory), everything)


def test_fully_masked_query_has_finite_gradients() -> None:
    attention = AdditiveAttention(4, 3, 6)
    query, memory = torch.randn(1, 2, 4, requires_grad=True), torch.randn(1, 5, 3)
    attention(query, memory, mask=torch.zeros(1, 1, 5, dtype=torch.bool)).sum().backward()
    assert query.grad is not None
    assert query.grad.count_nonzero() == 0
