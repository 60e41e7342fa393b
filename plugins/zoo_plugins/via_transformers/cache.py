"""Zoo's keys and values as a cache of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache as TheirCache
from transformers import EncoderDecoderCache

from zoo import UsageError
from zoo.nn import Cache

__all__ = ["CrossCache", "KeyValueCache", "SelfAndCrossCache"]


class KeyValueCache(TheirCache):
    """A :class:`zoo.nn.Cache` with the methods that models of transformers call.

    Args:
        cache: the keys and values of earlier tokens, which are extended in place.
    """

    def __init__(self, cache: Cache) -> None:  # without that of the base class, which makes layers of its own
        self.ours = cache
        self.past_length = cache.length
        self.layer_class_to_replicate = None
        self.offloading = False

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """Raises :class:`zoo.UsageError`: what a model reads off the layers themselves is more than keys and values."""
        raise UsageError("the class keeps more of earlier tokens than keys and values, which is not supported")

    def __len__(self) -> int:
        return len(self.ours)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Append keys and values of a layer, (B, K, T, D), and return those of all tokens."""
        return self.ours[layer_idx].extend(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before this call."""
        return self.past_length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first new token among all."""
        return self.past_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys, and the position of the first."""
        return self.past_length + query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        """Whether a layer keeps a window alone: none does, since masks have the windows."""
        return [False] * len(self.ours)

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer keeps states of a fixed size: none does."""
        return [False] * len(self.ours)

    @property
    def is_dummy(self) -> list[bool]:
        """Whether a layer keeps nothing."""
        return [False] * len(self.ours)

    @property
    def is_compileable(self) -> bool:
        """Whether the tensors have a fixed size: they grow."""
        return False


@dataclass(frozen=True)
class _CrossLayer:
    """Keys and values of the encoder's states for one layer."""

    keys: Tensor | None
    values: Tensor | None


class CrossCache(KeyValueCache):
    """The keys and values of cross-attention, whose layers models read."""

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The keys and values of each layer."""
        return [_CrossLayer(layer.key, layer.value) for layer in self.ours.layers]


class SelfAndCrossCache(EncoderDecoderCache):
    """The keys and values of a decoder with cross-attention.

    Args:
        cache: the keys and values of earlier tokens, which are extended in place.
        cross: those of the encoder's states.
        is_updated: whether ``cross`` has them already; otherwise they are computed and stored in it.
    """

    def __init__(self, cache: Cache, cross: Cache, *, is_updated: bool) -> None:
        self.self_attention_cache = KeyValueCache(cache)  # type: ignore[assignment]
        self.cross_attention_cache = CrossCache(cross)  # type: ignore[assignment]
        self.is_updated = dict.fromkeys(range(len(cross)), is_updated)
        self.layer_class_to_replicate = None
        self.offloading = False
