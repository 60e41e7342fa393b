"""Inference of a module's graph from an example call: what it reads, and how what it returns follows the sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo.artifact.weights import dtype_name
from zoo.contract import Dim, Graph, Size, TensorSpec
from zoo.errors import UsageError, nearest
from zoo.models.dtypes import declared_dtype
from zoo.modules.calls import call_by_name, evaluating, named_results
from zoo.plugins.discovery import describe

__all__ = ["Dims", "infer_graph"]

Dims = Mapping[str, Sequence[str | int | None] | Mapping[int, str]]
"""The names of the free dimensions of each input, as for PyTorch's exporters: of all dimensions in order,
``("batch", 3, "height", "width")``, where a number or None is a fixed size; or by position, ``{0: "batch"}``."""
Padding = Literal["both", "left", "right"]
_INTEGERS = {torch.int64: "int64", torch.int32: "int32", torch.bool: "bool"}
_GRAPHS = "declare the graph yourself: graphs=zoo.Graph(...)"


def infer_graph(
    module: nn.Module,
    example: Mapping[str, Tensor],
    dims: Dims,
    *,
    upper: Mapping[str, int] | None = None,
    sizes: Mapping[str, Size] | None = None,
    padding: Padding = "both",
    outputs: Sequence[str] | None = None,
) -> Graph:
    """Return the graph of a module, inferred from calls of it.

    Integers are token ids if they are what an ``nn.Embedding`` looks up, whose size is their upper limit. Others of
    0 and 1 alone, with two free dimensions, are a padding mask. The sizes of outputs are found by changing one free
    dimension at a time: each is fixed, or a sum of free dimensions and a number.

    >>> example = {"input": torch.tensor([[5, 3, 9], [7, 2, 0]])}
    >>> graph = infer_graph(nn.Embedding(64, 8), example, {"input": ("batch", "sequence")})
    >>> graph.inputs[0].upper, graph.outputs[0].name, graph.outputs[0].dims
    (64, 'output', ('batch', 'sequence', 8))

    Args:
        module: the module. It is called in evaluation mode.
        example: tensors for one call, by the names of the inputs, in the order of the module's parameters.
        dims: the names of free dimensions. The first one of every input is that of independent items, a batch.
        upper: upper limits of integers, for those that reach no embedding unchanged. They are no mask then.
        sizes: the sizes that free dimensions may have, by name; any by default.
        padding: the side of rows on which a mask may have padding.
        outputs: names for the tensors that the module returns, or of those to export if it returns a mapping.

    Raises:
        UsageError: the example does not fit the dimensions or the module, or the inference is not certain.
    """
    call = _Call(module, outputs)
    free, shapes = _read_dims(example, dims)
    example = {name: tensor.clone().to(call.device) for name, tensor in example.items()}  # each in a storage of its own
    found = _Lookups()
    with found:
        base = call(example)
    allowed = dict(sizes or {})
    inputs = tuple(
        _input(name, tensor, shapes[name], call.dtype, (upper or {}).get(name), found.limit(tensor), padding)
        for name, tensor in example.items()
    )
    for name in {*(upper or {})} - {*example}:
        raise UsageError(f"{name} is no input", "upper", nearest(name, example))
    for name in {*allowed} - {*free}:
        raise UsageError(f"{name} is no free dimension", "sizes", nearest(name, free))
    _check_limits(call, inputs, free)
    probes = [
        _probe(call, inputs, free, name, size)
        for name in free
        for size in _other_sizes(name, free[name], allowed.get(name, Size()))
    ]
    rows = str(inputs[0].dims[0])
    found_outputs = tuple(_output(name, tensor, call.dtype, free, probes, rows) for name, tensor in base.items())
    try:
        return Graph(inputs=inputs, outputs=found_outputs, rows=(rows,), sizes=allowed)
    except ValueError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class _Probe:
    """A call with another size of one dimension."""

    name: str
    sizes: Mapping[str, int]
    outputs: Mapping[str, Tensor]


class _Call:
    """Calls a module in evaluation mode, and names what it returns."""

    def __init__(self, module: nn.Module, outputs: Sequence[str] | None) -> None:
        self._module, self._outputs = module, outputs
        self.name = type(module).__name__
        parameter = next(module.parameters(), None)
        if parameter is None:
            raise UsageError(f"{self.name} has no parameters, so nothing of it can be exported")
        self.dtype, self.device = parameter.dtype, parameter.device

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        try:
            with torch.no_grad(), evaluating(self._module):
                result = call_by_name(self._module, tensors, self._module.forward)
            mapped = isinstance(result, Mapping) or hasattr(result, "_asdict")
            results = named_results(result, None if mapped else self._outputs)
        except Exception as error:  # the user's code may raise anything
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            raise UsageError(f"{self.name} cannot be called with {shapes} ({describe(error)})") from error
        for name in (self._outputs or results) if mapped else ():
            if name not in results:
                raise UsageError(f"{self.name} returns no {name}", "outputs", nearest(name, results))
        results = {name: results[name] for name in self._outputs or results}
        for name, value in results.items():
            if not isinstance(value, Tensor):
                what = f"{name} of {self.name} is of type {type(value).__name__}, not a tensor"
                raise UsageError(what, None, "return tensors alone, or name those to export: outputs=(...)")
        return results


class _Lookups(TorchFunctionMode):
    """Records what is looked up in embeddings, and how many rows these have."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.embedding, F.embedding_bag):
            ids, weight = args[:2]
            self._found.append((ids, len(weight)))
        return func(*args, **(kwargs or {}))

    def limit(self, tensor: Tensor) -> int | None:
        """Return the least number of rows of the embeddings that look up a tensor itself, or a view; None for none."""
        place = tensor.untyped_storage().data_ptr()
        return min((rows for ids, rows in self._found if ids.untyped_storage().data_ptr() == place), default=None)


def _read_dims(example: Mapping[str, Tensor], dims: Dims) -> tuple[dict[str, int], dict[str, tuple[Dim, ...]]]:
    """Return the sizes of the free dimensions in the example, and the dimensions of each input."""
    if not isinstance(example, Mapping) or not example or not all(isinstance(x, Tensor) for x in example.values()):
        raise UsageError("must map names of inputs to tensors", "example")
    for name in dims:
        if name not in example:
            raise UsageError(f"{name} is not in the example", "dims", nearest(name, example))
    free: dict[str, int] = {}
    shapes: dict[str, tuple[Dim, ...]] = {}
    for name, tensor in example.items():
        if name not in dims:
            raise UsageError(f"{name} has no dimensions", "dims", f'name the free ones: "{name}": ("batch", ...)')
        given = dims[name]
        named = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        if isinstance(given, str) or not (
            {*named} <= {*range(tensor.ndim)} and (isinstance(given, Mapping) or len(named) == tensor.ndim)
        ):
            raise UsageError(f"{name} of shape {tuple(tensor.shape)} has not the dimensions {given!r}", "dims")
        for axis, dim in named.items():
            size = tensor.shape[axis]
            if isinstance(dim, str) and not dim.isidentifier():
                raise UsageError(f"{dim!r} of {name} is no name", "dims")
            known = free.setdefault(dim, size) if isinstance(dim, str) else size if dim is None else dim
            if known != size:
                raise UsageError(f"{dim} is {known}, but {size} in {name}", "example", "give it one size everywhere")
        shapes[name] = tuple(
            dim if isinstance(dim := named.get(axis), str) else size for axis, size in enumerate(tensor.shape)
        )
    first = {shape[0] if shape else None for shape in shapes.values()}
    if len(first) > 1 or not isinstance(next(iter(first)), str):
        problem = "the first dimension of every input must be free, and have one name, such as batch"
        raise UsageError(problem, "dims", f"or {_GRAPHS}")
    return free, shapes


def _input(
    name: str,
    tensor: Tensor,
    dims: tuple[Dim, ...],
    dtype: torch.dtype,
    upper: int | None,
    rows: int | None,
    padding: Padding,
) -> TensorSpec:
    if tensor.is_floating_point():
        return TensorSpec(name=name, dims=dims, dtype=_float(name, tensor, dtype))
    kind: Any = _INTEGERS.get(tensor.dtype)
    if kind is None:
        raise UsageError(f"{name} is {dtype_name(tensor.dtype)}", "example", "give floats, int64, int32 or bool")
    limit = rows if upper is None else upper
    if limit is not None:
        if not limit > 0 or (tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < limit):
            raise UsageError(f"{name} has values outside of 0 to {limit - 1}", "example")
        return TensorSpec(name=name, dims=dims, dtype=kind, upper=limit)
    if len(dims) == 2 and all(isinstance(dim, str) for dim in dims) and bool(((tensor == 0) | (tensor == 1)).all()):
        return TensorSpec(name=name, dims=dims, dtype=kind, upper=2, is_mask=True, padding=padding)
    if kind == "bool":
        return TensorSpec(name=name, dims=dims, dtype=kind)
    remedy = f'infer the graph with zoo_export.infer_graph(..., upper={{"{name}": N}}) and give it as graphs='
    raise UsageError(f"{name} reaches no nn.Embedding unchanged, so the upper limit of its values is unknown",
                     "example", remedy)  # fmt: skip


def _float(name: str, tensor: Tensor, dtype: torch.dtype) -> Any:
    if tensor.dtype == dtype:
        return "float"
    if tensor.dtype == torch.float32 and dtype.itemsize < 4:
        return "float32"
    raise UsageError(f"{name} is {dtype_name(tensor.dtype)}, and the module {dtype_name(dtype)}", None, _GRAPHS)


def _feeds(
    inputs: Sequence[TensorSpec], sizes: Mapping[str, int], dtype: torch.dtype, *, highest: bool = False
) -> dict[str, Tensor]:
    """Return inputs of given sizes: random ones or, for integers, all the highest; masks without padding."""
    generator = torch.Generator().manual_seed(0)
    feeds = {}
    for tensor in inputs:
        shape, kind = tensor.shape(sizes), declared_dtype(tensor, dtype)
        if tensor.is_float:
            feeds[tensor.name] = torch.randn(shape, generator=generator).to(kind)
        elif tensor.is_mask or highest:
            feeds[tensor.name] = torch.full(shape, (tensor.upper or 2) - 1).to(kind)
        else:
            feeds[tensor.name] = torch.randint(tensor.upper or 2, shape, generator=generator).to(kind)
    return feeds


def _check_limits(call: _Call, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` if the module cannot read the highest integers that are declared."""
    try:
        call(_feeds(inputs, sizes, call.dtype, highest=True))
    except UsageError as error:
        limits = ", ".join(f"{item.name}: {item.upper}" for item in inputs if item.upper and not item.is_mask)
        raise UsageError(f"at the highest integers below their limits, {error}", f"upper {{{limits}}}") from error


def _probe(call: _Call, inputs: Sequence[TensorSpec], free: Mapping[str, int], name: str, size: int) -> _Probe:
    sizes = {**free, name: size}
    try:
        return _Probe(name, sizes, call(_feeds(inputs, sizes, call.dtype)))
    except UsageError as error:
        remedy = f"if {name} cannot have the size {size}, {_GRAPHS} with sizes of it"
        raise UsageError(f"{error}", None, remedy) from error


def _other_sizes(name: str, size: int, allowed: Size) -> list[int]:
    """Return a slightly larger and a much larger size, or a smaller one."""
    if not allowed.allows(size):
        raise UsageError(f"{name} must be {allowed}, got {size}", "example")
    found = {allowed.nearest(other) for other in (size + 1, 2 * size + 3, 1)} - {size}
    if not found:
        raise UsageError(f"{name} has one size only", "sizes", "write a number instead of its name in dims")
    return sorted(found, reverse=True)[:2]


def _output(
    name: str, tensor: Tensor, dtype: torch.dtype, free: Mapping[str, int], probes: Sequence[_Probe], rows: str
) -> TensorSpec:
    if any(probe.outputs.keys() != probes[0].outputs.keys() for probe in probes):
        raise UsageError("the module returns other outputs for other sizes", None, _GRAPHS)
    if any(probe.outputs[name].ndim != tensor.ndim for probe in probes):
        raise UsageError(f"{name} has another number of dimensions for other sizes", None, _GRAPHS)
    dims = tuple(_dim(name, axis, tensor, free, probes) for axis in range(tensor.ndim))
    if dims[:1] != (rows,):
        problem = f"the first dimension of {name}, {dims or 'a single number'}, is not that of rows, {rows}"
        raise UsageError(problem, None, "return a result for each row alone")
    if tensor.is_floating_point():
        return TensorSpec(name=name, dims=dims, dtype=_float(name, tensor, dtype))
    kind: Any = _INTEGERS.get(tensor.dtype)
    if kind is None:
        raise UsageError(f"{name} is {dtype_name(tensor.dtype)}", None, "return floats, int64, int32 or bool")
    return TensorSpec(name=name, dims=dims, dtype=kind)


def _dim(name: str, axis: int, tensor: Tensor, free: Mapping[str, int], probes: Sequence[_Probe]) -> Dim:
    """Return a dimension of an output: a number, a free dimension, or a sum."""
    size = tensor.shape[axis]
    moving = {probe.name for probe in probes if probe.outputs[name].shape[axis] != size}
    names = [name for name in free if name in moving]
    for probe in probes:
        moved = probe.outputs[name].shape[axis] - size
        if moved != (probe.sizes[probe.name] - free[probe.name] if probe.name in names else 0):
            there = f"{probe.outputs[name].shape[axis]} where {probe.name} is {probe.sizes[probe.name]}"
            what = f"dimension {axis} of {name} is {size} where {probe.name} is {free[probe.name]}, and {there}"
            raise UsageError(what, None, _GRAPHS)
    rest = size - sum(free[item] for item in names)
    if rest < 0:
        raise UsageError(f"dimension {axis} of {name} is {-rest} less than {' + '.join(names)}", None, _GRAPHS)
    return " + ".join([*names, *([str(rest)] if rest else [])]) if names else size
