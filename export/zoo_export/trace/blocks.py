"""Repeated modules of a model, and their calls in the order of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["CALL", "DOMAIN", "ENTER", "LEAVE", "Block", "CallOutput", "CallSite", "GraphInput", "Outside", "patched"]


DOMAIN, ENTER, LEAVE, CALL = "zoo.trace", "Enter", "Leave", "Call"
"""Domain and operators of the markers."""


@dataclass(frozen=True)
class GraphInput:
    """An input of the graph, by index."""

    number: int


@dataclass(frozen=True)
class CallOutput:
    """A tensor returned by a call, by the indices of the call and of the tensor."""

    call: int
    number: int


@dataclass(frozen=True)
class Outside:
    """A tensor that the model computed between calls."""

    identity: int


@dataclass
class CallSite:
    """One call of a block."""

    block: Block
    path: str
    sources: list[GraphInput | CallOutput | Outside]
    traced: bool = True
    """Whether the call leaves a marker. If not, its outputs are only used by other calls."""


@dataclass
class Block:
    """Modules with the same structure."""

    paths: list[str]
    domain: str
    name: str
    first: int | None = None
    """Index of the call that is traced, or None if there is no call."""
    leader: str = ""
    """Path of the traced module."""
    inputs: tuple[str, ...] = ()
    """Names of the tensor arguments."""
    outputs: tuple[str, ...] = ()
    """Names of the returned tensors, including the updated caches."""
    tensors: tuple[str, ...] = ()
    """Names of the parameters and buffers, relative to the block."""
    stored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each path, the names of the same tensors in the model."""
    signature: Hashable = None
    result: Any = None
    returned: list[Tensor] = field(default_factory=list)
    """Latest tensors of the first call's result."""


@contextmanager
def patched(
    model: nn.Module, blocks: Iterable[Block], forward_of: Callable[[Block, str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Temporarily replace the forward methods of all blocks, which may be methods of their class or of one module."""
    own: list[tuple[Any, Any]] = []
    try:
        for block in blocks:
            for path in block.paths:
                module: Any = model.get_submodule(path)
                own.append((module, vars(module).get("forward")))
                module.forward = forward_of(block, path, module)
        yield
    finally:
        for module, forward in reversed(own):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
