"""Checks that a model computes the same in every dtype, and whether or not torch records gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zoo.plugins.places import described
from zoo.testing.check import fail
from zoo.testing.laws.changes import LONG
from zoo.testing.laws.padding import padded, sides
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from torch import nn

    from zoo.probe.pipeline import Executor
    from zoo.testing.compute import Feeds, Results

    _Call = tuple[Feeds, Sequence[int], Results | Exception]

__all__ = ["dtype_invariance", "grad_invariance"]

_ALLOWED = 16
"""Allowed difference in units of the dtype's epsilon, which code may add to its numbers."""
_ROWS = 5


def dtype_invariance(subject: Subject) -> None:
    """The code of a model computes the same function in its own dtype as in float64.

    The reference of a graph is the model in float64. Code that branches on a dtype, or looks up a number by it, makes
    that another model than the one in float32, and the difference would count as PyTorch's rounding error. Here, the
    model is computed in float64 twice: as it is, and with tensors that claim to be in the model's own dtype.

    Let the configuration decide what to compute, not the dtype. Limits of a dtype may be used where they change
    nothing, such as ``torch.finfo(x.dtype).min`` in a mask.
    """
    import torch

    for name in dict.fromkeys(("float32", subject.dtype)):
        for grad_mode in (torch.inference_mode, torch.enable_grad):
            _check_dtype(subject, name, grad_mode)


def _check_dtype(subject: Subject, name: str, grad_mode: Any) -> None:
    """Compare the model with a new one whose tensors claim a dtype."""
    import torch

    from zoo.probe.claimed import Asked, AskedDtypes, ClaimedDtype
    from zoo.probe.module import TorchExecutor

    dtype: torch.dtype = getattr(torch, name)
    expected, situation = "the code computes the same function in every dtype", f"where tensors claim to be in {name}"
    model = _model(subject)
    for feeds, cuts in _inputs(subject, long=grad_mode is torch.inference_mode):
        asked: list[Asked] = []
        record = TorchExecutor(subject.exact, conversions=partial(AskedDtypes, asked), grad_mode=grad_mode)
        wanted = _results(subject, record, feeds, cuts)
        if isinstance(wanted, Exception):  # without gradients, another law reports it
            continue
        claim = TorchExecutor(model, conversions=partial(ClaimedDtype, dtype, iter(asked)), grad_mode=grad_mode)
        given = _results(subject, claim, feeds, cuts)
        if isinstance(given, Exception):
            fail(expected, f"{situation}, it raises {described(given, subject.plugin)}")
        _check_same(subject, feeds, wanted, given, expected, situation, _ALLOWED * torch.finfo(dtype).eps)


def grad_invariance(subject: Subject) -> None:
    """Outputs are the same whether or not torch records gradients, and whether or not the weights require them.

    A graph is traced without gradients, and compared in inference mode. Training, and callers without
    ``torch.no_grad``, would use another function if the code of the model asked for the mode of gradients.

    Do not ask for ``torch.is_grad_enabled()``, ``torch.is_inference_mode_enabled()`` or ``requires_grad``. What is for
    training only depends on ``self.training``.
    """
    import torch

    from zoo.probe.module import TorchExecutor

    execute = TorchExecutor(subject.exact)
    calls = [(feeds, cuts, _results(subject, execute, feeds, cuts)) for feeds, cuts in _inputs(subject)]
    for grad_mode, mode in (
        (torch.no_grad, "outside inference mode"),
        (torch.enable_grad, "where torch records gradients"),
    ):
        for frozen, weights in ((0.0, "all weights"), (0.5, "the second half of the weights"), (1.0, "no weight")):
            some = calls[: 1 if frozen else 2]  # a long text takes time
            _check_gradients(subject, some, grad_mode, frozen, f"{mode}, with gradients of {weights}")


def _check_gradients(subject: Subject, calls: Sequence[_Call], grad_mode: Any, frozen: float, situation: str) -> None:
    """Compare the model with a new one whose first weights, ``frozen`` of all, do not require gradients."""
    import torch

    from zoo.probe.module import TorchExecutor
    from zoo.testing.compute import TOLERANCE

    model = _model(subject)
    parameters = list(model.parameters())
    for parameter in parameters[: math.ceil(frozen * len(parameters))]:
        parameter.requires_grad_(False)
    if grad_mode is torch.enable_grad and not frozen:
        model.register_forward_pre_hook(_require_gradients, with_kwargs=True)
    for feeds, cuts, wanted in calls:
        given = _results(subject, TorchExecutor(model, grad_mode=grad_mode), feeds, cuts)
        if isinstance(wanted, Exception) or isinstance(given, Exception):
            continue  # code that changes views in place has no gradients, and so no other function
        _check_same(subject, feeds, wanted, given, "outputs do not depend on gradients", situation, TOLERANCE)


def _require_gradients(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the inputs of a model as leaves of a graph of gradients, as for a map of saliency."""
    import torch

    def leaf(item: Any) -> Any:
        is_float = isinstance(item, torch.Tensor) and item.is_floating_point()
        return item.detach().requires_grad_() if is_float else item

    return tuple(map(leaf, args)), {name: leaf(item) for name, item in kwargs.items()}


def _model(subject: Subject) -> nn.Module:
    """Return a new instance of the model in float64 with the same weights, which no other mode has called."""
    model = subject.build().double()
    model.load_state_dict(subject.exact.state_dict())
    return model


def _inputs(subject: Subject, *, long: bool = True) -> Iterator[tuple[Feeds, Sequence[int]]]:
    """Yield the inputs of short texts with padding, and of a long one, with the place where it is cut."""
    from zoo.testing.compute import LENGTH, make_inputs, masks

    short = make_inputs(subject, rows=_ROWS, length=LENGTH)
    for mask, _ in masks(subject.graphs):
        short[mask.name] = padded(short[mask.name], sides(mask)[0])
    yield short, ()
    if long and subject.longest > 1:
        yield make_inputs(subject, rows=1, length=LONG), (min(LONG, subject.longest) // 2,)


def _results(subject: Subject, execute: Executor, feeds: Feeds, cuts: Sequence[int]) -> Results | Exception:
    """Return the outputs of all graphs, or the error that the model raises."""
    from zoo.testing.compute import run

    with warnings.catch_warnings(action="ignore"):  # of slower kernels for tensors in two dtypes
        try:
            return run(execute, subject.graphs, feeds, cuts)
        except Exception as error:  # a model may raise any
            return error


def _check_same(
    subject: Subject, feeds: Feeds, wanted: Results, given: Results, expected: str, situation: str, tolerance: float
) -> None:
    from zoo.testing.compute import check_equal, counting

    check_equal(subject.graphs, wanted, given, expected, situation, counting(feeds), tolerance=tolerance)
