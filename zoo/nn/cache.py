"""Key-value caches, and states of fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["Cache", "LayerCache", "LayerStates"]


class LayerCache:
    """One layer's keys and values, (B, K, S, D) each; None before the first token.

    Args:
        key: the keys of earlier tokens.
        value: their values.
        window: the number of keys that a query sees, its own included. Only the last ``window - 1`` positions are kept,
            which is all that later tokens see. None keeps all.
        dropped: number of earlier positions that are no longer kept.

    >>> layer = LayerCache(window=4)
    >>> keys = torch.zeros(1, 2, 5, 16)
    >>> for _ in range(2):
    ...     print(layer.extend(keys, keys)[0].shape[2], layer.key.shape[2], layer.length)
    5 3 5
    8 3 10
    """

    __slots__ = ("dropped", "key", "value", "window")

    def __init__(
        self,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        window: int | None = None,
        dropped: int = 0,
    ) -> None:
        self.key = key
        self.value = value
        self.window = window
        self.dropped = dropped

    @property
    def length(self) -> int:
        """Number of tokens so far, kept or not."""
        return self.dropped if self.key is None else self.dropped + self.key.shape[2]

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return them after those that were kept.

        Raises :class:`ValueError` if they have another number of heads or another size.
        """
        if self.key is not None and self.value is not None:
            for past, new in ((self.key, key), (self.value, value)):
                if (past.shape[1], past.shape[3]) != (new.shape[1], new.shape[3]):
                    raise ValueError(
                        f"the past has {past.shape[1]} heads of size {past.shape[3]}, new keys and values have "
                        f"{new.shape[1]} of size {new.shape[3]}: declare num_kv_heads and head_dim so in graphs()"
                    )
            key, value = torch.cat((self.key, key), dim=2), torch.cat((self.value, value), dim=2)
        self.key, self.value = key, value
        if self.window is not None:
            old = torch.sym_max(key.shape[2] - (self.window - 1), 0)
            self.key, self.value = key[:, :, old:], value[:, :, old:]
            self.dropped += old
        return key, value

    def seen(self, mask: Tensor | None, length: int) -> Tensor | None:
        """Return the columns of a mask (..., S) for the keys that :meth:`extend` returns, given ``length`` new ones.

        A model may call it once for all layers with a window. :class:`MultiHeadAttention` does it otherwise.
        """
        if mask is None or self.window is None:
            return mask
        return mask[..., mask.shape[-1] - length - (0 if self.key is None else self.key.shape[2]) :]


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

    Args:
        layers: the keys and values of each layer.
        windows: the windows of the layers, as in :class:`zoo.KeyValues`.
        length: number of tokens so far; by default those in the first layer.

    >>> cache = Cache.empty(1)
    >>> keys = torch.zeros(1, 2, 5, 16)  # (B, K, S, D)
    >>> for _ in range(2):
    ...     _ = cache[0].extend(keys, keys)
    >>> cache.length
    10
    """

    __slots__ = ("layers",)

    def __init__(
        self,
        layers: Iterable[tuple[Tensor, Tensor]],
        *,
        windows: Sequence[int | None] = (None,),
        length: int | None = None,
    ) -> None:
        self.layers = [
            LayerCache(
                key,
                value,
                window=windows[layer % len(windows)],
                dropped=0 if length is None else length - key.shape[2],
            )
            for layer, (key, value) in enumerate(layers)
        ]

    @classmethod
    def empty(cls, num_layers: int, *, windows: Sequence[int | None] = (None,)) -> Cache:
        """Return a cache without tokens."""
        cache = cls(())
        cache.layers = [LayerCache(window=windows[layer % len(windows)]) for layer in range(num_layers)]
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
        """Number of tokens so far, including those that no layer keeps."""
        return self.layers[0].length if self.layers else 0
