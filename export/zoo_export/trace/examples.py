"""Example inputs of a graph that is traced."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch._dynamo

from zoo.contract import Graph, Size, TensorSpec, dim_names, dim_size, sizes_of, standard_fields
from zoo.models import dtypes
from zoo.registry import ModelSpec

__all__ = ["example_sizes", "example_tensors", "limited_lengths", "quiet", "without_fake_cache"]


def example_sizes(spec: ModelSpec, graph: Graph) -> dict[str, int]:
    """Return sizes of the named dimensions, multiples of odd primes, so that the tracer takes no two for the same.

    Lengths fill several chunks of a model that cuts texts into chunks, because the tracer takes a number of 1 for a
    constant. They are below the largest number of tokens, because it takes a slice of all rows for a constant, too.
    """
    declared, longest = sizes_of(spec.graphs), standard_fields(spec.config).max_seq_len
    limited = limited_lengths(graph)
    names = *limited, *graph.dim_names()
    for smallest in (37, 11):
        sizes = _distinct_sizes(graph, names, declared, smallest)
        if (
            longest is None
            or sum(size for name, size in sizes.items() if name not in (*graph.rows, *limited)) < longest
        ):
            return sizes
    return _distinct_sizes(graph, sorted(names, key=lambda name: name in graph.rows), declared, 3)


def _distinct_sizes(graph: Graph, names: Iterable[str], declared: Mapping[str, Size], smallest: int) -> dict[str, int]:
    dims = {dim for tensor in (*graph.input_tensors(), *graph.output_tensors()) for dim in tensor.dims}
    if graph.has_windows:  # the length of the whole past may be that of no tensor
        dims = dims - {*graph.kept_lengths()} | {str(graph.past_length)}
    sizes: dict[str, int] = {}
    for name in names:
        allowed = declared.get(name, Size())
        for prime in _primes(smallest):
            sizes[name] = allowed.nearest(prime * allowed.multiple_of)
            ready = (dim for dim in dims if dim in sizes or (dim_names(dim) and sizes.keys() >= {*dim_names(dim)}))
            lengths = [dim_size(dim, sizes) for dim in ready]
            distinct = min(lengths, default=3) > 2 and len({*lengths}) == len(lengths)
            if distinct or sizes[name] < prime * allowed.multiple_of:  # beyond the largest size
                break
    return sizes


def limited_lengths(graph: Graph) -> tuple[str, ...]:
    """Return the lengths of a past that windows limit. In a trace they are free, and shorter than the whole past."""
    dims = (dim for tensor in graph.past_tensors() for dim in tensor.dims if isinstance(dim, str))
    return tuple(dict.fromkeys(dim for dim in dims if dim_names(dim) not in ((), (dim,))))


def _primes(smallest: int) -> Iterator[int]:
    return (number for number in itertools.count(smallest) if all(number % divisor for divisor in range(2, number)))


def example_tensors(
    tensors: Sequence[TensorSpec], sizes: Mapping[str, int], dtype: str, device: str
) -> tuple[torch.Tensor, ...]:
    """Return zeros with the sizes of named dimensions, floating-point ones in the dtype of the weights."""
    real = dtypes.torch_dtype(dtype)
    return tuple(
        torch.zeros(tensor.shape(sizes), dtype=dtypes.declared_dtype(tensor, real), device=device) for tensor in tensors
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, logs and output of torch's exporter. Errors still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def without_fake_cache() -> AbstractContextManager[None]:
    """Let torch keep no results of operators on fake tensors: few are computed twice, and a key of each takes time."""
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
