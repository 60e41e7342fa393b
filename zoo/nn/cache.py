"""Keys and values of the tokens already seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["Cache", "LayerCache"]


class LayerCache:
    """One layer's keys and values, (B, K, S, D) each; None before the first token."""

    __slots__ = ("key", "value")

    def __init__(self, key: Tensor | None = None, value: Tensor | None = None) -> None:
        self.key = key
        self.value = value

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the newest tokens' keys and values and return all of them."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), dim=2), torch.cat((self.value, value), dim=2)
        self.key, self.value = key, value
        return key, value


class Cache:
    """One :class:`LayerCache` a layer. ``Cache.empty(n)`` starts a sequence.

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
        """A cache that has seen nothing."""
        cache = cls(())
        cache.layers = [LayerCache() for _ in range(num_layers)]
        return cache

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Key and value of every layer."""
        for layer in self.layers:
            if layer.key is None or layer.value is None:
                raise ValueError("the cache is empty: nothing has been seen yet")
            yield layer.key, layer.value

    @property
    def length(self) -> int:
        """Tokens seen."""
        key = self.layers[0].key if self.layers else None
        return 0 if key is None else key.shape[2]
