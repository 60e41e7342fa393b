"""Zoo's keys, values and states as a cache of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache as TheirCache
from transformers import EncoderDecoderCache

from zoo import UsageError
from zoo.nn import Cache, LayerStates

__all__ = ["CrossCache", "PastCache", "SelfAndCrossCache", "cache_argument"]


def cache_argument(model: nn.Module) -> str:
    """Return the argument by which a decoder takes a cache: Mamba and its kin have another than the rest."""
    return "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"


class PastCache(TheirCache):
    """A :class:`zoo.nn.Cache` and :class:`zoo.nn.LayerStates`, with the methods that models of transformers call.

    Args:
        cache: the keys and values of earlier tokens, which are extended in place.
        states: the states after them, which are replaced.
        key_layers: the numbers, in the class, of the layers with keys and values; by default 0, 1 and so on.
        state_layers: those of the layers with states.
    """

    def __init__(  # without that of the base class, which makes layers of its own
        self,
        cache: Cache,
        states: Sequence[LayerStates] = (),
        key_layers: Sequence[int] | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        self.ours = cache
        self.past_length = cache.length
        self._keys = dict(zip(range(len(cache)) if key_layers is None else key_layers, cache.layers, strict=True))
        self._states = dict(zip(state_layers, states, strict=True))
        self.layer_class_to_replicate = None
        self.offloading = False

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """Raises :class:`zoo.UsageError`: a model that reads the layers themselves keeps more than the methods tell."""
        raise UsageError("the class keeps more of earlier tokens than keys, values and states, which is not supported")

    def __len__(self) -> int:
        return 1 + max((*self._keys, *self._states), default=-1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Append keys and values of a layer, (B, K, T, D), and return those of all tokens."""
        return self._keys[layer_idx].extend(key_states, value_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, (B, C, kernel size), None before the first token."""
        return self._state(layer_idx, _name("convolution", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs of a convolution, (B, C, T), and return them after those that were kept."""
        size = conv_kernel_size or conv_states.shape[-1]
        past = self.get_conv_state(layer_idx, state_idx)
        inputs = functional.pad(conv_states, (size, 0)) if past is None else torch.cat((past, conv_states), dim=-1)
        self._states[layer_idx][_name("convolution", state_idx)] = inputs[..., inputs.shape[-1] - size :]
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a recurrence, None before the first token."""
        return self._state(layer_idx, _name("recurrence", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the state of a recurrence."""
        self._states[layer_idx][_name("recurrence", state_idx)] = recurrent_states
        return recurrent_states

    def _state(self, layer: int, name: str) -> Tensor | None:
        """Return a state, which the class may change in place."""
        states = self._states[layer]
        if name in states:
            states[name] = states[name].clone()  # not the input of the graph
        return states.get(name)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there are states of earlier tokens."""
        return any(self._states.values())

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: a convolution calls :meth:`update_conv_state` for any number of tokens, one included."""
        return True

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
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer keeps states of a fixed size alone."""
        return [layer in self._states and layer not in self._keys for layer in range(len(self))]

    @property
    def is_dummy(self) -> list[bool]:
        """Whether a layer keeps nothing."""
        return [layer not in self._states and layer not in self._keys for layer in range(len(self))]

    @property
    def is_initialized(self) -> bool:
        """Whether the layers have tensors: a past of no tokens has, too."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether the tensors have a fixed size: they grow."""
        return False


def _name(kind: str, number: int) -> str:
    """Return the name of a layer's state, of which few classes have several of a kind."""
    return f"{kind}_{number}" if number else kind


@dataclass(frozen=True)
class _CrossLayer:
    """Keys and values of the encoder's states for one layer."""

    keys: Tensor | None
    values: Tensor | None


class CrossCache(PastCache):
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
        self.self_attention_cache = PastCache(cache)  # type: ignore[assignment]
        self.cross_attention_cache = CrossCache(cross)  # type: ignore[assignment]
        self.is_updated = dict.fromkeys(range(len(cross)), is_updated)
        self.layer_class_to_replicate = None
        self.offloading = False
