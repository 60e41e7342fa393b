"""Benchmark cases, derived from a model's declared graphs, and the ONNX Runtime backend.

B rows of N tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from zoo.contract import Graph, sizes_of
from zoo.errors import UsageError
from zoo.probe.dtypes import dtype_of
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import Arrays, decoder_inputs
from zoo_runtime import Session
from zoo_runtime.generation.decoder import Decoder
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.onnx_runtime.values import to_value

__all__ = ["Backend", "BenchCase", "Call", "CompileError", "OnnxBackend", "check_declared", "feeds_of", "make_cases"]

_LENGTH = 128
_SEED = 0

Call = Callable[[], Sequence[Any]]
"""Runs the case once. Returns the outputs named by :attr:`BenchCase.compared`, in that order, on the host."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A graph, a phase and a size: a prompt of N tokens, the token after N, or an input of N."""

    graph: Graph
    phase: Literal["encode", "prefill", "decode"]
    batch: int
    length: int

    def of_model(self) -> BenchCase:
        """Return the case for the model itself, whose keys and values have its dtype."""
        return replace(self, graph=self.graph.without_int8_cache())

    def __str__(self) -> str:
        return f"{self.graph.name} {self.phase} {self.batch} x {self.length}"

    @property
    def past(self) -> int:
        """Cached tokens per row before the call."""
        return self.length if self.phase == "decode" else 0

    @property
    def new(self) -> int:
        """Tokens per row that the call computes."""
        return 1 if self.phase == "decode" else self.length

    @property
    def compared(self) -> list[str]:
        """Outputs on which backends must agree; for a decoder, the logits (B, vocabulary) of the last position."""
        return ["logits"] if self.graph.pasts else [tensor.name for tensor in self.graph.output_tensors()]


Backend = Callable[[BenchCase, Arrays], Call]
"""Prepares a call for a case and its inputs, which have N tokens, or N + 1 if any graph has a cache."""


class CompileError(Exception):
    """A backend cannot compile a case. The message is the reason."""


def make_cases(session: Session, batches: Sequence[int], lengths: Sequence[int] | None) -> list[BenchCase]:
    """Return a case for every graph, phase, batch size and length."""
    graphs, where = session.graphs, session.path
    if session.adapters:
        raise UsageError("a graph with adapters cannot be measured", where, "choose another variant")
    if session.export.traits.interface == "loop":
        raise UsageError(
            "a graph with the whole decoding loop cannot be measured by phase", where, "choose another variant"
        )
    if any(graph.pasts and all(tensor.name != "logits" for tensor in graph.output_tensors()) for graph in graphs):
        raise UsageError("a decoder without logits cannot be measured", where)
    positions, after = session.option("max_seq_len"), any(graph.pasts for graph in graphs)
    longest = None if positions is None else positions - after
    if lengths is None:
        lengths = [_LENGTH if longest is None else min(_LENGTH, longest)]
    for length in lengths:
        check_declared(graphs, length, f"length {length}")
        if longest is not None and length > longest:
            more = ", and decoding needs one more" if after else ""
            problem = f"the model has {positions} positions{more}"
            raise UsageError(problem, f"length {length}", f"choose at most {longest}")
    return [
        BenchCase(graph, phase, batch, length)
        for graph in graphs
        for batch in batches
        for length in lengths
        for phase in _phases(graph)
    ]


def check_declared(graphs: Sequence[Graph], length: int, where: str) -> None:
    """Raise :class:`UsageError` unless every length may have this size."""
    for name, size in sizes_of(graphs).items():
        if not size.allows(length):
            raise UsageError(f"{name} must be {size}", where, "choose other lengths")


def _phases(graph: Graph) -> tuple[Literal["encode", "prefill", "decode"], ...]:
    return ("prefill", "decode") if graph.pasts else ("encode",)


def feeds_of(session: Session, case: BenchCase) -> Arrays:
    """Return the inputs of a case's graph, running the preceding graphs whose outputs it needs."""
    graphs = session.graphs
    point = Point(case.batch, case.length, int(any(graph.pasts for graph in graphs)), "none")
    feeds = make_feeds(graphs, point, _SEED, 0, other=case.length)
    for graph in graphs[: graphs.index(case.graph)]:
        feeds |= session.execute(graph, feeds)
    return {
        tensor.name: feeds[tensor.name].astype(dtype_of(tensor, session.dtype), copy=False)
        for tensor in case.graph.input_tensors()
        if tensor.name in feeds
    }


class OnnxBackend:
    """ONNX Runtime, through the session that tasks use."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, case: BenchCase, feeds: Arrays) -> Call:
        session, graph = self.session, case.graph
        if not graph.pasts:

            def encode() -> list[Any]:
                outputs = session.execute(graph, feeds)
                return [outputs[name] for name in case.compared]

            return encode
        ids = feeds[decoder_inputs(graph)[0]]
        runtime = session.sessions[graph.name]
        constants = {name: to_value(np.ascontiguousarray(value), device_of(runtime)) for name, value in feeds.items()}

        def prefill() -> list[Any]:
            return [start().step(ids[:, : case.length])]

        def start() -> Decoder:
            return Decoder(runtime, graph, constants, case.batch, session.dtype)

        if case.phase == "prefill":
            return prefill
        decoder = start()
        decoder.step(ids[:, : case.length])
        values = decoder.values
        decoder.step(ids[:, case.length :])  # buffers may grow, which should not be timed

        def decode() -> list[Any]:
            decoder.values, decoder.length = values, case.length  # decode the same token each time
            return [decoder.step(ids[:, case.length :])]

        return decode
