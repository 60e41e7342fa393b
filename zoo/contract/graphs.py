"""A model's graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zoo.contract.dims import Dim, Size, dim_names, is_quotient
from zoo.contract.past import KeyValues, States, kept_length
from zoo.contract.tensors import AttentionInputs, TensorSpec, attentions, floats, mask, token_ids

__all__ = ["Graph", "causal_graph", "fit_sizes", "row_sizes", "rows_of", "sizes_of"]


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
    None leaves it unspecified; a graph with a past is always causal, but for tokens of a block: :func:`block_ids`."""
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
    independent, and a text may be cut into calls anywhere but within a block."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if dimensions are restricted, divided or padded in a way that is not supported."""
        where = f"graph {self.name!r}"
        if not self.rows or not all(isinstance(name, str) and name.isidentifier() for name in self.rows):
            raise ValueError(f"the rows of {where} must be a tuple of names, got {self.rows!r}")
        if self.pasts and self.rows != ("batch",):
            raise ValueError(f"{where} has a past, so its rows must be ('batch',), got {self.rows}")
        lengths = {str(item.length) for item in self.pasts if isinstance(item, KeyValues)}
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
            kept_length(f"{item.length} + sequence", window): window - 1
            for item in self.pasts
            if isinstance(item, KeyValues)
            for window in map(item.window, range(item.num_layers))
            if window is not None
        }

    @property
    def past_length(self) -> str | None:
        """The name of the length of past keys and values; None if there are none."""
        return next((str(item.length) for item in self.pasts if isinstance(item, KeyValues)), None)

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
    value_head_dim: int | None = None,
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
        name="past_key_values",
        num_layers=num_layers,
        num_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        windows=windows,
    )
    return Graph(
        inputs=(token_ids("input_ids", vocab_size), mask("attention_mask", length="past_sequence + sequence")),
        outputs=(floats("logits", "batch", "sequence", vocab_size),),
        past=past,
        attentions=attentions(num_layers, num_heads, keys=keys) if num_heads else (),
    )


def _flatten(items: tuple[TensorSpec | KeyValues, ...]) -> tuple[TensorSpec, ...]:
    return tuple(tensor for item in items for tensor in (item.tensors() if isinstance(item, KeyValues) else (item,)))
