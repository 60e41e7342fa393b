"""The repeated blocks of a model, and the recomputation of their activations. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_activations", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members of a model's lists of modules by name, without those inside of other members.

    Members that have no parameters, or that are called by other methods than ``forward``, are left out.
    """
    return dict(_members("", model))


def _members(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        is_block = isinstance(module, nn.ModuleList) and type(child).forward is not nn.Module.forward
        if is_block and next(child.parameters(), None) is not None:
            yield path + name, child
        else:
            yield from _members(f"{path}{name}.", child)


def checkpoint_activations(model: nn.Module) -> None:
    """Let every repeated block keep its inputs only, and compute its activations again in the backward pass.

    Random numbers are the same in both computations (Chen et al. 2016, section 4.1, with one segment for each block).
    """
    for block in repeated_blocks(model).values():
        vars(block)["forward"] = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return run
