"""Roofline bounds: the minimum time of a case on this machine, from the bytes it reads and the FLOPs it computes.

The memory bound is the time of reading as many bytes as the case must read, weights and caches, once: the fastest turn
of the faster of two operators, since no single one reads fastest on every machine. Compute throughput is measured with
a product of two large matrices. All run on ONNX Runtime with as many threads as the session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.contract import standard_fields
from zoo.probe.pipeline import Arrays
from zoo.registry import ModelSpec
from zoo_export.bench.cases import BenchCase, Call
from zoo_export.graph.file import load
from zoo_runtime import Session
from zoo_runtime.generation.memory import past_bytes
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Provider, device_of, open_session
from zoo_runtime.onnx_runtime.values import to_value

__all__ = ["Count", "Limits", "Reading", "bytes_read", "closed_form", "necessary_flops", "weight_bytes"]

_GEMM = {"cpu": 1024, "cuda": 8192}
"""Rows of the large matrices: enough to saturate the cores, few enough to time several products."""
_ROWS = 256
"""Rows of the matrix that is read to measure bandwidth."""
_LOOKUPS = ("Gather", "GatherBlockQuantized")
Count = Callable[[ModelSpec, BenchCase], int | None]
"""Returns the FLOPs of a case, or None if unknown."""


class Limits:
    """Lower bounds on the time of a case.

    Without a FLOP count only decode phases have a bound: with so few tokens, reading the weights dominates.

    Args:
        session: open session of the model.
        case: the case.
        feeds: inputs of the case, without caches.
        count: counts its FLOPs.
    """

    def __init__(self, session: Session, case: BenchCase, feeds: Arrays, count: Count) -> None:
        self.bytes = bytes_read(session, case, feeds)
        self.flops = necessary_flops(session, case, count)
        self.known = self.flops is not None or case.phase == "decode"
        # CPU kernels have no float16 arithmetic: they compute in float32.
        dtype = np.dtype(np.float32) if session.provider == "cpu" else session.dtype
        side, provider, threads = _GEMM[session.provider], session.provider, session.threads
        self._reading, self._computed = Reading(self.bytes, provider, threads), 2 * side**3
        square = _ones((side, side), provider, dtype)
        product = _call("MatMul", {"a": square, "b": square}, provider, threads)
        self.calls = {**self._reading.calls, "compute": product}
        """Calls to time; pass the seconds of the fastest turn of each to :meth:`describe`."""

    def describe(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return the minimum time of the case, which limit sets it, and the measurements behind it."""
        speeds = {"memory": self._reading.speed(seconds), "compute": self._computed / seconds["compute"]}
        least = {"memory": self.bytes / speeds["memory"], "compute": (self.flops or 0) / speeds["compute"]}
        bound = max(least, key=lambda name: least[name]) if self.known else None
        return {
            "bound": bound,
            "seconds": least[bound] if bound else None,
            "bytes": self.bytes,
            "bytes_per_second": speeds["memory"],
            "flops": self.flops,
            "flops_per_second": speeds["compute"],
        }


class Reading:
    """Two ways of reading a number of bytes once: a vector-matrix product, and the maximum of each row.

    Args:
        size: the number of bytes, rounded up to whole columns.
        provider: the execution provider.
        threads: number of threads; by default as many as a session has.
        spin: whether idle threads wait actively, see :func:`zoo_runtime.onnx_runtime.providers.open_session`.
    """

    def __init__(self, size: int, provider: Provider, threads: int | None = None, *, spin: bool = True) -> None:
        columns = -(-size // (_ROWS * 4))
        self.size = _ROWS * columns * 4
        """The number of bytes that a call reads."""
        row, matrix = (_ones((rows, columns), provider) for rows, columns in ((1, _ROWS), (_ROWS, columns)))
        self.calls: dict[str, Call] = {
            "product": _call("MatMul", {"a": row, "b": matrix}, provider, threads, spin=spin),
            "maxima": _call("ReduceMax", {"b": matrix}, provider, threads, spin=spin),
        }
        """Calls to time; pass the seconds of the fastest turn of each to :meth:`speed`."""

    def speed(self, seconds: Mapping[str, float]) -> float:
        """Return the bytes per second of the faster way."""
        return self.size / min(seconds[name] for name in self.calls)


def _ones(shape: tuple[int, int], provider: Provider, dtype: type[Any] | np.dtype[Any] = np.float32) -> ort.OrtValue:
    return to_value(np.ones(shape, dtype), provider)


def _call(
    operator: str, inputs: Mapping[str, ort.OrtValue], provider: Provider, threads: int | None, *, spin: bool = True
) -> Call:
    """Return a call of one operator on matrices; ``ReduceMax`` reduces the last axis."""
    from onnx import helper, numpy_helper

    kind = next(iter(inputs.values())).element_type()
    inputs_of_graph = [helper.make_tensor_value_info(name, kind, value.shape()) for name, value in inputs.items()]
    axes = [numpy_helper.from_array(np.array([-1]), "axes")] if operator == "ReduceMax" else []
    node = helper.make_node(operator, [*inputs, *(axis.name for axis in axes)], ["c"])
    graph = helper.make_graph(
        [node], "limit", inputs_of_graph, [helper.make_tensor_value_info("c", kind, [None, None])], axes
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    runtime = open_session(model.SerializeToString(), provider=provider, threads=threads, spin=spin)
    binding = runtime.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("c", device_of(runtime))

    def call() -> Sequence[Any]:
        runtime.run_with_iobinding(binding)
        return ()

    return call


def bytes_read(session: Session, case: BenchCase, feeds: Arrays) -> int:
    """Return the minimum bytes that a call reads: weights, caches and encoder outputs."""
    graph = case.graph
    past = case.batch * past_bytes(graph, session.dtype, case.past)
    handed = sum(value.nbytes for value in feeds.values() if value.dtype != np.int64)
    return weight_bytes(session.export.read()[graph.name]) + handed + past


def weight_bytes(graph: bytes) -> int:
    """Return the bytes of weights that a serialised graph reads in full, excluding lookup tables."""

    from zoo_export.graph.inline import inline

    model = load(graph)
    inline(model)
    return sum(
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None and any(use.node.op_type not in _LOOKUPS for use in value.uses())
    )


def necessary_flops(session: Session, case: BenchCase, count: Count) -> int | None:
    """Count the FLOPs of a case, leaving out logits that the graph does not compute (all but the last position)."""
    spec = session.stored.spec
    total = count(spec, case)
    inputs = {item.name for item in session.sessions[case.graph.name].get_inputs()}
    if total is None or case.new == 1 or LOGITS_TO_KEEP not in inputs:
        return total
    fields = standard_fields(spec.config)
    sizes = {"vocab_size": fields.vocab_size, "target_vocab_size": fields.target_vocab_size}
    doubled = {name: 2 * size for name, size in sizes.items() if size}
    if not doubled:
        return None
    # The cost of the logits is the part proportional to the vocabulary.
    twice = count(_with(spec, **doubled), case)
    return None if twice is None else total - (twice - total) * (case.new - 1) // case.new


def closed_form(spec: ModelSpec, case: BenchCase) -> int | None:
    """Return the FLOPs declared by the architecture, which are available only for models with a single graph."""
    if len(spec.graphs) > 1 or standard_fields(spec.config).max_seq_len is None:
        return None
    cost = _with(spec, max_seq_len=case.past + case.new).cost  # costs are declared at full context
    return None if cost is None else case.batch * case.new * cost.flops


def _with(spec: ModelSpec, **values: int) -> ModelSpec:
    """Return the model with changed configuration values."""
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, **values))
