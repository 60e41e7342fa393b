"""Checkpoints: the model directory itself, with the state of the optimiser beside the weights.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zoo.errors import ArtifactError
from zoo.models.persist import write_tensors
from zoo.training.loop import Trainer
from zoo.training.sharding import shard_like

__all__ = ["STATE", "read_state", "write_state"]

STATE = "training.safetensors"
"""The state of an unfinished run; removed when training ends."""


def write_state(trainer: Trainer, file: Path, read: Callable[[str], Tensor], *, alone: bool = False) -> None:
    """Write what the weights of a checkpoint do not tell.

    These are the state of the optimiser and, if the checkpoint has averaged weights, those of the last step. If the
    file stands ``alone``, because the checkpoint has no weights, they are all trained weights and their averages.
    ``read`` returns the values of one of the tensors of :meth:`Trainer.tensors`.
    """
    trained = {f"weight/{name}" for name, _ in trainer.trained()} if trainer.averages or alone else set()
    tensors = {
        name: tensor
        for name, tensor in trainer.tensors().items()
        if name in trained or name.startswith("optimizer/") or (alone and name.startswith("average/"))
    }
    write_tensors(file, tensors, read, {"step": str(trainer.done)})


def read_state(trainer: Trainer, file: Path) -> None:
    """Continue from a checkpoint whose weights the trainer's model has, with the state that :func:`write_state` wrote.

    Raises :class:`ArtifactError` if the file is damaged or belongs to another model.
    """
    try:
        with safe_open(file, framework="pt") as reader:
            tensors: dict[str, Tensor] = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            step = int((reader.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ArtifactError(f"not the state of a training run ({error})", file) from error
    parameters = dict(trainer.trained())
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for path, value in tensors.items():
        part, _, name = path.partition("/")
        name, _, key = name.rpartition("/") if part == "optimizer" else (name, "", "")
        parameter = parameters.get(name)
        if parameter is None or (part != "optimizer" and value.shape != parameter.shape):
            raise ArtifactError(f"the state does not fit the model: {path}", file)
        if part == "optimizer":
            states[name][key] = _place(key, value, parameter)
        elif part == "average":
            trainer.averages[name].copy_(shard_like(value, parameter))
        else:
            with torch.no_grad():
                if trainer.averages and f"average/{name}" not in tensors:
                    trainer.averages[name].copy_(parameter)
                parameter.copy_(shard_like(value, parameter))
    for name, state in states.items():
        if state:
            trainer.optimizer.state[parameters[name]] = state
    trainer.done = step


def _place(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of an entry where torch keeps it: a number of steps on the CPU, others beside the parameter."""
    return value.clone() if key == "step" else shard_like(value, parameter)
