"""The model contract: the inputs and outputs of a model's graphs, with named dimensions.

The exported signature, the dynamic shapes, the parity inputs and the runtime's feeds all follow from these
declarations. The module is torch-free, so describing a model never loads torch.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal

__all__ = [
    "RESERVED_COMMANDS",
    "Architecture",
    "AttentionInputs",
    "Command",
    "Dataset",
    "Dim",
    "Engine",
    "Exporter",
    "Graph",
    "Importer",
    "KeyValues",
    "Objective",
    "Size",
    "States",
    "Task",
    "TensorSpec",
    "Tracker",
    "attentions",
    "causal_graph",
    "dim_names",
    "dim_size",
    "fit_sizes",
    "floats",
    "is_quotient",
    "mask",
    "row_sizes",
    "rows_of",
    "sizes_of",
    "token_ids",
]

RESERVED_COMMANDS = frozenset(
    {"adapt", "build", "get", "import", "list", "plugins", "show", "tokenizer", "train", "why"}
)
"""Names of built-in commands, which plugins cannot use."""

Dim = str | int
"""A fixed size, or the name of a dimension that is free at run time. A sum, such as ``past_sequence + sequence``, a
quotient rounded down, such as ``frames // 4`` or ``(frames + 3) // 4``, or a minimum, such as
``min(past_sequence, 31)``, is a dimension of that size."""


def dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the size of ``dim``, given the size of each named dimension, or its own.

    >>> dim_size("frames // 4 + 1", {"frames": 11}), dim_size("frames // 4", {"frames // 4": 2})
    (3, 2)
    """
    if isinstance(dim, int):
        return dim
    return sizes[dim] if dim in sizes else _evaluate(_parse(dim), sizes)


def dim_names(dim: Dim) -> tuple[str, ...]:
    """Return the named dimensions on which the size of ``dim`` depends.

    >>> dim_names("(frames + 3) // 4"), dim_names(64)
    (('frames',), ())
    """
    return () if isinstance(dim, int) else tuple(dict.fromkeys(re.findall(r"[^\W\d]\w*(?!\w*\()", dim)))


def is_quotient(dim: Dim) -> bool:
    """Return whether the size of ``dim`` is, or contains, a quotient."""
    return "//" in str(dim)


@cache
def _parse(dim: str) -> ast.expr:
    """Parse a dimension. Raises :class:`ValueError` unless it has names, numbers, sums, quotients and minima only."""
    try:
        tree = ast.parse(dim.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        tree = ast.Constant(None)
    if not dim_names(dim) or not all(map(_is_allowed, ast.walk(tree))):
        known = "a name, or a sum or quotient such as 'past_sequence + sequence' or '(frames + 3) // 4'"
        known += ", or a minimum such as 'min(frames, 31)'"
        raise ValueError(f"bad dimension {dim!r}: write a number, {known}")
    return tree


def _is_allowed(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.FloorDiv(), right=ast.Constant(value=int(divisor))):
            return divisor > 0
        case ast.Call(func=ast.Name(id="min"), args=[_, _], keywords=[]):
            return True
        case ast.Constant(value=number):
            return type(number) is int
        case _:
            return isinstance(node, ast.Name | ast.Load | ast.Add | ast.FloorDiv) or (
                isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
            )


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left, sizes) + _evaluate(right, sizes)
        case ast.BinOp(left=left, right=right):
            return _evaluate(left, sizes) // _evaluate(right, sizes)
        case ast.Call(args=arguments):
            return min(_evaluate(argument, sizes) for argument in arguments)
        case _:
            return int(ast.literal_eval(node))


def _canonical(dim: Dim) -> Dim:
    """Return a dimension with the usual spaces, so that equal ones are equal strings."""
    return dim if isinstance(dim, int) else ast.unparse(_parse(dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The sizes that a free dimension may have.

    >>> size = Size(min=80, multiple_of=16)
    >>> size.allows(96), size.allows(100), size.nearest(100)
    (True, False, 112)
    >>> print(size)
    at least 80, a multiple of 16
    """

    min: int = 1
    max: int | None = None
    """None if there is no limit."""
    multiple_of: int = 1

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if a number is not a positive integer, or no size is allowed."""
        for name, value in (("min", self.min), ("max", self.max), ("multiple_of", self.multiple_of)):
            if not (type(value) is int and value > 0) and not (name == "max" and value is None):
                raise ValueError(f"{name} of a size must be a positive integer, got {value!r}")
        if self.max is not None and not self.allows(self.nearest(self.min)):
            raise ValueError(f"no size is {self}")

    def __str__(self) -> str:
        limits = f"at least {self.min}" if self.max is None else f"from {self.min} to {self.max}"
        return limits + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")

    def allows(self, size: int) -> bool:
        """Return whether a dimension may have this size."""
        return size >= self.min and (self.max is None or size <= self.max) and size % self.multiple_of == 0

    def nearest(self, size: int) -> int:
        """Return the smallest allowed size that is not smaller than ``size``, or else the largest allowed one."""
        steps = -(-max(size, self.min) // self.multiple_of)
        if self.max is not None:
            steps = min(steps, self.max // self.multiple_of)
        return steps * self.multiple_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output tensor of a graph."""

    name: str
    dims: tuple[Dim, ...]
    dtype: Literal["float", "float32", "int64", "int32", "int8", "bool"] = "float"
    """``float`` follows the model's own dtype. ``float32`` is at least that: a model in half precision reads float32,
    and the float64 model float64."""
    upper: int | None = None
    """Integers lie in ``[0, upper)``: a vocabulary size, a number of token types."""
    is_mask: bool = False
    """Whether this is a padding mask: 1 marks a token, 0 padding."""
    padding: Literal["both", "left", "right"] = "both"
    """For a mask: the side of a row on which padding leaves the results for the tokens unchanged."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a malformed dimension."""
        object.__setattr__(self, "dims", tuple(map(_canonical, self.dims)))

    @property
    def is_float(self) -> bool:
        """Whether the tensor has floating-point numbers."""
        return self.dtype in ("float", "float32")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape, given the size of each named dimension."""
        return tuple(dim_size(dim, sizes) for dim in self.dims)


def token_ids(name: str, upper: int, *, length: Dim = "sequence", rows: str = "batch") -> TensorSpec:
    """Declare integers in ``[0, upper)`` of shape (``rows``, ``length``)."""
    return TensorSpec(name=name, dims=(rows, length), dtype="int64", upper=upper)


def mask(
    name: str,
    *,
    length: str = "sequence",
    padding: Literal["both", "left", "right"] = "both",
    rows: str = "batch",
) -> TensorSpec:
    """Declare a padding mask of shape (``rows``, ``length``): 1 for a token, 0 for padding, on the side ``padding``.

    >>> mask("attention_mask").shape({"batch": 2, "sequence": 7})
    (2, 7)
    """
    return TensorSpec(name=name, dims=(rows, length), dtype="int64", upper=2, is_mask=True, padding=padding)


def floats(name: str, *dims: Dim) -> TensorSpec:
    """Declare a tensor of the model's dtype with the given dimensions."""
    return TensorSpec(name=name, dims=dims)


def attentions(
    num_layers: int, num_heads: int, *, queries: Dim = "sequence", keys: Dim = "sequence", name: str = "attentions"
) -> tuple[TensorSpec, ...]:
    """Declare the attention weights of every layer: ``NAME.N``, (batch, heads, queries, keys).

    >>> attentions(12, 8)[3].name, attentions(12, 8)[3].dims
    ('attentions.3', ('batch', 8, 'sequence', 'sequence'))
    """
    return tuple(floats(f"{name}.{layer}", "batch", num_heads, queries, keys) for layer in range(num_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """Outputs of a graph and constants from which the attention weights of one layer can be computed.

    The weights are softmax(scores) over the keys that a query sees, with scores = cap(scale query key^T) + bias.
    """

    weights: TensorSpec
    """(batch, heads, queries, keys)"""
    head_size: int
    num_kv_heads: int
    scale: float
    softcap: float | None = None
    """Limit of the scaled products, :func:`zoo.nn.soft_cap`; None for none."""
    bias_heads: int | None = None
    """The heads of ``NAME.bias``: all, or 1 if they share it; None if nothing is added."""
    seen_heads: int | None = None
    """The heads of ``NAME.seen``; None if every query sees all keys."""

    @property
    def query(self) -> TensorSpec:
        """``NAME.query``, (batch, heads, queries, head size), after norms and rotation."""
        rows, heads, queries, _ = self.weights.dims
        return floats(f"{self.weights.name}.query", rows, heads, queries, self.head_size)

    @property
    def key(self) -> TensorSpec:
        """``NAME.key``, (batch, key-value heads, keys, head size), after norms and rotation."""
        rows, _, _, keys = self.weights.dims
        return floats(f"{self.weights.name}.key", rows, self.num_kv_heads, keys, self.head_size)

    @property
    def bias(self) -> TensorSpec | None:
        """``NAME.bias``, (batch, bias heads, queries, keys), 0 where a key is hidden."""
        return self._like_weights("bias", self.bias_heads)

    @property
    def seen(self) -> TensorSpec | None:
        """``NAME.seen``, (batch, seen heads, queries, keys), 1 for a key that the query sees and 0 for a hidden one."""
        return self._like_weights("seen", self.seen_heads)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the outputs, in the order of the exported signature."""
        return tuple(tensor for tensor in (self.query, self.key, self.bias, self.seen) if tensor is not None)

    def _like_weights(self, name: str, heads: int | None) -> TensorSpec | None:
        rows, _, queries, keys = self.weights.dims
        return None if heads is None else floats(f"{self.weights.name}.{name}", rows, heads, queries, keys)


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
    length: str = "past_sequence"
    windows: tuple[int | None, ...] = (None,)
    """For each layer of a past, the largest number of keys that a query sees, its own included: at least 2, or None for
    all keys. The pattern repeats over the layers."""
    in_int8: bool = False
    """Whether keys and values are stored as int8, each followed by a tensor of scales, (batch, heads, length, 1) in
    float32: ``NAME.N.key`` and ``NAME.N.key_scale``. For exports: see :meth:`Graph.with_int8_cache`."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a malformed length or window."""
        object.__setattr__(self, "length", _canonical(self.length))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """One exported graph, ``NAME.onnx``: a method of the model with named inputs and outputs.

    The method takes each input as the argument of that name; a :class:`KeyValues` arrives as one
    :class:`zoo.nn.Cache`. It returns a tensor if it has a single output, otherwise a mapping from output names to
    tensors (or caches).

    ``past`` declares what a decoder keeps of earlier tokens: keys and values, states of fixed size, or a tuple of them.
    :class:`KeyValues` add the inputs ``past_key_values.N.key`` and ``.value``, passed to the method as one cache
    ``past_key_values``, which the method extends in place, and the outputs ``present.N.key`` and ``.value``.
    :class:`States` add the inputs ``past_states.N.STATE``, passed as one :class:`zoo.nn.LayerStates` for each layer in
    the list ``past_states``, whose states the method replaces, and the outputs ``present_states.N.STATE``. For a graph
    with a past, the export checks that a call on a prefix followed by a call on the rest equals one call on the whole
    sequence. The tokens of a call lie along a dimension named ``sequence``.

    >>> graph = Graph(
    ...     inputs=(token_ids("input_ids", 260), mask("attention_mask")),
    ...     outputs=(floats("logits", "batch", 3),),
    ... )
    >>> [tensor.name for tensor in graph.input_tensors()]
    ['input_ids', 'attention_mask']
    >>> graph.dim_names()
    ('batch', 'sequence')
    """

    name: str = "model"
    method: str = "forward"
    inputs: tuple[TensorSpec | KeyValues, ...]
    outputs: tuple[TensorSpec | KeyValues, ...]
    past: KeyValues | States | tuple[KeyValues | States, ...] | None = None
    causal: bool | None = None
    """Whether outputs at a position depend on earlier positions alone (True), or on later ones or none (False).
    None leaves it unspecified; a graph with a past is always causal."""
    attentions: tuple[TensorSpec, ...] = ()
    """The attention weights, in the order in which the method computes them: :func:`attentions` for self-attention,
    ``cross_attentions`` for cross-attention. They are outputs only after :meth:`with_attentions`."""
    attention_inputs: tuple[AttentionInputs, ...] = ()
    """What attention weights are computed from, where that is an output too. Added by :meth:`with_attentions`."""
    rows: tuple[str, ...] = ("batch",)
    """The dimensions along which items are independent. The first dimension of each input and output is one of them. A
    graph that compares images with texts has two, ``("images", "texts")``. A graph with a past has ``batch``."""
    sizes: Mapping[str, Size] = field(default_factory=dict, hash=False)
    """The sizes that free dimensions may have, by name: ``{"frames": zoo.Size(min=4, multiple_of=4)}``. By default, it
    is any from 1 to ``max_seq_len``. The batch and the tokens of a graph with a past cannot be restricted: rows are
    independent, and a text may be cut into calls anywhere."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if dimensions are restricted, divided or padded in a way that is not supported."""
        where = f"graph {self.name!r}"
        if not self.rows or not all(isinstance(name, str) and name.isidentifier() for name in self.rows):
            raise ValueError(f"the rows of {where} must be a tuple of names, got {self.rows!r}")
        if self.pasts and self.rows != ("batch",):
            raise ValueError(f"{where} has a past, so its rows must be ('batch',), got {self.rows}")
        lengths = {item.length for item in self.pasts if isinstance(item, KeyValues)}
        for length in lengths:
            if dim_names(length) != (length,):
                raise ValueError(f"the length of the past of {where} must be a name, got {length!r}")
        if len(lengths) > 1:
            raise ValueError(f"the keys and values of the past of {where} must have one length, got {sorted(lengths)}")
        if len({item.name for item in self.pasts}) < len(self.pasts):
            raise ValueError(f"two parts of the past of {where} have the same name")
        self._check_windows(where)
        for name in self.sizes:
            if name not in self.dim_names():
                raise ValueError(f"{where} declares sizes of {name!r}, which is no dimension of its inputs")
            if name in self._any_size():
                raise ValueError(f"{where} declares sizes of {name!r}, which must be free")
        masks = [tensor for tensor in self.input_tensors() if tensor.is_mask]
        for tensor in (*self.input_tensors(), *self.output_tensors(), *self.attentions):
            for dim in filter(is_quotient, tensor.dims):
                names = set(dim_names(dim))
                if tensor.is_mask or names & self._any_size():
                    raise ValueError(f"{tensor.name} of {where} cannot have the length {dim!r}")
                if any(names & set(mask.dims) and mask.padding != "right" for mask in masks):
                    raise ValueError(
                        f"{tensor.name} of {where} has the length {dim!r}, so padding must be on the right"
                    )

    def _check_windows(self, where: str) -> None:
        """Raise ``ValueError`` for windows, and lengths that depend on them, where they have no meaning."""
        for item in (*self.inputs, *self.outputs):
            if isinstance(item, KeyValues) and item.has_windows:
                raise ValueError(f"{item.name} of {where} has windows, which only a past may have")
        for tensor in _flatten(self.inputs):
            if any("min(" in str(dim) for dim in tensor.dims):
                raise ValueError(f"{tensor.name} of {where} has a minimum as length, which only a past may have")
        free = {self.past_length, self.total_length}
        if self.has_windows and not any(free & {*tensor.dims} for tensor in self.input_tensors()):
            what = f"all layers of the past of {where} have windows"
            raise ValueError(f"{what}, so an input, such as a mask, must have the length {self.total_length!r}")

    def _any_size(self) -> set[str]:
        """Return the names of dimensions that can be neither restricted nor divided."""
        return {*self.rows, *(["sequence"] if self.pasts else []), *filter(None, [self.past_length])}

    @property
    def pasts(self) -> tuple[KeyValues | States, ...]:
        """The parts of the past; empty for a graph without one."""
        return () if self.past is None else self.past if isinstance(self.past, tuple) else (self.past,)

    @property
    def has_windows(self) -> bool:
        """Whether the past of a layer is limited by a window."""
        return any(isinstance(item, KeyValues) and item.has_windows for item in self.pasts)

    def without_windows(self) -> Graph:
        """Return the graph with keys and values of all positions in every layer."""
        if not self.has_windows:
            return self
        pasts = tuple(item.without_windows() if isinstance(item, KeyValues) else item for item in self.pasts)
        return replace(self, past=pasts if isinstance(self.past, tuple) else pasts[0])

    def with_int8_cache(self) -> Graph:
        """Return the graph with the keys and values of its past in int8, and without windows."""
        return self.without_windows()._stored(in_int8=True)

    def without_int8_cache(self) -> Graph:
        """Return the graph of the model itself, whose keys and values have its dtype."""
        return self._stored(in_int8=False)

    def _stored(self, *, in_int8: bool) -> Graph:
        pasts = tuple(replace(item, in_int8=in_int8) if isinstance(item, KeyValues) else item for item in self.pasts)
        return replace(self, past=pasts if isinstance(self.past, tuple) else next(iter(pasts), None))

    def kept_lengths(self) -> dict[Dim, int]:
        """Return the length of each present with a window, and the number of last positions that it keeps at most."""
        return {
            _kept(f"{item.length} + sequence", window): window - 1
            for item in self.pasts
            if isinstance(item, KeyValues)
            for window in map(item.window, range(item.num_layers))
            if window is not None
        }

    @property
    def past_length(self) -> str | None:
        """The name of the length of past keys and values; None if there are none."""
        return next((item.length for item in self.pasts if isinstance(item, KeyValues)), None)

    @property
    def total_length(self) -> str:
        """The length of all tokens that a call attends to: ``sequence``, after that of past keys and values."""
        return f"{self.past_length} + sequence" if self.past_length else "sequence"

    def input_tensors(self) -> tuple[TensorSpec, ...]:
        """Return every input tensor in the order of the exported signature, the past last."""
        return (*_flatten(self.inputs), *self.past_tensors())

    def output_tensors(self) -> tuple[TensorSpec, ...]:
        """Return every output tensor in the order of the exported signature, the present last."""
        return (*_flatten(self.outputs), *self.present_tensors())

    def past_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of the past, such as ``past_key_values.N.key`` and ``past_key_values.N.value``."""
        return tuple(tensor for item in self.pasts for tensor in item.tensors())

    def present_tensors(self) -> tuple[TensorSpec, ...]:
        """Return the past after this call, in the order of :meth:`past_tensors`: ``present.N.key``, for example."""
        return tuple(tensor for item in self.pasts for tensor in item.present_tensors())

    def past_pairs(self) -> tuple[tuple[TensorSpec, TensorSpec], ...]:
        """Return each tensor of the past, with the one that it becomes in this call."""
        return tuple(zip(self.past_tensors(), self.present_tensors(), strict=True))

    def growing_pairs(self) -> tuple[tuple[TensorSpec, TensorSpec], ...]:
        """Return the keys and values of :meth:`past_pairs` without a window, which grow by the tokens of a call."""
        return tuple(pair for pair in self.past_pairs() if self.past_length in pair[0].dims)

    def with_attentions(self, inputs: Sequence[AttentionInputs] = ()) -> Graph:
        """Return the graph with its attention weights, and then the tensors of ``inputs``, as last outputs.

        It has no windows.
        """
        graph, more = self.without_windows(), (tensor for item in inputs for tensor in item.tensors())
        outputs = (*graph.outputs, *graph.attentions, *more)
        return replace(graph, outputs=outputs, attention_inputs=tuple(inputs))

    def recorded(self) -> tuple[TensorSpec, ...]:
        """Return the attention weights that are outputs: all of them or none."""
        return self.attentions if set(self.attentions) <= set(self.outputs) else ()

    def dim_names(self) -> tuple[str, ...]:
        """Return the free dimensions of the inputs, each once; a sum or quotient counts as the names in it."""
        names = (name for tensor in self.input_tensors() for dim in tensor.dims for name in dim_names(dim))
        return tuple(dict.fromkeys(names))


def rows_of(graphs: Iterable[Graph]) -> tuple[str, ...]:
    """Return the dimensions of independent items of all graphs, each once."""
    return tuple(dict.fromkeys(name for graph in graphs for name in graph.rows))


def row_sizes(graphs: Iterable[Graph], batch: int) -> dict[str, int]:
    """Return sizes of the dimensions of independent items: ``batch`` for the first, other sizes for the others.

    >>> graph = Graph(
    ...     inputs=(floats("image", "images", 8), floats("text", "texts", 8)),
    ...     outputs=(floats("logits", "images", "texts"),),
    ...     rows=("images", "texts"),
    ... )
    >>> [row_sizes([graph], batch) for batch in (1, 2, 5)]
    [{'images': 1, 'texts': 2}, {'images': 2, 'texts': 5}, {'images': 5, 'texts': 1}]
    """
    sizes = {}
    for name in rows_of(graphs):
        sizes[name] = batch
        batch = {1: 2, 2: 5, 5: 1}.get(batch, batch - 1)
    return sizes


def sizes_of(graphs: Iterable[Graph]) -> dict[str, Size]:
    """Return the declared sizes of free dimensions by name, which are the same in every graph."""
    return {name: size for graph in graphs for name, size in graph.sizes.items()}


def fit_sizes(graphs: Iterable[Graph], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the allowed size of each dimension that is nearest to a given one."""
    declared = sizes_of(graphs)
    return {name: declared[name].nearest(size) if name in declared else size for name, size in sizes.items()}


def causal_graph(
    *,
    vocab_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_heads: int | None = None,
    num_memories: int = 0,
    windows: tuple[int | None, ...] = (None,),
) -> Graph:
    """Declare the single graph of a causal decoder: next-token logits for ``input_ids``, with a mask and a past.

    With ``num_heads``, it also declares each layer's attention weights: that many heads, over the keys of the tokens
    preceded by ``num_memories`` learned keys. ``windows`` are those of :class:`KeyValues`.

    >>> graph = causal_graph(vocab_size=260, num_layers=1, num_kv_heads=4, head_dim=16)
    >>> for tensor in graph.input_tensors():
    ...     print(tensor.name, tensor.dims)
    input_ids ('batch', 'sequence')
    attention_mask ('batch', 'past_sequence + sequence')
    past_key_values.0.key ('batch', 4, 'past_sequence', 16)
    past_key_values.0.value ('batch', 4, 'past_sequence', 16)
    """
    keys = " + ".join(filter(None, (str(num_memories or ""), "past_sequence", "sequence")))
    past = KeyValues(
        name="past_key_values", num_layers=num_layers, num_heads=num_kv_heads, head_dim=head_dim, windows=windows
    )
    return Graph(
        inputs=(token_ids("input_ids", vocab_size), mask("attention_mask", length="past_sequence + sequence")),
        outputs=(floats("logits", "batch", "sequence", vocab_size),),
        past=past,
        attentions=attentions(num_layers, num_heads, keys=keys) if num_heads else (),
    )


# Called for each step of a generated text.
@lru_cache(maxsize=256)
def _key_value_tensors(item: KeyValues) -> tuple[TensorSpec, ...]:
    parts: list[tuple[str, int, Literal["float", "float32", "int8"]]] = []
    for part, size in (("key", item.head_dim), ("value", item.value_head_dim or item.head_dim)):
        parts += [(part, size, "int8"), (f"{part}_scale", 1, "float32")] if item.in_int8 else [(part, size, "float")]
    return tuple(
        TensorSpec(
            name=f"{item.name}.{layer}.{part}",
            dims=("batch", item.num_heads, _kept(item.length, item.window(layer)), size),
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
            dims=(*tensor.dims[:2], _kept(f"{past.length} + sequence", past.window(number // count)), tensor.dims[3]),
        )
        for count in [len(after.tensors()) // (past.num_layers or 1)]
        for number, tensor in enumerate(after.tensors())
    )


def _kept(length: str, window: int | None) -> str:
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


def _flatten(items: tuple[TensorSpec | KeyValues, ...]) -> tuple[TensorSpec, ...]:
    return tuple(tensor for item in items for tensor in (item.tensors() if isinstance(item, KeyValues) else (item,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """An architecture by reference: ``config`` and ``model`` are ``module:Class``, imported on first use."""

    name: str
    tasks: tuple[str, ...]
    config: str
    """A :class:`zoo.Config` subclass; its module must not import torch."""
    model: str
    """A ``torch.nn.Module`` class, called as ``Model(config)``; instances keep the configuration as ``.config``."""
    reference: str
    """A citation of the paper."""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    """Checks of :mod:`zoo.testing` known to fail, each with the reason. A listed check that passes is a failure."""
    discontinuous: str = ""
    """Why outputs jump where two computed numbers nearly tie, as in routing to experts; empty for other models. The
    comparison of an export then leaves out the few rows at which PyTorch itself jumps by rounding alone."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("architecture", self.name)
        _check_reference("config", self.config)
        _check_reference("model", self.model)
        if not isinstance(self.expected_failures, Mapping) or not all(
            isinstance(text, str) and text for item in self.expected_failures.items() for text in item
        ):
            raise ValueError(f"expected_failures of {self.name!r} must map check names to reasons")
        if not isinstance(self.discontinuous, str):
            raise ValueError(f"discontinuous of {self.name!r} must be a reason, got {self.discontinuous!r}")
        if not isinstance(self.tasks, tuple | list) or not all(isinstance(task, str) for task in self.tasks):
            raise ValueError(f"the tasks of architecture {self.name!r} must be strings, got {self.tasks!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """Conversion between a foreign checkpoint layout and an architecture, in both directions, by reference."""

    name: str
    """``model_type`` in the checkpoint's config.json, or NAME in ``zoo import SOURCE --model-type NAME``."""
    architecture: str
    """The architecture of the imported models."""
    layout: str
    """``module:OBJECT``, a :class:`zoo.checkpoints.Layout`."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("importer", self.name)
        _check_name("architecture", self.architecture)
        _check_reference("layout", self.layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command added by a plugin, ``zoo NAME``, by reference."""

    name: str
    """NAME in ``zoo NAME``."""
    help: str
    """A one-line sentence for ``zoo --help``."""
    command: str
    """``module:OBJECT``, a ``click.Command``. Its module should not import torch. A :class:`zoo.ZooError` that it
    raises is printed as one line and sets the exit status."""
    section: str = "From plugins"
    """The heading in ``zoo --help`` under which the command is listed."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("command", self.name)
        _check_reference("command", self.command)
        if not isinstance(self.help, str) or not self.help or "\n" in self.help:
            raise ValueError(f"the help of command {self.name!r} must be one line, got {self.help!r}")
        if not isinstance(self.section, str) or not self.section or "\n" in self.section:
            raise ValueError(f"the section of command {self.name!r} must be one line, got {self.section!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """An export format, by reference. :mod:`zoo.exporters` documents the arguments and results of its functions."""

    name: str
    """NAME in ``zoo export MODEL --format NAME``."""
    export: str
    """``module:function``, called with a :class:`zoo.exporters.Job`: writes files and returns the evidence for them."""
    verify: str | None = None
    """``module:function``, called with a Job: checks an existing export and returns the evidence for it."""
    options: str | None = None
    """``module:Class``, a :class:`zoo.Settings` subclass with the format's options. Its module should not import
    torch."""
    verifies: bool = True
    """Whether ``export`` compares its files with the model. If not, its exports are marked as unverified."""
    evidence: str | None = None
    """``evidence.NAME`` for an exporter that writes evidence.NAME.json itself; by default zoo writes it.

    The file must have ``verified``; ``files``, a mapping of each file's name to its SHA-256; and ``weights``, the same
    for the model's weight files. ONNX uses ``parity``."""

    checks: str | None = None
    """``module:OBJECT``, functions that the conformance kit runs on every architecture, called with a
    :class:`zoo.testing.Subject`. Their docstrings explain them; they raise :class:`zoo.testing.CheckFailure`. Their
    module must not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w-]*", self.name):
            raise ValueError(f"bad exporter name {self.name!r}: use letters, digits, '-' and '_'")
        if self.evidence not in (None, "parity", f"evidence.{self.name}"):
            raise ValueError(f"bad evidence {self.evidence!r}: write 'evidence.{self.name}'")
        references = {"export": self.export, "verify": self.verify, "options": self.options, "checks": self.checks}
        for kind, reference in references.items():
            if reference is not None or kind == "export":
                _check_reference(kind, reference)
        if not isinstance(self.verifies, bool):
            raise ValueError(f"verifies of exporter {self.name!r} must be True or False, got {self.verifies!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task for which exported models can be run, ``zoo run DIR --task NAME``, by reference."""

    name: str
    """NAME in ``--task NAME``. Without the option, a model runs the task that its configuration declares. Tasks that
    serve different models may share a name."""
    run: str
    """``module:Class``, a subclass of ``zoo_runtime.Runner``. Its module should not import torch."""
    serves: tuple[str, ...] = ()
    """Declared tasks of the models that it can run; by default only its own name."""
    formula: str | None = None
    """``module:function``, an independent computation of the task's answers from the outputs of the model.
    ``zoo export`` and ``zoo verify`` run the task on its ``samples`` and require its answers to equal those of the
    formula in float64. :mod:`zoo_runtime.formula` documents the function. Its module must not import torch."""
    attention: str | None = None
    """``module:function``, called by :func:`zoo.attention_page` for the models that the task serves, with the model
    directory, a tuple of inputs, and the keyword arguments ``generate``, ``layers``, ``heads`` and ``unverified``. It
    returns a :class:`zoo.AttentionRecord`. Its module should not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        if not isinstance(self.serves, tuple | list):
            raise ValueError(f"serves of task {self.name!r} must be a tuple of task names, got {self.serves!r}")
        for name in (self.name, *self.serves):
            _check_name("task", name)
        _check_reference("run", self.run)
        if self.formula is not None:
            _check_reference("formula", self.formula)
        if self.attention is not None:
            _check_reference("attention", self.attention)

    def can_serve(self, declared: str) -> bool:
        """Return whether it runs models that declare this task."""
        return declared in (self.serves or (self.name,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A training objective, ``zoo train MODEL --objective NAME``, by reference."""

    name: str
    """NAME in ``--objective``. Without the option, a model is trained by the first objective for its task."""
    criterion: str
    """``module:Class``, a subclass of :class:`zoo.training.criterion.Criterion`. Its module may import torch."""
    tasks: tuple[str, ...]
    """The tasks of the models that it trains, as their configurations declare them."""
    columns: tuple[str, ...] = ("text",)
    """The columns that the data must have, by role: ``text``, ``pair``, ``target``, ``label`` or a name of its own."""
    optional: tuple[str, ...] = ()
    """Columns that the data may have."""
    options: str | None = None
    """``module:Class``, a :class:`zoo.Settings` subclass with settings of its own. Its module must not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("objective", self.name)
        for field_name in ("tasks", "columns", "optional"):
            names = getattr(self, field_name)
            if not isinstance(names, tuple | list):
                raise ValueError(f"{field_name} of objective {self.name!r} must be a tuple of names, got {names!r}")
            for name in names:
                _check_name("task" if field_name == "tasks" else "column", name)
        _check_reference("criterion", self.criterion)
        if self.options is not None:
            _check_reference("options", self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Data to train on that is computed or comes with an installed package, ``--data NAME``, by reference."""

    name: str
    """NAME in ``--data``."""
    rows: str
    """``module:function``, called with the name of a split; returns an iterable of rows, each a mapping from the names
    of columns to texts, numbers or lists. Equal calls return equal rows. Its module must not import torch."""
    splits: tuple[str, ...] = ("train", "validation", "test")
    """The splits that it has."""
    description: str = ""
    """One line: what the data is, and its source."""
    package: str | None = None
    """The distribution that the rows come from, if it is not the plugin's own or one that the plugin requires. Its
    version is part of the record of a run."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("dataset", self.name)
        _check_reference("rows", self.rows)
        if not isinstance(self.splits, tuple | list):
            raise ValueError(f"splits of dataset {self.name!r} must be a tuple of names, got {self.splits!r}")
        for name in self.splits:
            _check_name("split", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """A tracker of experiments, ``zoo train --tracker NAME``, by reference."""

    name: str
    """NAME in ``--tracker``."""
    start: str
    """``module:function``, called with a :class:`zoo.training.TrackedRun` before the first step; returns an object with
    the methods of :class:`zoo.training.Tracking`. Its module is imported before data is read, and may import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("tracker", self.name)
        _check_reference("start", self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A way to run the shards of a batch on several workers, ``zoo run --engine NAME``, by reference."""

    name: str
    """NAME in ``--engine``."""
    run: str
    """``module:function``, called with a :class:`zoo_runtime.batch.Plan`, the shards that are not done, and the number
    of workers or None; returns an iterable of a :class:`zoo_runtime.batch.Done` for each shard, in any order, as soon
    as it is done. Its workers call :func:`zoo_runtime.batch.run_shard`. Its module must not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("engine", self.name)
        _check_reference("run", self.run)


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"bad {kind} name {name!r}: use letters, digits, '-', '_' and '.'")


def _check_reference(kind: str, reference: object) -> None:
    if not isinstance(reference, str) or not re.fullmatch(r"[\w.]+:\w+", reference):
        raise ValueError(f"bad {kind} {reference!r}: write module:Name")
