"""The training loop. Importing this module imports torch.

Every step is a function of the weights, the optimiser's state, the seed and the number of the step alone. A run that
is continued from a checkpoint therefore computes the same bits as one that was never interrupted.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.contract import ConstrainsWeights, PenalisesTraining
from zoo.errors import PluginError, UsageError, ZooError, ZooWarning
from zoo.models.tensors import stored_tensors
from zoo.training.batches import (
    MicroBatch,
    StepBatches,
    evaluation_batches,
    make_order,
    seed_everything,
    step_batches,
    to_device,
)
from zoo.training.blocks import checkpoint_activations
from zoo.training.criterion import Batch, Criterion, Loss, Sums
from zoo.training.data.examples import Examples
from zoo.training.finite import find_non_finite
from zoo.training.optimizer import freeze, learning_rate, make_optimizer
from zoo.training.processes import ALONE, Processes
from zoo.training.progress import Evaluation
from zoo.training.settings import TrainingSettings
from zoo.training.sharding import shard, whole
from zoo.training.speed import batch_elements, count_flops, peak_flops

__all__ = ["Step", "Trainer", "TrainingError"]

_EPOCHS = 3
"""The default number of epochs."""
_LARGEST = torch.finfo(torch.float32).max
_SHOWN = 8
"""Examples that an error message lists."""


class TrainingError(ZooError):
    """Training cannot go on: the loss or a gradient is not finite, or a step has no targets."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is known about a step after it."""

    number: int
    """From 1."""
    loss: float
    """Mean over the targets of the step, before its update; for a loss of several terms, the sum of their means."""
    accuracy: float | None
    """Share of the targets that are predicted, where that is defined."""
    targets: int
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    seconds: float
    utilization: float
    """Floating-point operations of this process per second as a share of the peak of its device, where a step is
    counted as three forward passes (Chowdhery et al. 2022, appendix B)."""


class Trainer:
    """Trains a model.

    Args:
        model: in float32; it is trained in place.
        criterion: the objective.
        examples: what to learn from.
        settings: the settings of the run.
        validation: examples for evaluations, if there are any.
        processes: those that share the run; each computes some of the parts of every step.
        guard: a context in which the code of the model and of the objective runs, which names their plugin in errors.

    Raises :class:`UsageError` if a step is divided, but the objective does not allow it.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        examples: Examples,
        settings: TrainingSettings,
        *,
        validation: Examples | None = None,
        processes: Processes = ALONE,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.settings = settings
        self.criterion = criterion
        self.validation = validation
        self._guard = guard
        self.processes = processes
        self.device = processes.device
        self.model = model
        _check_memory(model)
        freeze(model, settings.freeze)
        order = make_order(examples, settings)
        size = settings.micro_batch_size or settings.batch_size
        if not criterion.divisible and (size != settings.batch_size or processes.count > 1):
            what = "the loss of an example depends on the others in its batch, so a step cannot be divided"
            where = f"micro_batch_size {size} of batch_size {settings.batch_size}"
            raise UsageError(what, where, "leave micro_batch_size out, and use one process")
        self._size = size
        self._batches = StepBatches(examples, criterion, order, size)
        processes.check_parts(self._batches.parts)
        if self._batches.parts > 1 and processes.is_first:
            _warn_of_batch_statistics(model)
        self.sharded = settings.fsdp and processes.count > 1
        """Whether the processes divide the parameters among them."""
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        if self.sharded:
            shard(model, processes, self._try)
        else:
            model.to(self.device)
        self.optimizer = make_optimizer(model, settings)
        self.steps_per_epoch = max(1, round(len(examples) / settings.batch_size))
        epochs = settings.epochs or _EPOCHS
        self.steps = settings.max_steps or max(1, round(epochs * len(examples) / settings.batch_size))
        """Number of steps of the whole run."""
        self.done = 0
        """Number of steps that are done."""
        self.averages: dict[str, Tensor] = {}
        """The moving averages of the trained parameters, by name."""
        if settings.ema is not None:
            self.averages = {name: parameter.detach().clone() for name, parameter in self.trained()}
        self._forward: Any = torch.compile(model) if settings.compile else model
        self._element_share = self._measure()
        """Share of a second at the peak speed of the device that an element of a batch takes."""

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are trained, with their names."""
        return ((name, item) for name, item in self.model.named_parameters() if item.requires_grad)

    @property
    def size(self) -> int:
        """Number of parameters that are trained."""
        return sum(parameter.numel() for _, parameter in self.trained())

    def run(self) -> Iterator[Step]:
        """Do the remaining steps, and yield after each.

        Raises :class:`TrainingError` if a loss or a gradient is not finite, before the weights change.
        """
        with self._fixed_random_state():
            self.model.train()
            for number, parts in step_batches(
                self._batches, self.done, self.steps, self.settings.workers, self.processes
            ):
                yield self._step(number, parts)

    @contextmanager
    def _fixed_random_state(self) -> Iterator[None]:
        """Restore the random states of PyTorch, of NumPy and of Python afterwards."""
        python, numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

    def _measure(self) -> float:
        """Return the share of a second at peak speed that training on an element of a batch takes.

        Raises :class:`UsageError` if the settings need an accuracy, and the objective has none.
        """
        batch = to_device(self._batches.first(), self.device)
        self.model.eval()
        with self._fixed_random_state():
            loss, flops = count_flops(lambda: self._loss(batch, self.model))
        if loss.correct is None and self.settings.monitor == "accuracy":
            raise UsageError("the objective has no accuracy", "monitor", "loss")
        dtype = torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32
        return 3 * flops / batch_elements(batch) / peak_flops(self.device, dtype)

    @torch.no_grad()
    def _try(self) -> None:
        """Run the model on one example."""
        self.model.eval()
        self._loss(self._batches.first(), self.model)

    def _step(self, number: int, parts: Sequence[MicroBatch]) -> Step:
        started = time.perf_counter()
        rate = learning_rate(self.optimizer, self.settings, number, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        weights = self._weights(parts)
        sums = Sums(self.criterion.terms)
        for loss in [self._backward(part, weights) for part in parts]:
            sums.add(loss)
        for part in self._idle(parts):
            self._backward(part, weights, 0.0)
        sums.add_up(self.processes)
        count = sums.targets
        if not count:
            self._fail(number, parts, weights, "the examples have no targets")
        if not self.sharded:
            self.processes.add_gradients([parameter for _, parameter in self.trained()])
        self._add_penalty(count)
        gradients = [parameter.grad for _, parameter in self.trained() if parameter.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients)) / count
        if not (torch.isfinite(norm) and math.isfinite(sums.loss)):
            self._fail(number, parts, weights)
        limit = self.settings.clip_norm
        scale = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))
        self._update(gradients, scale / count)
        if isinstance(self.model, ConstrainsWeights):
            with torch.no_grad(), self._their_code():
                self.model.constrain_weights()
        self._average()
        self.done = number + 1
        seconds = time.perf_counter() - started
        elements = sum(batch_elements(part.batch) for part in parts)
        utilization = elements * self._element_share / seconds
        return Step(self.done, sums.loss, sums.accuracy, count, rate, float(norm), seconds, utilization)

    def _update(self, gradients: list[Tensor], scale: float) -> None:
        """Let the optimiser update the weights by gradients times ``scale``, which then are in their place.

        A fused optimiser scales a float32 gradient when it reads it, by dividing: that saves a pass over all of them.
        """
        divisor = 1 / scale
        optimizer: Any = self.optimizer
        fused = getattr(optimizer, "_step_supports_amp_scaling", False) and not self.sharded
        if fused and divisor < _LARGEST and all(gradient.dtype == torch.float32 for gradient in gradients):
            optimizer.grad_scale = torch.tensor(divisor, device=self.device)
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale
            return
        torch._foreach_mul_(gradients, scale)
        optimizer.step()

    def _weights(self, parts: Sequence[MicroBatch]) -> list[float]:
        """Return the weight of a target of each further term of the loss, relative to one of the first term."""
        if self.criterion.terms == 1:
            return []
        counts = zip(*(self.criterion.counts(part.batch) for part in parts), strict=True)
        first, *further = self.processes.sums(*map(sum, counts))
        return [first / count if count else 0.0 for count in further]

    def _most(self, items: int) -> int:
        """Return the largest share of a process in a number of items. Sharded models run so often in all of them."""
        return -(-items // self.processes.count)

    def _idle(self, parts: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return a part to compute without effect, if other processes have one more."""
        return parts[-1:] if self.sharded and len(parts) < self._most(self._batches.parts) else ()

    def _backward(self, part: MicroBatch, weights: Sequence[float], scale: float = 1.0) -> Loss:
        """Add the gradients of the weighted sum of a part's losses, times ``scale``."""
        seed_everything(part.seed)
        loss = self._loss(to_device(part.batch, self.device), self._forward)
        total = loss.total
        for term, weight in zip(loss.further, weights, strict=True):
            total = total + weight * term.total
        with self._their_code():
            (total * scale).backward()
        further = tuple(replace(term, total=term.total.detach()) for term in loss.further)
        return replace(loss, total=loss.total.detach(), further=further)

    @contextmanager
    def _their_code(self) -> Iterator[None]:
        """Run code of the model and of the objective, whose errors name their plugin, unless memory is exhausted."""
        try:
            with self._guard():
                yield
        except PluginError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                remedy = "set micro_batch_size, or activation_checkpointing"
                raise TrainingError(f"{self.device} is out of memory", f"step {self.done + 1}", remedy) from error
            raise

    def _add_penalty(self, count: int) -> None:
        """Add the gradients of the model's own penalty, times the number of targets."""
        if not isinstance(self.model, PenalisesTraining):
            return
        with self._their_code():
            value = whole(self.model.training_penalty())
            if value.requires_grad:
                (value * count).backward()

    def _loss(self, batch: Batch, model: Any) -> Loss:
        halves = self.settings.precision == "bfloat16"
        with (
            self._their_code(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=halves, cache_enabled=not self.sharded),
        ):
            return self.criterion.loss(model, batch)

    def _average(self) -> None:
        if self.averages:
            decay = self.settings.ema or 0.0
            torch._foreach_lerp_(list(self.averages.values()), [item.detach() for _, item in self.trained()], 1 - decay)

    def _fail(
        self, number: int, parts: Sequence[MicroBatch], weights: Sequence[float], what: str | None = None
    ) -> NoReturn:
        """Raise :class:`TrainingError` for a step, naming the module and the examples of the part at fault."""
        culprit: tuple[str, MicroBatch] | None = None
        for part in (*parts, *self._idle(parts)) if what is None else ():
            self.optimizer.zero_grad(set_to_none=True)
            module = find_non_finite(self.model, partial(self._backward, part, weights))
            if culprit is None and module is not None:
                culprit = module, part
        if culprit is not None:
            what, parts = f"{culprit[0]} is not finite", [culprit[1]]
        examples = sorted(index for part in parts for index in part.examples)
        shown = ", ".join(map(str, examples[:_SHOWN])) + (", ..." if len(examples) > _SHOWN else "")
        what = what or "a gradient of some process is not finite"
        raise TrainingError(f"{what} (examples {shown})", f"step {number + 1}")

    def evaluate(self, is_ending: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Return the loss and the accuracy on the examples for evaluation, with averaged weights if there are any.

        ``is_ending`` tells whether to give up, which returns None. Processes that share the weights go on together.
        """
        assert self.validation is not None
        self._share_buffers()
        training, sums = self.model.training, Sums(self.criterion.terms)
        self.model.eval()
        with torch.no_grad(), self.averaged():
            passes = 0
            for _, batch in evaluation_batches(self.validation, self.criterion, self._size, self.processes):
                if is_ending() and not self.sharded:
                    break
                sums.add(self._loss(to_device(batch, self.device), self._forward))
                passes += 1
            if self.sharded and passes < self._most(-(-len(self.validation) // self._size)):
                self._loss(to_device(self._batches.first(), self.device), self._forward)
        self.model.train(training)
        sums.add_up(self.processes)
        if self.processes.sums(is_ending() and not self.sharded)[0]:
            return None
        if not sums.targets:
            raise TrainingError("the examples for evaluation have no targets")
        if not math.isfinite(sums.loss):
            raise TrainingError("the loss on the examples for evaluation is not finite", f"step {self.done}")
        return Evaluation(sums.loss, sums.accuracy, sums.targets, sums.by_name(self.criterion.names))

    def check_weights(self) -> None:
        """Raise :class:`TrainingError` if a weight, a buffer or an average is not finite."""
        self._share_buffers()
        held = {**stored_tensors(self.model)[0], **{f"average of {name}": item for name, item in self.averages.items()}}
        bad = [name for name, tensor in held.items() if tensor.is_floating_point() and not _is_finite(tensor)]
        if self.processes.sums(len(bad))[0]:
            what = f"the weight {bad[0]}" if bad else "a weight of some process"
            raise TrainingError(f"{what} is not finite", f"step {self.done}")

    def _share_buffers(self) -> None:
        """Copy the buffers of the first process, such as running statistics, to the others."""
        self.processes.share(list(self.model.buffers()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the run by name: those of the model, averages, and the optimiser's state."""
        tensors = {f"weight/{name}": tensor for name, tensor in stored_tensors(self.model)[0].items()}
        tensors |= {f"average/{name}": tensor for name, tensor in self.averages.items()}
        for name, parameter in self.trained():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return tensors

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the trained parameters by their moving averages, if there are any, for a block."""
        if not self.averages:
            yield
            return
        current = {name: parameter.detach().clone() for name, parameter in self.trained()}
        self._assign(self.averages)
        try:
            yield
        finally:
            self._assign(current)

    @torch.no_grad()
    def _assign(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.trained():
            parameter.copy_(values[name])


def _is_finite(tensor: Tensor) -> bool:
    """Return whether the part of a tensor that this process holds is finite."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(part.isfinite().all())


def _check_memory(model: nn.Module) -> None:
    """Raise :class:`PluginError` for parameters that share memory but are not one parameter.

    They would be updated together, but stored and loaded as two.
    """
    places: dict[tuple[torch.device, int], str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        other = places.setdefault((parameter.device, parameter.data_ptr()), name)
        if other != name:
            what = f"{other} and {name} of {type(model).__qualname__} share memory, but are two parameters"
            raise PluginError(what, None, "assign the same nn.Parameter to both")


def _warn_of_batch_statistics(model: nn.Module) -> None:
    """Warn if a module uses statistics of the batch, and therefore computes other numbers for parts of a step."""
    batch_norm = next((name for name, part in model.named_modules() if isinstance(part, _BatchNorm)), None)
    if batch_norm is not None:
        what = f"{batch_norm} normalises by statistics of its batch: the result depends on how a step is divided"
        warnings.warn(f"{what} (micro_batch_size, number of processes)", ZooWarning, stacklevel=2)
