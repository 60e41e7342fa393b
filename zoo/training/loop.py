"""The training loop. Importing this module imports torch.

Every step is a function of the weights, the optimiser's state, the seed and the number of the step alone. A run that
is continued from a checkpoint therefore computes the same bits as one that was never interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.training.batches import MicroBatch, StepBatches, evaluation_batches, make_order, step_batches, to_device
from zoo.training.criterion import Batch, Criterion, Loss
from zoo.training.examples import Examples
from zoo.training.finite import find_non_finite
from zoo.training.optimizer import freeze, learning_rate, make_optimizer
from zoo.training.processes import ALONE, Processes
from zoo.training.settings import TrainingSettings

__all__ = ["Evaluation", "Step", "Trainer", "TrainingError"]

_EPOCHS = 3
"""The default number of epochs."""
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
    """Mean over the targets of the step, before its update."""
    accuracy: float | None
    """Share of the targets that are predicted, where that is defined."""
    targets: int
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over all targets of the examples for evaluation."""

    loss: float
    accuracy: float | None
    targets: int


class Trainer:
    """Trains a model.

    Args:
        model: in float32; it is trained in place.
        criterion: the objective.
        examples: what to learn from.
        settings: the settings of the run.
        validation: examples for evaluations, if there are any.
        processes: those that share the run; each computes some of the parts of every step.
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
    ) -> None:
        self.settings, self.criterion, self.validation = settings, criterion, validation
        self.processes, self.device = processes, processes.device
        self.model = model.to(self.device)
        freeze(model, settings.freeze)
        self.optimizer = make_optimizer(model, settings)
        order = make_order(examples, settings)
        size = settings.micro_batch_size or settings.batch_size
        self._size, self._batches = size, StepBatches(examples, criterion, order, size)
        processes.check_parts(self._batches.parts)
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
        self.model.train()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for number, parts in step_batches(
                self._batches, self.done, self.steps, self.settings.workers, self.processes
            ):
                yield self._step(number, parts)

    def _step(self, number: int, parts: Sequence[MicroBatch]) -> Step:
        started = time.perf_counter()
        rate = learning_rate(self.optimizer, self.settings, number, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        losses = [self._backward(part) for part in parts]
        known = [loss.correct for loss in losses if loss.correct is not None]
        sums = (sum(loss.total.item() for loss in losses), sum(loss.count for loss in losses), sum(known))
        total, count, correct = self.processes.sums(*sums)
        if not count:
            self._fail(number, parts, "the examples have no targets")
        self.processes.add_gradients([parameter for _, parameter in self.trained()])
        gradients = [parameter.grad for _, parameter in self.trained() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) / count
        if not (torch.isfinite(norm) and total - total == 0):
            self._fail(number, parts)
        limit = self.settings.clip_norm
        scale = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))
        torch._foreach_mul_(gradients, scale / count)
        self.optimizer.step()
        constrain = getattr(self.model, "constrain_weights", None)
        if constrain is not None:
            with torch.no_grad():
                constrain()
        self._average()
        self.done = number + 1
        accuracy = correct / count if known else None
        return Step(self.done, total / count, accuracy, int(count), rate, float(norm), time.perf_counter() - started)

    def _backward(self, part: MicroBatch) -> Loss:
        """Add the gradients of the sum of a part's losses."""
        torch.manual_seed(part.seed)
        loss = self._loss(to_device(part.batch, self.device))
        penalty = getattr(self.model, "training_penalty", None)
        total = loss.total if penalty is None else loss.total + penalty() * loss.count
        total.backward()
        return Loss(loss.total.detach(), loss.count, loss.correct)

    def _loss(self, batch: Batch) -> Loss:
        if self.settings.precision == "float32":
            return self.criterion.loss(self._forward, batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.criterion.loss(self._forward, batch)

    def _average(self) -> None:
        if self.averages:
            kept = self.settings.ema or 0.0
            torch._foreach_lerp_(list(self.averages.values()), [item.detach() for _, item in self.trained()], 1 - kept)

    def _fail(self, number: int, parts: Sequence[MicroBatch], what: str | None = None) -> NoReturn:
        """Raise :class:`TrainingError` for a step, naming the module and the examples of the part at fault."""
        for part in parts if what is None else ():
            self.optimizer.zero_grad(set_to_none=True)
            found = find_non_finite(self.model, partial(self._backward, part))
            if found is None and not self._backward(part).total.isfinite():
                found = "the loss"
            if found is not None:
                parts, what = [part], f"{found} is not finite"
                break
        examples = sorted(index for part in parts for index in part.examples)
        shown = ", ".join(map(str, examples[:_SHOWN])) + (", ..." if len(examples) > _SHOWN else "")
        what = what or "a gradient of another process is not finite"
        raise TrainingError(f"{what} (examples {shown})", f"step {number + 1}")

    def evaluate(self) -> Evaluation:
        """Return the loss and the accuracy on the examples for evaluation, with averaged weights if there are any."""
        assert self.validation is not None
        training, total, count, correct = self.model.training, 0.0, 0, 0
        known = False
        self.model.eval()
        with torch.no_grad(), self.averaged():
            for batch in evaluation_batches(self.validation, self.criterion, self._size, self.processes):
                loss = self._loss(to_device(batch, self.device))
                total, count = total + loss.total.item(), count + loss.count
                known = loss.correct is not None
                correct += loss.correct or 0
        self.model.train(training)
        total, whole, right = self.processes.sums(total, count, correct)
        if not whole:
            raise TrainingError("the examples for evaluation have no targets")
        return Evaluation(total / whole, right / whole if known else None, int(whole))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the trained parameters by their moving averages, if there are any, for a block."""
        if not self.averages:
            yield
            return
        kept = {name: parameter.detach().clone() for name, parameter in self.trained()}
        self._assign(self.averages)
        try:
            yield
        finally:
            self._assign(kept)

    @torch.no_grad()
    def _assign(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.trained():
            parameter.copy_(values[name])
