"""The arguments and results of a module's call, of which tensors can be replaced.

Tensors and caches are passed alone, or in tuples, lists and dictionaries. Other values become constants of a trace.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.nn import LayerCache, LayerStates

__all__ = ["ModuleCall", "UnfitError"]


class UnfitError(Exception):
    """A module is unsuitable as a function."""


class ModuleCall:
    """The arguments of a call of a module's ``forward``: named tensors, caches, and other values."""

    def __init__(self, forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._forward = forward
        self._bound = inspect.signature(forward).bind(*arguments, **named)
        tensors: list[tuple[str, Tensor]] = []
        self._caches: list[tuple[str, _Cache]] = []
        form = [_flatten(name, value, tensors, self._caches) for name, value in self._bound.arguments.items()]
        self.names = _distinct([name for name, _ in tensors])
        self.tensors = [tensor for _, tensor in tensors]
        self.signature = tuple(form), tuple((tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors)

    def run(self, tensors: Iterable[Tensor]) -> Any:
        """Repeat the call with the tensors replaced. Cache objects are kept."""
        rest = iter(tensors)
        for name in self._bound.arguments:
            self._bound.arguments[name] = _replace(self._bound.arguments[name], rest)
        return self._forward(*self._bound.args, **self._bound.kwargs)

    def outputs(self, result: Any) -> tuple[tuple[str, ...], list[Tensor]]:
        """Return names and tensors of the result and of the updated caches."""
        tensors: list[tuple[str, Tensor]] = []
        caches: list[tuple[str, _Cache]] = []
        _flatten("output", result, tensors, caches)
        if caches or not tensors:
            raise UnfitError("returns other values than tensors")
        for name, cache in self._caches:
            for part, tensor in _parts(cache):
                if tensor is None:
                    raise UnfitError("leaves a cache empty")
                tensors.append((f"present_{name}_{part}", tensor))
        return _distinct([name for name, _ in tensors]), [tensor for _, tensor in tensors]

    def accept(self, result: Any, tensors: Iterable[Tensor]) -> Any:
        """Return ``result`` with its tensors replaced by ``tensors``, and store the last of them in the caches."""
        rest = iter(tensors)
        result = _replace(result, rest)
        for _, cache in self._caches:
            _store(cache, [next(rest) for _ in _parts(cache)])
        return result


_Cache = LayerCache | LayerStates


def _parts(cache: _Cache) -> list[tuple[str, Tensor | None]]:
    """Return the tensors of a cache by name; the order of states does not depend on that in which a layer sets them."""
    return [("key", cache.key), ("value", cache.value)] if isinstance(cache, LayerCache) else sorted(cache.items())


def _store(cache: _Cache, tensors: Sequence[Any]) -> None:
    """Replace the tensors of a cache, in the order of :func:`_parts`."""
    if isinstance(cache, LayerCache):
        cache.key, cache.value = tensors
    else:
        cache.update(zip([name for name, _ in _parts(cache)], tensors, strict=True))


def _flatten(name: str, value: Any, tensors: list[tuple[str, Tensor]], caches: list[tuple[str, _Cache]]) -> Hashable:
    """Collect tensors and caches, named by their position; return the remaining structure."""
    if isinstance(value, Tensor):
        tensors.append((name, value))
        return Tensor
    if isinstance(value, _Cache):
        caches.append((name, value))
        window = value.window if isinstance(value, LayerCache) else None
        return (
            type(value),
            window,
            tuple((part, _flatten(f"{name}_{part}", item, tensors, caches)) for part, item in _parts(value)),
        )
    if type(value) in (tuple, list):
        return type(value), tuple(_flatten(f"{name}_{n}", item, tensors, caches) for n, item in enumerate(value))
    if type(value) is dict:
        return dict, tuple((key, _flatten(f"{name}_{key}", item, tensors, caches)) for key, item in value.items())
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, torch.SymInt):
        return int, None
    raise UnfitError(f"takes or returns a value of type {type(value).__name__}")


def _replace(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Replace the tensors in a structure, in the order of :func:`_flatten`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, _Cache):
        _store(value, [_replace(item, tensors) for _, item in _parts(value)])
        return value
    if type(value) in (tuple, list):
        return type(value)(_replace(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _replace(item, tensors) for key, item in value.items()}
    return value


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Make names unique by appending numbers to repeated ones."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(result)
