"""The torch backends of :mod:`zoo_export.bench`: the unmodified module, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zoo.artifact import ModelDirectory
from zoo.contract import Graph, row_sizes
from zoo.models.create import build_on_meta
from zoo.models.dtypes import declared_dtype
from zoo.models.persist import load_directory
from zoo.nn import GraphModule, call_graph
from zoo.probe.inputs import empty_past, next_past, slice_feeds
from zoo.probe.module import as_array, as_tensor
from zoo.probe.pipeline import Arrays
from zoo.registry import ModelSpec
from zoo_export.bench.cases import BenchCase, Call, CompileError
from zoo_runtime.onnx_runtime.providers import Provider, allowed_cores

__all__ = ["TorchBackend", "count_flops", "device_problem", "limited_threads"]


def device_problem(provider: Provider) -> str | None:
    """Return why torch cannot run on the session's provider, or None if it can."""
    return "this torch has no CUDA device" if provider == "cuda" and not torch.cuda.is_available() else None


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads temporarily, by default to that of the session."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or allowed_cores() or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TorchBackend:
    """The model with its stored weights, in its own dtype."""

    def __init__(self, stored: ModelDirectory, device: str) -> None:
        self.model = load_directory(stored).to(device)
        self.device, self.real = device, next(self.model.parameters()).dtype

    def __call__(self, case: BenchCase, feeds: Arrays) -> Call:
        """Prepare an eager call."""
        case = case.of_model()
        return _call(GraphModule(self.model, case.graph), case, self._inputs(case, feeds))

    def compiled(self, case: BenchCase, feeds: Arrays) -> Call:
        """Prepare a call compiled for the shapes of this case, without graph breaks, and run it once.

        Raises :class:`zoo_export.bench.cases.CompileError`.
        """
        case = case.of_model()
        torch.compiler.reset()
        module = torch.compile(GraphModule(self.model, case.graph), fullgraph=True, dynamic=False)
        call = _call(module, case, self._inputs(case, feeds))
        try:
            call()
        except Exception as error:  # compilers may raise anything
            reason = str(error).strip().partition("\n")[0]
            raise CompileError(f"{type(error).__name__}: {reason}") from error
        return call

    def _inputs(self, case: BenchCase, feeds: Arrays) -> list[Tensor]:
        """Return the inputs of the call, in declaration order."""
        graph, tensors = case.graph, self._tensors(feeds)
        if graph.pasts:
            tensors |= self._tensors(empty_past(graph, case.batch, np.dtype(np.float32)))
            if case.past:
                tensors |= next_past(graph, self._run(graph, tensors | self._part(graph, feeds, 0, case.past)))
            tensors |= self._part(graph, feeds, case.past, case.past + case.new)
        return [tensors[tensor.name] for tensor in graph.input_tensors()]

    def _run(self, graph: Graph, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            return call_graph(self.model, graph, feeds)

    def _part(self, graph: Graph, feeds: Arrays, start: int, stop: int) -> dict[str, Tensor]:
        return self._tensors(dict(slice_feeds(graph, feeds, start, stop)))

    def _tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        tensors = {name: as_tensor(value) for name, value in arrays.items()}
        return {
            name: tensor.to(self.device, self.real if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }


def _call(module: Any, case: BenchCase, inputs: list[Tensor]) -> Call:
    names = [tensor.name for tensor in case.graph.output_tensors()]

    def call() -> list[Any]:
        with torch.inference_mode():
            outputs = dict(zip(names, module(*inputs), strict=True))
            compared = [outputs[name] for name in case.compared]
            # On a GPU this waits for the results, as a real caller would.
            return [as_array((value[:, -1].float() if case.graph.pasts else value).cpu()) for value in compared]

    return call


def count_flops(spec: ModelSpec, case: BenchCase) -> int:
    """Count the FLOPs of a case's matrix products with torch's counter, on the meta device."""
    graph = case.of_model().graph
    sizes = dict.fromkeys(graph.dim_names(), case.length) | row_sizes([graph], case.batch) | {"sequence": case.new}
    sizes[str(graph.past_length)] = case.past
    feeds = {
        tensor.name: torch.empty(tensor.shape(sizes), dtype=declared_dtype(tensor, torch.float32), device="meta")
        for tensor in graph.input_tensors()
    }
    counter = FlopCounterMode(display=False)
    # The counter has no formula for fused attention on CPU and would count it as zero.
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        call_graph(build_on_meta(spec), graph, feeds)
    return int(counter.get_total_flops())
