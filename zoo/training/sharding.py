"""Runs whose weights, gradients and optimiser states are divided among processes (FSDP2; Zhao et al. 2023).

Importing this module imports torch.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from zoo.training.blocks import repeated_blocks
from zoo.training.processes import Processes

__all__ = ["Collector", "find_units", "shard", "shard_like", "whole"]


def shard(model: nn.Module, processes: Processes, run: Callable[[], object]) -> None:
    """Divide the parameters of a model among all processes, and move its part of them to each process's device.

    Each unit of :func:`find_units` is gathered for its own forward and backward pass only, everything else while the
    model runs. Gradients are summed.

    Args:
        model: changed in place. Its parameters may be mapped into memory: each process copies its own part.
        processes: those that share the run.
        run: runs the model.
    """
    units = [find_units(model, run) if processes.is_first else []]
    distributed.broadcast_object_list(units, device=processes.device)
    # The losses of criteria do not change the outputs of the model in place.
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \(FSDP{type(model).__name__}\) returned a view")
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    for name in (*units[0], ""):
        unit = fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it sums


def find_units(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """Return the names of the repeated blocks that can be gathered each on its own, as a run of the model shows.

    These are called once in each call of the model, share no parameter with the rest of it, and contain no module that
    runs outside of them.
    """
    blocks = repeated_blocks(model)
    owner = {id(part): name for name, block in blocks.items() for part in block.modules()}
    owners: dict[int, set[str]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner.get(id(part), ""))
    excluded = {name for names in owners.values() if len(names) > 1 for name in names}
    calls: Counter[str] = Counter()
    active: set[str] = set()

    def enter(part: nn.Module, inputs: Any) -> None:
        name = owner.get(id(part), "")
        if part is model or blocks.get(name) is part:
            calls[name] += 1
            active.add(name)
        elif name not in active:
            excluded.add(name)

    def leave(part: nn.Module, inputs: Any, output: Any) -> None:
        active.discard(owner[id(part)])

    handles = [part.register_forward_pre_hook(enter) for part in model.modules()]
    handles += [block.register_forward_hook(leave) for block in blocks.values()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [name for name in blocks if name not in excluded and calls[name] == calls[""]]


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which each process may hold a part, whole in all of them; all must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a value on the device of a tensor, divided among the processes in the same way."""
    if not isinstance(tensor, DTensor):
        return value.to(tensor.device, copy=True)
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(value.to(tensor.device), mesh, placements, src_data_rank=None).clone()


class Collector:
    """Collects whole tensors in the first process, one at a time.

    Args:
        processes: those that share the run.
        tensors: returns the tensors of the run by name, the same names in all processes.
    """

    def __init__(self, processes: Processes, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._processes = processes
        self._tensors = tensors
        self._found: Mapping[str, Tensor] = {}
        self._is_sharded = False

    def run(self, work: Callable[[], None]) -> None:
        """Do work in the first process, while the others provide their parts of what it reads."""
        self._found = self._tensors()
        self._is_sharded = any(isinstance(tensor, DTensor) for tensor in self._found.values())
        try:
            if self._processes.is_first:
                self._lead(work)
            elif self._is_sharded:
                while (name := self._agree(None)) is not None:
                    whole(self._found[name].detach())
        finally:
            self._found = {}
        self._processes.wait()

    def _lead(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            if self._is_sharded:
                self._agree(None)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU. It is called in the first process, in the work of :meth:`run`."""
        tensor = self._found[name].detach()
        if isinstance(tensor, DTensor):
            self._agree(name)
        return whole(tensor).cpu()

    def _agree(self, name: str | None) -> str | None:
        """Return the name that the first process gives."""
        names = [name]
        distributed.broadcast_object_list(names, device=self._processes.device)
        return names[0]
