"""Parity of graphs that store keys and values as int8.

Rounding is not continuous: a key that nearly ties between two integers is stored as either, depending on rounding
errors of the layers before, and later tokens see the difference. The comparison separates this from everything else, so
that its limits are those of any export, in three parts. The first and the third hold bit by bit, wherever a text is
cut:

- What a call stores is its keys and values, rounded by :func:`zoo_export.variants.int8_cache.graph.quantize` in numpy,
  after the unchanged past.
- The graph is compared with the module in float64 while both attend to the same integers, those of the module. The
  yardstick, the module in its own dtype, attends to them as well. Compared are all outputs, and the keys and values
  before they are rounded. The graph that reads given integers is that of
  :func:`zoo_export.variants.int8_cache.graph.probe`.
- That graph returns what the exported one returns, bit by bit, if it is given the integers that the latter has stored.

The module attends to rounded keys and values because ``LayerCache.extend`` returns them rounded. How far that moves the
results is measured on text: see :mod:`zoo_export.variants.int8_cache.recipe`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.contract import Graph, standard_fields
from zoo.errors import ParityError
from zoo.nn import call_graph
from zoo.nn.cache import LayerCache
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import TorchExecutor, as_array, as_tensor
from zoo.probe.pipeline import Arrays, Executor
from zoo.probe.widened import deferring_products
from zoo_export.coverage.outcomes import Conditions
from zoo_export.parity.modules import ModuleError
from zoo_export.parity.subject import OnnxSubject, Subject
from zoo_export.variants.int8_cache.graph import GIVEN, MADE, NEW, dequantize, probed, quantize
from zoo_export.variants.quantized.subject import QuantizedSubject
from zoo_export.variants.reduced.model import ReducedModel
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Memory, Provider

__all__ = ["CacheSubject", "QuantizedCacheSubject", "RoundingExecutor"]

Stored = dict[str, tuple[Array, Array]]
"""The integers and scales of each tensor of the past after a call, by its name."""

_KEPT = 4
"""Number of calls of the reference whose results are kept: all levels and the yardstick repeat them."""
_UNLIKE = 0.5
"""Relative difference from which keys or values are those of other layers. That of random ones is about 1.4."""
_CLOSED = 512
"""Number of tokens up to which a call of the exported graph is compared with the one that reads given integers."""


@contextmanager
def _extending(change: Callable[[Tensor], Tensor]) -> Iterator[list[LayerCache]]:
    """Change the keys and values that layers attend to, but not those that they store. Yields the layers that do."""
    extend, seen = LayerCache.extend, list[LayerCache]()

    def changed(layer: LayerCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(layer)
        keys, values = extend(layer, key, value)
        return change(keys), change(values)

    LayerCache.extend = changed  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        LayerCache.extend = extend  # type: ignore[method-assign]


def _rounded(values: Tensor) -> Tensor:
    array = as_array(values.contiguous())
    return as_tensor(dequantize(*quantize(array), array.dtype))


class RoundingExecutor(TorchExecutor):
    """Runs graphs on the module, whose layers attend to rounded keys and values. Those of the past are not rounded."""

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        with _extending(_rounded):
            return super().__call__(graph, feeds)


class _Keys(RoundingExecutor):
    """Computes of a graph with a past only what it stores: logits take more memory than all else."""

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        if not graph.pasts:
            return super().__call__(graph, feeds)
        tensors = {tensor.name: as_tensor(feeds[tensor.name]) for tensor in graph.input_tensors()}
        tensors = {name: value.to(self.real) if value.is_floating_point() else value for name, value in tensors.items()}
        with torch.inference_mode(), self._conversions(), _extending(_rounded) as seen, deferring_products():
            outputs = call_graph(self.model, graph, tensors, hooks=True)
        if 2 * len(seen) != len(graph.growing_pairs()):
            problem = "the layers of the model do not extend their keys and values by zoo.nn.LayerCache.extend"
            raise ParityError(f"{problem}, so they cannot be compared in int8", f"graph {graph.name}")
        return {tensor.name: as_array(outputs[tensor.name]) for tensor in graph.present_tensors()}


class _Codes:
    """The integers that the reference attends to, for executors that run the same calls.

    What an executor returns is near what the reference returns for the same call. Where it is an input of a later call,
    the reference reads its own instead.
    """

    def __init__(self, model: nn.Module) -> None:
        self._reference = _Keys(model)
        self._calls: OrderedDict[bytes, Arrays] = OrderedDict()
        self._twins: OrderedDict[bytes, tuple[bytes, str]] = OrderedDict()
        """The call and the output of the reference for the digest of an output of another executor."""
        self._last: dict[bytes, Stored] = {}
        self.frozen = False
        """Whether the weights of the reference are nudged, so that only earlier results count."""

    def clear(self) -> None:
        """Forget all results, which are those of other weights."""
        self._calls.clear()
        self._twins.clear()
        self._last.clear()

    def call(self, graph: Graph, feeds: Feeds, outputs: Arrays | None = None) -> Arrays:
        """Return the outputs of the reference, and note that ``outputs`` of an executor stand for them."""
        exact = {name: self._exact(value) for name, value in feeds.items()}
        key = _digest(graph.name.encode(), *(value for _, value in sorted(exact.items())))
        if key not in self._calls:
            self._calls[key] = self._reference(graph, exact)
            if len(self._calls) > _KEPT:
                self._calls.popitem(last=False)
        for name in self._calls[key].keys() & (outputs or {}).keys():
            self._twins[_digest(outputs[name])] = key, name  # type: ignore[index]
        while len(self._twins) > 64 * _KEPT * len(graph.output_tensors()):
            self._twins.popitem(last=False)
        return self._calls[key]

    def _exact(self, value: Array) -> Array:
        key, name = self._twins.get(_digest(value), (b"", "")) if value.dtype.kind == "f" else (b"", "")
        return self._calls[key][name] if key in self._calls else value

    def stored(self, graph: Graph, feeds: Feeds) -> Stored:
        """Return what the reference stores in a call."""
        inputs = (value for _, value in sorted(feeds.items()) if value.dtype.kind != "f")
        past = feeds[graph.growing_pairs()[0][0].name].shape
        place = _digest(graph.name.encode(), repr(past).encode(), *inputs)
        if not (self.frozen and place in self._last):
            presents = self.call(graph, feeds)
            self._last[place] = {past.name: quantize(presents[after.name]) for past, after in graph.growing_pairs()}
            while len(self._last) > _KEPT:
                del self._last[next(iter(self._last))]
        return self._last[place]


def _digest(*parts: Array | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr((part.shape, part.dtype.str)).encode())
        if not isinstance(part, bytes):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.digest()


class _GivenExecutor(TorchExecutor):
    """Runs graphs as another executor of the module does, but attends to the integers of the reference."""

    def __init__(self, inner: TorchExecutor, codes: _Codes) -> None:
        super().__init__(inner.model)
        self._inner, self._codes = inner, codes

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        if not graph.growing_pairs():
            outputs = self._inner(graph, feeds)
        else:
            codes = iter(self._codes.stored(graph, feeds).values())

            def look(values: Tensor) -> Tensor:
                numbers, scales = next(codes, (np.zeros(0, np.int8), np.zeros(0, np.float32)))
                array = as_array(values.contiguous())
                expanded = dequantize(numbers, scales, array.dtype)
                if expanded.shape != array.shape or np.abs(expanded - array).sum() > _UNLIKE * np.abs(array).sum():
                    raise ParityError("the layers do not extend their keys and values in order", f"graph {graph.name}")
                return as_tensor(expanded)

            with _extending(look):
                outputs = self._inner(graph, feeds)
        if not self._codes.frozen:
            self._codes.call(graph, feeds, outputs)
        return outputs

    def keeping(self, feeds: Feeds, point: Point) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._inner.keeping(feeds, point)


class _CacheExecutor(OnnxExecutor):
    """Runs graphs that store int8 as if they did not: attention reads the integers of the reference.

    Raises :class:`ParityError` if a graph does not store the rounded keys and values, changes its past, or differs from
    the graph of :func:`zoo_export.variants.int8_cache.graph.probe` that attends to the same integers.
    """

    def __init__(self, sessions: Mapping[str, ort.InferenceSession], dtype: np.dtype[Any], codes: _Codes) -> None:
        super().__init__(sessions, dtype)
        self._codes = codes
        self._once = OnnxExecutor(sessions, dtype, twice=False)

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        outputs = self._run_on_codes(graph, feeds) if graph.growing_pairs() else super().__call__(graph, feeds)
        self._codes.call(graph, feeds, outputs)
        return outputs

    def _run_on_codes(self, graph: Graph, feeds: Feeds) -> Arrays:
        pairs, wide = graph.growing_pairs(), probed(graph)
        start = feeds[pairs[0][0].name].shape[2]
        codes = self._codes.stored(graph, feeds)
        inputs = {name: value for name, value in feeds.items() if name not in codes}
        inputs |= {name: part[:, :, :start] for name, part in _named("", codes).items()}
        new_codes = {name: part[:, :, start:] for name, part in _named(GIVEN, codes).items()}
        where = f"graph {graph.name}"
        if np.prod(next(iter(new_codes.values())).shape[:3:2]) <= _CLOSED:
            stored = {name: np.array(value) for name, value in self._once(graph.with_int8_cache(), inputs).items()}
            after = {past.name: (stored[name.name], stored[f"{name.name}_scale"]) for past, name in pairs}
            for name, part in _named("", after).items():
                _require(part[:, :, :start], inputs[name], f"{name} is changed by a call", where)
            closed = self._once(wide, inputs | {n: part[:, :, start:] for n, part in _named(GIVEN, after).items()})
            for name, part in _named(MADE, after).items():
                _require(part[:, :, start:], closed[name], f"{name} is not what the graph stores", where)
            for tensor in graph.output_tensors():
                if tensor.name in closed and tensor not in graph.present_tensors():
                    _require(stored[tensor.name], closed[tensor.name], f"{tensor.name} does not follow", where)
        outputs = super().__call__(wide, inputs | new_codes)
        for past, present in pairs:
            new = outputs[NEW + past.name]
            for suffix, part in zip(("", "_scale"), quantize(new), strict=True):
                name = f"{MADE}{past.name}{suffix}"
                _require(outputs[name], part, f"{past.name} is not rounded as declared", where)
            outputs[present.name] = np.concatenate([feeds[past.name].astype(self.dtype), new], axis=2)
        return {tensor.name: outputs[tensor.name] for tensor in graph.output_tensors()}


def _named(prefix: str, stored: Stored) -> Arrays:
    """Return integers and scales by the names of their tensors."""
    return {
        f"{prefix}{name}{suffix}": part
        for name, parts in stored.items()
        for suffix, part in zip(("", "_scale"), parts, strict=True)
    }


def _require(found: Array, wanted: Array, what: str, where: str) -> None:
    """Raise :class:`ParityError` unless two arrays are equal, bit by bit."""
    if not np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f"):
        raise ParityError(what, where)


class _Attending(Subject):
    """Base of the subjects below, whose executors all attend to the integers of the reference."""

    codes: _Codes
    recorded: str | None = None

    def _share_codes(self) -> None:
        """Replace the reference. To be called once the models are loaded."""
        self.codes = _Codes(self.models.reference.model)
        self.models.reference = RoundingExecutor(self.models.reference.model)
        self._given: dict[int, _GivenExecutor] = {}

    def yardstick(self, level: str) -> TorchExecutor:
        inner = super().yardstick(level)
        return self._given.setdefault(id(inner), _GivenExecutor(inner, self.codes))

    def _forgetting(self, opened: Iterator[dict[str, Executor]]) -> Iterator[dict[str, Executor]]:
        """Forget the integers of other weights before the graphs run on new ones."""
        for runtimes in opened:
            self.codes.clear()
            yield runtimes

    def nudged(self, bits: int = 1) -> Iterator[TorchExecutor]:
        self.codes.frozen = True
        try:
            for inner in super().nudged(bits):
                yield _GivenExecutor(inner, self.codes)
        finally:
            self.codes.frozen = False

    def module_errors(self, level: str, name: str, feeds: Feeds, point: Point) -> list[ModuleError]:
        return []  # the graph with more outputs attends to integers of its own

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "cache": "int8", "attending": "to the integers of the reference"}  # type: ignore[safe-super]


class CacheSubject(_Attending, OnnxSubject):
    """Float32 graphs with keys and values in int8.

    Args:
        stored: the model.
        files: its graphs and their probes, by name.
        plain: the graphs before they were rewritten. They have the same conditions.
        provider: the execution provider to run them on.
    """

    _can_close = False

    def __init__(
        self, stored: ModelDirectory, files: Mapping[str, bytes], plain: Mapping[str, bytes], provider: Provider
    ) -> None:
        super().__init__(stored, files, provider, stored.spec.graphs)
        self._plain = plain
        self._share_codes()

    def conditions(self) -> Sequence[Conditions]:
        longest = standard_fields(self.stored.spec.config).max_seq_len
        return [Conditions(graph, self._plain[graph.name], self.stored.path, longest) for graph in self.graphs]

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        return self._forgetting(super().open_perturbed())

    def _executor(self, sessions: Mapping[str, ort.InferenceSession]) -> Executor:
        return _CacheExecutor(sessions, self.models.yardstick.dtype, self.codes)


class QuantizedCacheSubject(_Attending, QuantizedSubject):
    """Graphs with quantised weights, and keys and values in int8. ``reduced`` contains their probes."""

    def __init__(self, stored: ModelDirectory, reduced: ReducedModel, provider: Provider) -> None:
        super().__init__(stored, reduced, provider)
        self._share_codes()

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        return self._forgetting(super().open_perturbed())

    def _open(self, reduced: ReducedModel, *, optimize: bool, values: Any = None, memory: Memory = "fast") -> Executor:
        opened: Any = super()._open(reduced, optimize=optimize, values=values, memory=memory)
        return _CacheExecutor(opened.sessions, opened.dtype, self.codes)
