"""Checks that a model computes the same in every dtype, and whether or not torch records gradients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zoo.testing.check import CheckFailure, Inapplicable
from zoo.testing.laws.changes import LONG
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from torch import nn

    from zoo.probe.pipeline import Executor
    from zoo.testing.compute import Feeds, Results

__all__ = ["dtype_invariance", "grad_invariance"]

_ALLOWED = 4
"""Allowed difference in units of the dtype's epsilon, as in the comparison of graphs: code may use the epsilon."""


def dtype_invariance(subject: Subject) -> None:
    """The code of a model computes the same function in every dtype.

    The reference of a graph is the model in float64. Code that branches on a dtype, or looks up a number by it, makes
    that another model than the one in float32, and the difference would count as PyTorch's rounding error. Here, the
    model is computed in float64 twice: as it is, and with tensors that claim to be in float32, float16 or bfloat16.

    Let the configuration decide what to compute, not the dtype. Limits of a dtype may be used where they change
    nothing, such as ``torch.finfo(x.dtype).min`` in a mask.
    """
    import torch

    cannot_run: Exception | None = None
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        try:
            _check_dtype(subject, dtype)
        except CheckFailure:
            raise
        except Exception as error:
            cannot_run = error
    if cannot_run is not None:  # the comparison of a graph meets the errors that this dtype itself causes
        what = f"{type(cannot_run).__name__}: {cannot_run}"
        raise Inapplicable(f"the code cannot be run in float64 while it takes that for another dtype: {what}")


def _check_dtype(subject: Subject, dtype: Any) -> None:
    """Compare the model with one whose tensors claim a dtype."""
    import torch

    from zoo.probe.claimed import ClaimedDtype
    from zoo.probe.module import TorchExecutor

    situation = f"where tensors claim to be in {str(dtype).removeprefix('torch.')}"
    tolerance = _ALLOWED * torch.finfo(dtype).eps
    # Code that names float32 may do so for a part that stays in float32 in every dtype.
    for widen in (False, True) if dtype == torch.float32 else (True,):
        claiming = TorchExecutor(subject.exact, conversions=partial(ClaimedDtype, dtype, widen=widen))
        try:
            with warnings.catch_warnings(action="ignore"):  # of slower kernels for tensors in two dtypes
                _check_same(subject, claiming, situation, tolerance=tolerance)
        except Exception:
            if widen:
                raise
        else:
            return


def grad_invariance(subject: Subject) -> None:
    """Outputs are the same whether or not torch records gradients, and whether or not the weights require them.

    A graph is traced without gradients, and compared in inference mode. Training, and callers without
    ``torch.no_grad``, would use another function if the code of the model asked for the mode of gradients.

    Do not ask for ``torch.is_grad_enabled()``, ``torch.is_inference_mode_enabled()`` or ``requires_grad``. What is for
    training only depends on ``self.training``.
    """
    import torch

    from zoo.probe.module import TorchExecutor, perturb
    from zoo.testing.compute import TOLERANCE

    frozen = subject.build().double()
    perturb(frozen)
    frozen.requires_grad_(False)
    situations: list[tuple[str, nn.Module, Any]] = [
        ("without torch's inference mode", subject.exact, torch.no_grad),
        ("where torch records gradients", subject.exact, torch.enable_grad),
        ("where no weight requires gradients", frozen, torch.enable_grad),
    ]
    for situation, model, mode in situations:
        _check_same(subject, TorchExecutor(model, grad_mode=mode), situation, tolerance=TOLERANCE)


def _check_same(subject: Subject, other: Executor, situation: str, *, tolerance: float) -> None:
    """Fail unless another executor gives the model's outputs, up to a tolerance relative to the largest value."""
    from zoo.testing.compute import check_equal, counting, run

    expected = "the code computes the same function in every dtype and mode of gradients"
    for feeds, cuts, wanted in _results(subject):
        given = run(other, subject.graphs, feeds, cuts)
        check_equal(subject.graphs, wanted, given, expected, situation, counting(feeds), tolerance=tolerance)


def _results(subject: Subject) -> list[tuple[Feeds, Sequence[int], Results]]:
    """Return the inputs of a short and a long text, where they are cut if there is a past, and the model's outputs."""
    from zoo.testing.compute import LENGTH, executor, make_inputs, run

    if "modes" not in subject.shared:
        long = min(LONG, subject.longest)
        results = []
        for rows, length, cuts in ((3, LENGTH, ()), (1, long, (long // 2,) if long > 1 else ())):
            feeds = make_inputs(subject, rows=rows, length=length)
            results.append((feeds, cuts, run(executor(subject.exact), subject.graphs, feeds, cuts)))
        subject.shared["modes"] = results
    return list(subject.shared["modes"])
