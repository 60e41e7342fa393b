"""Reversible residuals (Gomez et al. 2017): training without storing the layers' activations.

Two streams: y1 = x1 + f(x2), then y2 = x2 + g(y1). The inputs can be recovered from the outputs: x2 = y2 - g(y1), and
x1 = y1 - f(x2). The backward pass recomputes each layer's input, so memory does not grow with depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["ReversibleBlock", "run_reversible"]


class ReversibleBlock(nn.Module, ABC):
    """A layer of two halves, f and g. Neither may change a buffer; recomputation repeats the same dropout."""

    @abstractmethod
    def decide(self, x: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the discrete decisions of :meth:`attend`, such as hash buckets, as integers.

        A rounding error in a recomputed ``x`` could flip them, so they are stored and passed back on recomputation.
        """

    @abstractmethod
    def attend(self, x: Tensor, tokens: Tensor, decisions: Tensor | None = None) -> Tensor:
        """f: (B, T, E) -> (B, T, E)."""

    @abstractmethod
    def feed(self, x: Tensor) -> Tensor:
        """g: (B, T, E) -> (B, T, E)."""


def run_reversible(
    blocks: Sequence[ReversibleBlock], first: Tensor, second: Tensor, tokens: Tensor, *, forget: bool
) -> tuple[Tensor, Tensor]:
    """Run all blocks on both streams.

    Args:
        blocks: the layers.
        first: x1, (B, T, E).
        second: x2, (B, T, E).
        tokens: passed to every block.
        forget: whether to discard activations and recompute them in the backward pass, which can then run only once
            and cannot be differentiated. Only the output and the blocks' decisions, as int32, are stored.

    Returns:
        y1 and y2 of the last block.
    """
    if forget and torch.is_grad_enabled():
        parameters = tuple(dict.fromkeys(parameter for block in blocks for parameter in block.parameters()))
        outputs: tuple[Tensor, Tensor] = _Reversible.apply(tuple(blocks), first, second, tokens, *parameters)  # type: ignore[no-untyped-call]
        return outputs
    for block in blocks:
        first = first + block.attend(second, tokens)
        second = second + block.feed(first)
    return first, second


class _Reversible(torch.autograd.Function):
    """All blocks as one autograd function that saves only its output and the decisions."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: tuple[ReversibleBlock, ...],
        first: Tensor,
        second: Tensor,
        tokens: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        device = first.device
        ctx.blocks, ctx.parameters = blocks, parameters
        ctx.autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        ctx.seeds = torch.randint(2**62, (len(blocks), 2)).tolist()
        decisions = []
        for block, (attend_seed, feed_seed) in zip(blocks, ctx.seeds, strict=True):
            decided = block.decide(second, tokens)
            decisions.append(None if decided is None else decided.int())
            with _seeded(attend_seed, device):
                first = first + block.attend(second, tokens, decided)
            with _seeded(feed_seed, device):
                second = second + block.feed(first)
        ctx.save_for_backward(first, second, tokens, *decisions)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_first: Tensor, d_second: Tensor) -> tuple[Any, ...]:
        first, second, tokens, *decisions = ctx.saved_tensors
        learnt = {parameter: None for parameter in ctx.parameters if parameter.requires_grad}
        gradients: dict[Tensor, Tensor | None] = dict(learnt)

        def add(parameters: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    total = gradients[parameter]
                    gradients[parameter] = gradient if total is None else total + gradient

        device = first.device
        enabled, dtype = ctx.autocast
        for block, decided, (attend_seed, feed_seed) in zip(
            reversed(ctx.blocks), reversed(decisions), reversed(ctx.seeds), strict=True
        ):
            learnt_here = [parameter for parameter in block.parameters() if parameter in learnt]
            with torch.enable_grad(), torch.autocast(device.type, dtype, enabled), _seeded(feed_seed, device):
                read = first.detach().requires_grad_()
                output = block.feed(read)
            d_read, *found = torch.autograd.grad(output, (read, *learnt_here), d_second, allow_unused=True)
            add(learnt_here, found)
            d_first, second = d_first + d_read, second - output.detach()
            with torch.enable_grad(), torch.autocast(device.type, dtype, enabled), _seeded(attend_seed, device):
                read = second.detach().requires_grad_()
                output = block.attend(read, tokens, decided)
            d_read, *found = torch.autograd.grad(output, (read, *learnt_here), d_first, allow_unused=True)
            add(learnt_here, found)
            d_second, first = d_second + d_read, first - output.detach()
        return None, d_first, d_second, None, *(gradients.get(parameter) for parameter in ctx.parameters)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and ``device`` for this block, and restore their states afterwards."""
    accelerated = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if accelerated else []):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
