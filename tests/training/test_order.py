"""The order of examples: a permutation in each epoch, whatever the sizes, and a function of seed and step alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.training.data.order import Order, permute

sizes = st.integers(1, 700)


@given(sizes, st.integers(0, 2**63), st.integers(0, 9))
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@given(sizes, st.integers(0, 2**63))
def test_permute_has_no_memory(size: int, seed: int) -> None:
    """Each place has its image, whichever places are asked for with it."""
    whole = permute(np.arange(size), size, seed)
    some = np.arange(0, size, 3)
    assert (permute(some, size, seed) == whole[some]).all()


def test_permutations_are_mixed() -> None:
    """Images of neighbours are as far apart as those of a random permutation, and keys give different permutations."""
    size = 10_000
    images = permute(np.arange(size), size, 0)
    assert abs(np.abs(np.diff(images)).mean() / (size / 3) - 1) < 0.03
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.04
    assert (images == permute(np.arange(size), size, 1)).mean() < 0.001


@pytest.mark.slow
@given(sizes, st.integers(1, 40), st.booleans(), st.integers(1, 200), st.integers(0, 5))
def test_every_epoch_has_every_example(size: int, batch_size: int, buckets: bool, steps: int, seed: int) -> None:
    lengths = np.arange(size) % 7 if buckets else None
    order = Order(size, batch_size, seed, lengths)
    steps = -(-steps // order.window) * order.window
    positions = np.concatenate([order.positions(step) for step in range(steps)])
    assert sorted(positions.tolist()) == list(range(steps * batch_size))
    epochs = steps * batch_size // size
    examples = order.examples(np.arange(epochs * size)).reshape(epochs, size)
    assert all(sorted(epoch.tolist()) == list(range(size)) for epoch in examples)


@given(sizes, st.integers(1, 40), st.integers(0, 300), st.integers(0, 300))
def test_step_does_not_depend_on_earlier_ones(size: int, batch_size: int, step: int, earlier: int) -> None:
    lengths = np.arange(size) % 7
    order = Order(size, batch_size, 3, lengths)
    order.positions(earlier)
    assert (order.positions(step) == Order(size, batch_size, 3, lengths).positions(step)).all()


def test_batches_have_like_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 4096)
    order = Order(4096, 32, 0, lengths)
    spreads = [np.ptp(lengths[order.examples(order.positions(step))]) for step in range(128)]
    assert np.mean(spreads) < 5
    firsts = [lengths[order.examples(order.positions(step))][0] for step in range(64)]
    assert firsts != sorted(firsts)
