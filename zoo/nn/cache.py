"""Key-value caches, and states of fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["Cache", "LayerCache", "LayerStates"]


class LayerCache:
    """One layer's keys and values, (B, K, S, D) each; None before the first token."""

    __slots__ = ("key", "value")

    def __init__(self, key: Tensor | None = None, value: Tensor | None = None) -> None:
        self.key = key
        self.value = value

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), dim=2), torch.cat((self.value, value), dim=2)
        self.key, self.value = key, value
        return key, value


class LayerStates(dict[str, Tensor]):
    """One layer's states by name, (B, ...) each; empty before the first token.

    A layer replaces them in each call by those after its last token. ``LayerStates.empty(n)`` starts a sequence.

    >>> first, second = LayerStates.empty(2)
    >>> hidden = first.get("hidden")  # None stands for zeros
    >>> first["hidden"] = torch.zeros(1, 16)
    """

    __slots__ = ()

    @classmethod
    def empty(cls, num_layers: int) -> list[LayerStates]:
        """Return the states of all layers before the first token."""
        return [cls() for _ in range(num_layers)]


class Cache:
    """One :class:`LayerCache` per layer. ``Cache.empty(n)`` starts a sequence.

    >>> cache = Cache.empty(1)
    >>> keys = torch.zeros(1, 2, 5, 16)  # (B, K, S, D)
    >>> for _ in range(2):
    ...     _ = cache[0].extend(keys, keys)
    >>> cache.length
    10
    """

    __slots__ = ("layers",)

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.layers = [LayerCache(key, value) for key, value in layers]

    @classmethod
    def empty(cls, num_layers: int) -> Cache:
        """Return a cache without tokens."""
        cache = cls(())
        cache.layers = [LayerCache() for _ in range(num_layers)]
        return cache

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the keys and values of all layers."""
        for layer in self.layers:
            if layer.key is None or layer.value is None:
                raise ValueError("the cache is empty: run the model on at least one token first")
            yield layer.key, layer.value

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        key = self.layers[0].key if self.layers else None
        return 0 if key is None else key.shape[2]
