"""The share of the machine's peak that training reaches."""

from __future__ import annotations

import torch

import zoo
from zoo.training.speed import batch_elements, count_flops, peak_flops


def test_flops_of_a_decoder() -> None:
    """Two per weight and token, and two products of queries, keys and values (Kaplan et al. 2020, table 1)."""
    model = zoo.create_model("gpt-tiny")
    config, batch, length = model.config, 3, 40
    _, counted = count_flops(lambda: model(torch.zeros(batch, length, dtype=torch.long)))
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    attention = config.num_layers * 2 * length * config.hidden_size
    assert counted == 2 * batch * length * (weights + attention)


def test_peak_is_a_plausible_speed() -> None:
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e16


def test_elements_include_padding() -> None:
    batch = {"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2, 1)}
    assert batch_elements(batch) == 12
