"""The model contract: what a model's graphs take and give, with named dimensions.

Everything downstream follows from these declarations: the exported signature, the dynamic shapes, the parity
inputs and the runtime's feeds. The module is torch-free, so describing a model never loads torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = [
    "Architecture",
    "Command",
    "Exporter",
    "Graph",
    "Importer",
    "KeyValues",
    "Task",
    "TensorSpec",
    "attentions",
    "causal_graph",
    "dim_size",
    "mask",
    "real",
    "token_ids",
]

Dim = str | int
"""A fixed size, or the name of a dimension that is free at run time; a sum such as
``past_sequence + sequence`` is a dimension whose size is the sum of the named ones, and of numbers."""


def dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of ``dim`` when each named dimension has its size in ``sizes``."""
    if isinstance(dim, int):
        return dim
    parts = (part.strip() for part in dim.split("+"))
    return sum(int(part) if part.isdecimal() else sizes[part] for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output tensor of a graph."""

    name: str
    dims: tuple[Dim, ...]
    dtype: Literal["real", "int64"] = "real"
    """``real`` follows the model's own dtype."""
    upper: int | None = None
    """Integers lie in ``[0, upper)``: a vocabulary size, a number of types."""
    is_mask: bool = False
    """1 marks a position that counts, 0 one that is padding."""
    padding: Literal["both", "left", "right"] = "both"
    """Of a mask: the side of a row on which padding changes nothing at the positions that count."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape when each named dimension has its size in ``sizes``."""
        return tuple(dim_size(dim, sizes) for dim in self.dims)


def token_ids(name: str, upper: int, *, length: str = "sequence") -> TensorSpec:
    """Integers of shape (batch, ``length``) in ``[0, upper)``."""
    return TensorSpec(name=name, dims=("batch", length), dtype="int64", upper=upper)


def mask(name: str, *, length: str = "sequence", padding: Literal["both", "left", "right"] = "both") -> TensorSpec:
    """A padding mask of shape (batch, ``length``): 1 for a token, 0 for padding, which may lie on these sides.

    >>> mask("attention_mask").shape({"batch": 2, "sequence": 7})
    (2, 7)
    """
    return TensorSpec(name=name, dims=("batch", length), dtype="int64", upper=2, is_mask=True, padding=padding)


def real(name: str, *dims: Dim) -> TensorSpec:
    """A tensor of the model's dtype and the given dimensions."""
    return TensorSpec(name=name, dims=dims)


def attentions(
    num_layers: int, num_heads: int, *, queries: Dim = "sequence", keys: Dim = "sequence", name: str = "attentions"
) -> tuple[TensorSpec, ...]:
    """Attention weights of every layer: ``NAME.N``, (batch, heads, queries, keys).

    >>> attentions(12, 8)[3].name, attentions(12, 8)[3].dims
    ('attentions.3', ('batch', 8, 'sequence', 'sequence'))
    """
    return tuple(real(f"{name}.{layer}", "batch", num_heads, queries, keys) for layer in range(num_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValues:
    """Keys and values of every layer: tensors ``NAME.N.key`` and ``NAME.N.value``, (batch, heads, length, dim)."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    value_head_dim: int | None = None
    length: str = "past_sequence"

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Two tensors a layer, key before value."""
        sizes = (("key", self.head_dim), ("value", self.value_head_dim or self.head_dim))
        return tuple(
            real(f"{self.name}.{layer}.{part}", "batch", self.num_heads, self.length, size)
            for layer in range(self.num_layers)
            for part, size in sizes
        )

    def elements_per_token(self) -> int:
        """Numbers kept for one token of one sequence."""
        return self.num_layers * self.num_heads * (self.head_dim + (self.value_head_dim or self.head_dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """One exported graph, ``NAME.onnx``: a method of the model with named inputs and outputs.

    The method takes each input by its name; a :class:`KeyValues` arrives as one :class:`zoo.nn.Cache`. It returns
    a tensor when it has a single output, else a mapping from output names to tensors (or caches).

    ``past`` is what a decoder keeps between calls. It adds the inputs ``past_key_values.N.key`` and ``.value``,
    handed to the method as ``past_key_values``, which the method extends in place, and the outputs
    ``present.N.key`` and ``.value``. A graph with a past obeys one law that the export checks: a call on a prefix
    followed by a call on the rest equals one call on the whole. The tokens of a call lie along a dimension named
    ``sequence``.

    >>> graph = Graph(
    ...     inputs=(token_ids("input_ids", 260), mask("attention_mask")),
    ...     outputs=(real("logits", "batch", 3),),
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
    past: KeyValues | None = None
    causal: bool | None = None
    """Whether an output along a length depends on nothing that comes later along it (True), or on that too (False).
    None leaves it open; a graph with a past is causal in any case."""
    attentions: tuple[TensorSpec, ...] = ()
    """The attention weights that the method computes, in the order in which it does: :func:`attentions` of a layer's
    own tokens, and ``cross_attentions`` to others. They are no outputs unless asked for: :meth:`with_attentions`."""

    def input_tensors(self) -> tuple[TensorSpec, ...]:
        """Every input tensor in the order of the exported signature, the past last."""
        return _flatten((*self.inputs, *([self.past] if self.past else [])))

    def output_tensors(self) -> tuple[TensorSpec, ...]:
        """Every output tensor in the order of the exported signature, the present last."""
        return (*_flatten(self.outputs), *self.present_tensors())

    def present_tensors(self) -> tuple[TensorSpec, ...]:
        """The past after this call, named ``present.N.key`` and ``present.N.value``."""
        if self.past is None:
            return ()
        return tuple(
            real(
                tensor.name.replace(self.past.name, "present", 1),
                *(f"{dim} + sequence" if dim == self.past.length else dim for dim in tensor.dims),
            )
            for tensor in self.past.tensors()
        )

    def with_attentions(self) -> Graph:
        """The same graph, whose outputs are followed by its attention weights."""
        return replace(self, outputs=(*self.outputs, *self.attentions))

    def recorded(self) -> tuple[TensorSpec, ...]:
        """The attention weights that are outputs: all of them or none."""
        return self.attentions if set(self.attentions) <= set(self.outputs) else ()

    def dim_names(self) -> tuple[str, ...]:
        """The free dimensions of the inputs, each once, sums taken apart."""
        names = [
            name.strip()
            for tensor in self.input_tensors()
            for dim in tensor.dims
            if isinstance(dim, str)
            for name in dim.split("+")
        ]
        return tuple(dict.fromkeys(names))


def causal_graph(
    *,
    vocab_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_heads: int | None = None,
    num_memories: int = 0,
) -> Graph:
    """The one graph of a causal decoder: logits of the next token for ``input_ids``, with a mask and a past.

    With ``num_heads``, each layer has attention weights of so many heads, over ``num_memories`` keys of no token first.

    >>> graph = causal_graph(vocab_size=260, num_layers=1, num_kv_heads=4, head_dim=16)
    >>> for tensor in graph.input_tensors():
    ...     print(tensor.name, tensor.dims)
    input_ids ('batch', 'sequence')
    attention_mask ('batch', 'past_sequence + sequence')
    past_key_values.0.key ('batch', 4, 'past_sequence', 16)
    past_key_values.0.value ('batch', 4, 'past_sequence', 16)
    """
    keys = " + ".join(filter(None, (str(num_memories or ""), "past_sequence", "sequence")))
    return Graph(
        inputs=(token_ids("input_ids", vocab_size), mask("attention_mask", length="past_sequence + sequence")),
        outputs=(real("logits", "batch", "sequence", vocab_size),),
        past=KeyValues(name="past_key_values", num_layers=num_layers, num_heads=num_kv_heads, head_dim=head_dim),
        attentions=attentions(num_layers, num_heads, keys=keys) if num_heads else (),
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
    """A ``torch.nn.Module`` made by ``Model(config)``, which keeps its configuration as ``.config``."""
    reference: str
    """The paper, as a reader would cite it."""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    """Checks of :mod:`zoo.testing` that it is known to fail, each with the reason; if one passes, that is a failure."""

    def check(self) -> None:
        """Raise ``ValueError`` for a name that cannot be asked for, or a reference that cannot be followed."""
        _check_name("architecture", self.name)
        _check_reference("config", self.config)
        _check_reference("model", self.model)
        if not isinstance(self.expected_failures, Mapping) or not all(
            isinstance(text, str) and text for item in self.expected_failures.items() for text in item
        ):
            raise ValueError(f"expected_failures of {self.name!r} must map names of checks to reasons")
        if not isinstance(self.tasks, tuple | list) or not all(isinstance(task, str) for task in self.tasks):
            raise ValueError(f"the tasks of architecture {self.name!r} must be texts, got {self.tasks!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """How checkpoints of a foreign layout become ours, and ours theirs, by reference."""

    name: str
    """``model_type`` in the checkpoint's config.json, or what people write: ``zoo import SOURCE --kind NAME``."""
    architecture: str
    """The architecture they become."""
    layout: str
    """``module:OBJECT``, a :class:`zoo.checkpoints.Layout`."""

    def check(self) -> None:
        """Raise ``ValueError`` for a name that cannot be asked for, or a reference that cannot be followed."""
        _check_name("importer", self.name)
        _check_name("architecture", self.architecture)
        _check_reference("layout", self.layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of a plugin's own, by reference: ``zoo NAME``."""

    name: str
    """What people write."""
    help: str
    """One line for ``zoo --help``, a sentence."""
    command: str
    """``module:OBJECT``, a ``click.Command``. Its module should not import torch; what it raises of
    :class:`zoo.ZooError` is one line and its exit status."""

    def check(self) -> None:
        """Raise ``ValueError`` for a name that cannot be asked for, or a reference that cannot be followed."""
        _check_name("command", self.name)
        _check_reference("command", self.command)
        if not isinstance(self.help, str) or not self.help or "\n" in self.help:
            raise ValueError(f"the help of command {self.name!r} must be one line, got {self.help!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """A format that models are exported to, by reference. What its functions take and return: :mod:`zoo.exporting`."""

    name: str
    """What people write: ``zoo export MODEL --format NAME``."""
    export: str
    """``module:function``, called with a :class:`zoo.exporting.Job`: writes files and returns the evidence for them."""
    verify: str | None = None
    """``module:function``, called with a Job: looks at an earlier export and returns the evidence for it."""
    options: str | None = None
    """``module:Class``, a :class:`zoo.Settings` of what can be chosen. Its module should not import torch."""
    verifies: bool = True
    """Whether ``export`` compares what it wrote with the model. What comes from one that does not is marked so."""
    evidence: str | None = None
    """``evidence.NAME`` for an exporter that writes evidence.NAME.json itself, with its ``verified``, ``files`` and
    ``weights``, since its other files hold the digest of that; by default zoo writes it. ONNX has ``parity``."""

    def check(self) -> None:
        """Raise ``ValueError`` for a name that cannot be asked for, or a reference that cannot be followed."""
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w-]*", self.name):
            raise ValueError(f"bad exporter name {self.name!r}: use letters, digits, '-' and '_'")
        if self.evidence not in (None, "parity", f"evidence.{self.name}"):
            raise ValueError(f"bad evidence {self.evidence!r}: write 'evidence.{self.name}'")
        for kind, reference in (("export", self.export), ("verify", self.verify), ("options", self.options)):
            if reference is not None or kind == "export":
                _check_reference(kind, reference)
        if not isinstance(self.verifies, bool):
            raise ValueError(f"verifies of exporter {self.name!r} must be True or False, got {self.verifies!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Something that exported models can do, by reference: ``zoo run DIR --task NAME``."""

    name: str
    """What people write. A model runs the task that it declares unless they do."""
    run: str
    """``module:Class``, a subclass of ``zoo_export.Runner``. Its module should not import torch."""
    serves: tuple[str, ...] = ()
    """The tasks that models declare whose graphs it can use; its own name by default."""

    def check(self) -> None:
        """Raise ``ValueError`` for a name that cannot be asked for, or a reference that cannot be followed."""
        if not isinstance(self.serves, tuple | list):
            raise ValueError(f"what task {self.name!r} serves must be a tuple of names, got {self.serves!r}")
        for name in (self.name, *self.serves):
            _check_name("task", name)
        _check_reference("run", self.run)

    def can_serve(self, declared: str) -> bool:
        """Whether it is for models that declare this task."""
        return declared in (self.serves or (self.name,))


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"bad {kind} name {name!r}: use letters, digits, '-', '_' and '.'")


def _check_reference(kind: str, reference: object) -> None:
    if not isinstance(reference, str) or not re.fullmatch(r"[\w.]+:\w+", reference):
        raise ValueError(f"bad {kind} {reference!r}: write module:Name")
