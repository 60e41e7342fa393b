"""The processes that share a run, started by torchrun. Importing this module imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn

from zoo.errors import UsageError

__all__ = ["ALONE", "Processes", "joined"]

_BUCKET = 1 << 25
"""Bytes of gradients that are exchanged at once."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run. A process on its own needs no communication."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run a block in the first process, then in the others, which find what it has written."""
        if self.count > 1 and not self.is_first:
            distributed.barrier()
        yield
        if self.count > 1 and self.is_first:
            distributed.barrier()

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.count > 1:
            distributed.barrier()

    def mine(self, items: Sequence[object]) -> range:
        """Return the places of this process's share of items: every ``count``-th one."""
        return range(self.rank, len(items), self.count)

    def check_parts(self, parts: int) -> None:
        """Raise :class:`UsageError` unless all processes have a part of each step."""
        if parts < self.count:
            what = f"a step has {parts} parts, fewer than the {self.count} processes"
            raise UsageError(what, "micro_batch_size", "choose a smaller one")

    def sums(self, *numbers: float) -> list[float]:
        """Return sums over all processes, computed in float64."""
        if self.count == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(values)
        return [float(value) for value in values.tolist()]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first process."""
        for tensor in tensors if self.count > 1 else ():
            distributed.broadcast(tensor, 0)

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes. A parameter without any in all of them keeps none."""
        if self.count == 1:
            return
        used = torch.tensor([float(item.grad is not None) for item in parameters], device=self.device)
        distributed.all_reduce(used)
        bucket: list[Tensor] = []
        for parameter, number in zip(parameters, used.tolist(), strict=True):
            if not number:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if bucket and (bucket[0].dtype != parameter.dtype or sum(item.nbytes for item in bucket) > _BUCKET):
                _add(bucket)
                bucket = []
            bucket.append(parameter.grad)
        if bucket:
            _add(bucket)


ALONE = Processes()
"""A single process, on the CPU."""


def _add(tensors: Sequence[Tensor]) -> None:
    """Sum tensors over all processes, in one exchange."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes that torchrun has started, if any, for a block: on GPUs with NCCL, otherwise with Gloo."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or count == 1:
        yield Processes(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), device)
    finally:
        distributed.destroy_process_group()
