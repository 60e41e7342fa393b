"""Where a number that is not finite appears first. Importing this module imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zoo.training.criterion import Loss
from zoo.training.sharding import whole

__all__ = ["find_non_finite"]


def _is_finite(values: Any) -> bool:
    tensors = [item for item in pytree.tree_leaves(values) if isinstance(item, Tensor) and item.is_floating_point()]
    return all(bool(item.isfinite().all()) for item in tensors)


def find_non_finite(model: nn.Module, backward: Callable[[], Loss]) -> str | None:
    """Run a forward and a backward pass again, and return what the first non-finite number belongs to, or None.

    Args:
        model: the model, with the weights of the failed step.
        backward: computes the loss and its gradients, with the same random numbers as in the failed step.
    """
    for name, parameter in model.named_parameters():
        if not _is_finite(whole(parameter.detach())):
            return f"the weight {name}"
    culprits: list[str] = []

    def watch(name: str, kind: str, part: nn.Module, before: Any, after: Any) -> None:
        if not culprits and _is_finite(before) and not _is_finite(after):
            culprits.append(f"the {kind} of {name} ({type(part).__name__.removeprefix('FSDP')})")

    def watch_backward(name: str, part: nn.Module, after: Any, before: Any) -> None:
        watch(name, "gradient", part, before, after)

    handles = []
    for name, part in model.named_modules():
        named = name or type(model).__name__
        handles.append(part.register_forward_hook(partial(watch, named, "output")))
        handles.append(part.register_full_backward_hook(partial(watch_backward, named)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that hooks see gradients of outputs of the first modules
            loss = backward()
    finally:
        for handle in handles:
            handle.remove()
    if culprits:
        return culprits[0]
    if not _is_finite([term.total for term in (loss, *loss.further)]):
        return "the loss"
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if any(isinstance(item, DTensor) for item in gradients.values()):
        return None  # sums over the processes
    return next((f"the gradient of {name}" for name, item in gradients.items() if not _is_finite(item)), None)
