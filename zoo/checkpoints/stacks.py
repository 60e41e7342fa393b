"""Stacks of tensors, such as the weights of experts, that a checkpoint holds in parts.

In a rule, ``#`` in the checkpoint's name stands for the number of a part: ``experts.#.up`` is the stack of
``experts.0.up``, ``experts.1.up`` and so on along a new first axis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zoo.checkpoints.layout import Layout
from zoo.checkpoints.source import SourceTensor
from zoo.config import Config

__all__ = ["join_stacks", "split_stacks"]

_PARALLEL = 3
"""Stacks whose parts may alternate in a file, which are kept in memory while it is written."""


def join_stacks(tensors: Mapping[str, SourceTensor], layout: Layout, config: Config) -> Mapping[str, SourceTensor]:
    """Replace the parts of each complete stack by the stack, under its name in the rules.

    Parts stay as they are if numbers are missing, or shapes or dtypes differ.
    """
    rules = layout.rules(config) if callable(layout.rules) else layout.rules
    names = [rule.theirs for rule in rules if "#" in rule.theirs]
    if not names:
        return tensors
    patterns = [
        re.compile("(?:" + re.escape(layout.prefix) + ")?" + _pattern(name.removeprefix(layout.prefix)))
        for name in names
    ]
    parts: dict[str, dict[int, str]] = {}
    for name in tensors:
        match = next(filter(None, (pattern.fullmatch(name) for pattern in patterns)), None)
        if match is not None:
            start, end = match.span("part")
            parts.setdefault(f"{name[:start]}#{name[end:]}", {})[int(match["part"])] = name
    joined = dict(tensors)
    for name, numbered in parts.items():
        ordered = [joined[numbered[number]] for number in sorted(numbered)]
        first = ordered[0]
        if sorted(numbered) == [*range(len(numbered))] and all(
            (part.shape, part.dtype) == (first.shape, first.dtype) for part in ordered
        ):
            for part in numbered.values():
                del joined[part]
            joined[name] = SourceTensor((len(ordered), *first.shape), first.dtype, _Stack(ordered))
    return joined


def split_stacks(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Invert :func:`join_stacks`."""

    @lru_cache(maxsize=_PARALLEL)
    def read(name: str) -> Tensor:
        return tensors[name].read()

    def reader(name: str, number: int) -> SourceTensor:
        stack = tensors[name]
        return SourceTensor(stack.shape[1:], stack.dtype, lambda: read(name)[number].clone())

    parts: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        if "#" not in name:
            parts[name] = tensor
            continue
        for number in range(tensor.shape[0]):
            parts[name.replace("#", str(number))] = reader(name, number)
    return parts


class _Stack:
    """Reader of a stack, one part at a time."""

    def __init__(self, parts: Sequence[SourceTensor]) -> None:
        self._parts = parts

    def __call__(self) -> Tensor:
        first = self._parts[0]
        stack = torch.empty((len(self._parts), *first.shape), dtype=first.dtype)
        for row, part in zip(stack, self._parts, strict=True):
            row.copy_(part.read())
        return stack


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*", r"\d+").replace(r"\#", r"(?P<part>0|[1-9]\d*)")
