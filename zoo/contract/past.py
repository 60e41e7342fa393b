"""What a decoder keeps of earlier tokens: keys and values, and states of fixed size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from zoo.contract.dims import Dim, canonical
from zoo.contract.tensors import TensorSpec

__all__ = ["KeyValues", "States", "kept_length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValues:
    """Keys and values of every layer: tensors ``NAME.N.key`` and ``NAME.N.value``, (batch, heads, length, dim).

    A layer in which a query sees at most ``window`` keys, its own included, needs those of the last ``window - 1``
    positions alone, padding included. With ``windows``, its past has ``min(past_sequence, window - 1)`` positions, and
    what a call returns has ``min(past_sequence + sequence, window - 1)``.

    >>> past = KeyValues(name="past_key_values", num_layers=2, num_heads=4, head_dim=16, windows=(32, None))
    >>> [tensor.dims[2] for tensor in past.tensors()[::2]], past.present_tensors()[0].dims[2]
    (['min(past_sequence, 31)', 'past_sequence'], 'min(past_sequence + sequence, 31)')
    >>> past.elements(2000), past.without_windows().elements(2000)  # of one sequence of 2,000 tokens
    (259968, 512000)
    """

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    value_head_dim: int | None = None
    length: Dim = "past_sequence"
    """Number of positions, of a past by name; a fixed number for the positions of an image."""
    windows: tuple[int | None, ...] = (None,)
    """For each layer of a past, the largest number of keys that a query sees, its own included: at least 2, or None for
    all keys. The pattern repeats over the layers."""
    in_int8: bool = False
    """Whether keys and values are stored as int8, each followed by a tensor of scales, (batch, heads, length, 1) in
    float32: ``NAME.N.key`` and ``NAME.N.key_scale``. For exports: see :meth:`Graph.with_int8_cache`."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a malformed length or window."""
        object.__setattr__(self, "length", canonical(self.length))
        if not isinstance(self.windows, tuple) or not self.windows:
            raise ValueError(f"the windows of {self.name} must be a tuple of numbers or None, got {self.windows!r}")
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 2):
                raise ValueError(f"a window of {self.name} must be a number from 2 on, or None, got {window!r}")

    @property
    def has_windows(self) -> bool:
        """Whether the past of a layer is limited by a window."""
        return any(self.window(layer) is not None for layer in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        """Return the largest number of keys that a query of a layer sees; None for all."""
        return self.windows[layer % len(self.windows)]

    def without_windows(self) -> KeyValues:
        """Return the same with keys and values of all positions in every layer."""
        return replace(self, windows=(None,))

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of every layer, key before value, each followed by its scales if there are any."""
        return _key_value_tensors(self)

    def present_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of a past after a call: longer by its tokens, ``present`` for ``past_key_values``."""
        return _present_tensors(self)

    def elements_per_token(self) -> int:
        """Return the number of elements stored per token of one sequence, in the layers without a window."""
        return self._elements(sum(self.window(layer) is None for layer in range(self.num_layers)))

    def elements(self, tokens: int) -> int:
        """Return the number of elements stored for the past of one sequence of a number of tokens."""
        windows = map(self.window, range(self.num_layers))
        return self._elements(sum(tokens if window is None else min(tokens, window - 1) for window in windows))

    def _elements(self, positions: int) -> int:
        """Return the number of elements of positions of one layer."""
        return positions * self.num_heads * (self.head_dim + (self.value_head_dim or self.head_dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """States of every layer, which a call replaces by new ones of the same size: tensors ``NAME.N.STATE``.

    They are what a recurrent layer keeps of a text: the hidden state of an LSTM, the last inputs of a convolution, the
    matrix of a state-space model. At the start of a text they are zero.

    >>> from zoo.contract import floats
    >>> states = States(num_layers=2, states=(floats("hidden", "batch", 64),))
    >>> [(tensor.name, tensor.dims) for tensor in states.tensors()]
    [('past_states.0.hidden', ('batch', 64)), ('past_states.1.hidden', ('batch', 64))]
    """

    name: str = "past_states"
    """Begins with ``past``. The states after a call have ``present`` in its place."""
    num_layers: int
    states: tuple[TensorSpec, ...]
    """The states of one layer, by their names in it: the first dimension is ``batch``, the others are fixed."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a malformed state or name."""
        if not re.fullmatch(r"past_\w+", self.name) or self.name == "past_key_values":
            raise ValueError(f"bad name of states {self.name!r}: write 'past_states', or 'past_' and another word")
        if self.num_layers < 1 or not self.states:
            raise ValueError(f"{self.name} must have layers and states")
        for tensor in self.states:
            if not re.fullmatch(r"\w+", tensor.name):
                raise ValueError(f"bad name of a state {tensor.name!r} of {self.name}: use letters, digits and '_'")
            if tensor.dims[:1] != ("batch",) or not all(type(size) is int and size > 0 for size in tensor.dims[1:]):
                what = f"the state {tensor.name} of {self.name} must have the dimensions batch and fixed sizes"
                raise ValueError(f"{what}, got {tensor.dims}")
        if len({tensor.name for tensor in self.states}) < len(self.states):
            raise ValueError(f"two states of {self.name} have the same name")

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the states of all layers, in the order of layers."""
        return _state_tensors(self, self.name)

    def present_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the states after a call, named ``present_states`` for ``past_states``."""
        return _state_tensors(self, _present_name(self.name))

    def elements(self) -> int:
        """Return the number of elements that are stored for one sequence, whatever its length."""
        return self.num_layers * sum(math.prod(tensor.shape({"batch": 1})) for tensor in self.states)


# Called for each step of a generated text.
@lru_cache(maxsize=256)
def _key_value_tensors(item: KeyValues) -> tuple[TensorSpec, ...]:
    parts: list[tuple[str, int, Literal["float", "float32", "int8"]]] = []
    for part, size in (("key", item.head_dim), ("value", item.value_head_dim or item.head_dim)):
        parts += [(part, size, "int8"), (f"{part}_scale", 1, "float32")] if item.in_int8 else [(part, size, "float")]
    return tuple(
        TensorSpec(
            name=f"{item.name}.{layer}.{part}",
            dims=("batch", item.num_heads, kept_length(item.length, item.window(layer)), size),
            dtype=dtype,
        )
        for layer in range(item.num_layers)
        for part, size, dtype in parts
    )


@lru_cache(maxsize=256)
def _present_tensors(past: KeyValues) -> tuple[TensorSpec, ...]:
    after = replace(past, name=_present_name(past.name))
    return tuple(
        replace(
            tensor,
            dims=(
                *tensor.dims[:2],
                kept_length(f"{past.length} + sequence", past.window(number // count)),
                tensor.dims[3],
            ),
        )
        for count in [len(after.tensors()) // (past.num_layers or 1)]
        for number, tensor in enumerate(after.tensors())
    )


def kept_length(length: Dim, window: int | None) -> Dim:
    """Return the number of positions that a layer keeps of a text of a length, as a dimension."""
    return length if window is None else f"min({length}, {window - 1})"


def _present_name(name: str) -> str:
    """Return the name of a past after a call."""
    return name.replace("past", "present", 1) if name.startswith("past_") and name != "past_key_values" else "present"


@lru_cache(maxsize=256)
def _state_tensors(item: States, name: str) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(tensor, name=f"{name}.{layer}.{tensor.name}")
        for layer in range(item.num_layers)
        for tensor in item.states
    )
