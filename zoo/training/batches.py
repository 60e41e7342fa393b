"""The batches of a run, each a pure function of the seed, the step and its place in the step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zoo import signals
from zoo.training.criterion import Batch, Criterion
from zoo.training.data.examples import Examples
from zoo.training.data.order import Order, generator
from zoo.training.processes import Processes
from zoo.training.settings import TrainingSettings

__all__ = ["MicroBatch", "StepBatches", "evaluation_batches", "make_order", "seed_everything", "step_batches"]

_ORDER, _EXAMPLE, _NOISE = range(3)
"""The first part of the keys of random numbers: for the order, for the contents of an example, for dropout."""


class MicroBatch:
    """A part of a step that is computed at once."""

    def __init__(self, batch: Batch, examples: Sequence[int], seed: int) -> None:
        self.batch = batch
        self.examples = examples
        self.seed = seed
        """The tensors, the numbers of the examples, and the seed of dropout."""


class StepBatches(Dataset[MicroBatch]):
    """The parts of all steps, by step and part."""

    def __init__(self, examples: Examples, criterion: Criterion, order: Order, size: int) -> None:
        self._examples = examples
        self._criterion = criterion
        self._order = order
        self._size = size

    @property
    def parts(self) -> int:
        """Number of parts of a step."""
        return -(-self._order.batch_size // self._size)

    def first(self) -> Batch:
        """Return a batch of the first example alone."""
        return self._criterion.collate([self._examples[0]], [generator(_EXAMPLE, 0)])

    def __getitem__(self, key: tuple[int, int]) -> MicroBatch:
        step, part = key
        seed = int(generator(self._order.seed, _NOISE, step, part).integers(2**63))
        seed_everything(seed)  # of criteria that use other generators than those of the examples
        positions = self._order.positions(step)[part * self._size : (part + 1) * self._size]
        indices = self._order.examples(positions).tolist()
        generators = [generator(self._order.seed, _EXAMPLE, int(position)) for position in positions]
        pairs = zip(indices, generators, strict=True)
        examples = [self._criterion.augment(self._examples[index], random) for index, random in pairs]
        batch = self._criterion.collate(examples, generators)
        return MicroBatch(batch, indices, seed)


def make_order(examples: Examples, settings: TrainingSettings) -> Order:
    """Return the order of the examples of a run."""
    lengths = examples.lengths if settings.buckets else None
    return Order(len(examples), settings.batch_size, settings.seed, lengths)


def step_batches(
    batches: StepBatches, first: int, last: int, workers: int, processes: Processes
) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Yield the steps from ``first`` to before ``last``, each with the parts of this process."""
    mine = processes.mine(range(batches.parts))
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=product(range(first, last), mine),
        num_workers=workers,
        worker_init_fn=_outlive_signals,
    )
    parts: list[MicroBatch] = []
    for (step, part), batch in zip(product(range(first, last), mine), loader, strict=True):
        parts.append(batch)
        if part == mine[-1]:
            yield step, parts
            parts = []


def _outlive_signals(_: int) -> None:
    """Let a worker prepare batches until the process that trains has finished its step."""
    signals.ignore_first()


def evaluation_batches(
    examples: Examples, criterion: Criterion, size: int, processes: Processes
) -> Iterator[tuple[list[int], Batch]]:
    """Yield this process's share of all examples, in batches of like length, with the numbers of the examples.

    What is random in them is the same in each evaluation.
    """
    lengths = examples.lengths
    order = np.arange(len(examples)) if lengths is None else np.argsort(lengths, kind="stable")
    starts = range(0, len(order), size)
    for start in (starts[place] for place in processes.mine(starts)):
        indices = order[start : start + size].tolist()
        selected, generators = [examples[index] for index in indices], [generator(_EXAMPLE, index) for index in indices]
        yield indices, criterion.collate(selected, generators)


def seed_everything(seed: int) -> None:
    """Seed the global generators of PyTorch, of NumPy and of Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
