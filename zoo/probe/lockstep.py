"""Evaluation of a model at several inputs at once, so that each weight is converted once for all of them.

A product of few rows with a large weight takes about as long as reading and converting the weight. Every input is
evaluated by a thread of its own, on a copy of the modules that has the same weights. A thread runs until it needs a
product with a :class:`zoo.probe.widened.WideWeight`. When all threads wait for one, those that wait for the same weight
get it from a single product. One thread runs at a time, so a model need not be thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from zoo.modules.factory import copy_sharing_tensors
from zoo.probe.widened import Ask, WideWeight, asking, product

__all__ = ["copies", "is_wide", "run_together"]

Result = TypeVar("Result")


def copies(model: nn.Module, number: int) -> list[nn.Module]:
    """Return copies of a model's modules with the same parameters and buffers, whose other attributes are their own."""
    return [copy_sharing_tensors(model) for _ in range(number)]


def run_together(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call functions that evaluate models with wide weights in common, and return their results.

    The error of the first function that fails is raised after all have ended.
    """
    threads: list[_Thread[Result]] = [_Thread(function) for function in functions]
    waiting = list(threads)
    while waiting:
        for thread in waiting:
            if thread.needs is None:
                thread.resume()
        waiting = [thread for thread in waiting if not thread.ended]
        groups: dict[tuple[int, int], list[_Thread[Result]]] = {}
        for thread in waiting:
            assert thread.needs is not None
            _, weight, bias = thread.needs
            groups.setdefault((id(weight.stored), id(bias)), []).append(thread)
        if groups:
            _multiply(max(groups.values(), key=len))
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return [thread.results[0] for thread in threads]


@dataclass
class _Thread(Generic[Result]):
    """A thread that runs a function until it needs a product."""

    function: Callable[[], Result]
    results: list[Result] = field(default_factory=list)
    error: BaseException | None = None
    needs: Ask | None = None
    product: Tensor | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self._mine = threading.Semaphore(0)
        self._theirs = threading.Semaphore(0)
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._mine.acquire()
        try:
            with asking(self._ask):
                self.results.append(self.function())
        except BaseException as error:  # raised by run_together
            self.error = error
        self.ended = True
        self._theirs.release()

    def _ask(self, needs: Ask) -> Tensor:
        self.needs = needs
        self._theirs.release()
        self._mine.acquire()
        assert self.product is not None
        product, self.product = self.product, None
        return product

    def resume(self) -> None:
        """Let the thread run until it needs a product or has ended."""
        self._mine.release()
        self._theirs.acquire()


def _multiply(threads: Sequence[_Thread[Any]]) -> None:
    """Compute the products of threads with one weight."""
    asked = [thread.needs for thread in threads if thread.needs is not None]
    _, weight, bias = asked[0]
    with torch.inference_mode(False), torch.no_grad():
        rows = [x.reshape(-1, x.shape[-1]) for x, _, _ in asked]
        joint = product(torch.cat(rows) if len(rows) > 1 else rows[0], weight, bias)
        for thread, part, (x, _, _) in zip(threads, joint.split([len(item) for item in rows]), asked, strict=True):
            thread.product, thread.needs = part.reshape(*x.shape[:-1], len(weight)), None


def is_wide(model: nn.Module) -> bool:
    """Return whether a model has wide weights."""
    return any(isinstance(weight, WideWeight) for weight in model.parameters())
