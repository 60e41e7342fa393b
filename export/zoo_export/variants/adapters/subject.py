"""Parity of graphs with adapters: with every adapter, they must compute what the adapted model does.

The base model is compared over the whole grid, like any export. Each adapter is compared at fewer points, since only
products of dense layers differ, with

- the module in float64 in which the adapters are layers beside the weights, on the stored weights and on perturbed
  ones, the adapter's included;
- the module in float64 whose weights are those of ``zoo adapt --merge``.

Every point is also run in a batch in which two of three rows have other adapters: the rest must not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from zoo.arrays import Array
from zoo.artifact import ADAPTERS, ModelDirectory
from zoo.checkpoints.peft import Update
from zoo.contract import Graph, TensorSpec, standard_fields
from zoo.models import persist
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import not_perturbed
from zoo.probe.pipeline import Arrays, Executor
from zoo.training.adapters.low_rank import LowRankLinear, add_updates
from zoo_export.comparison import Comparison
from zoo_export.coverage.outcomes import Conditions
from zoo_export.parity.compare import check_fixed
from zoo_export.parity.evidence import evidence_of
from zoo_export.parity.memory import check_memory
from zoo_export.parity.points import typical_point
from zoo_export.parity.report import Report
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep
from zoo_export.variants.adapters.graph import stacks_of, without_adapters
from zoo_export.variants.adapters.lora_file import file_name
from zoo_export.variants.adapters.stack import FILE, LORA_A, LORA_B, Adapter, factors
from zoo_export.variants.base import Candidate
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS, BASE
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype
from zoo_runtime.onnx_runtime.stopping import running

__all__ = ["AdaptedGraphs", "AdapterExecutor", "AdapterSubject", "Form", "compare_adapter", "compare_adapters"]

Form = Literal["beside", "merged"]
MIXED = "mixed"
"""The level of batches with several adapters."""
LORA_FILE = "lora_file"
"""The level of an adapter that comes from a file of ONNX Runtime's LoraAdapter."""


@dataclass(frozen=True, kw_only=True)
class AdaptedGraphs(Candidate):
    """Graphs with adapters. The file of stacks lies in ``folder``, and graphs refer to it as if beside the model's."""

    variant: str = ADAPTERS
    adapters: Sequence[Adapter]
    """In the order of their numbers, from 1 on."""
    lora_files: bool = False
    """Whether the folder also has each adapter as a file of ONNX Runtime's LoraAdapter."""


def compare_adapters(graphs: AdaptedGraphs, comparison: Comparison = Comparison()) -> Report:
    """Compare graphs with the model, and with each adapter of it.

    Over the full grid, adapters are compared at all of its points. Raises :class:`ParityError` if the comparison cannot
    be made, and :class:`UsageError` if the provider does not load.
    """
    stored = graphs.stored
    check_dtype(stored.dtype, comparison.provider, stored.path)
    check_memory(stored)
    sweep = Sweep(AdapterSubject(graphs, comparison.provider, 0), comparison.longest)
    yardstick = sweep.subject.models.yardstick.model
    check_fixed(yardstick, stored, graphs.files)
    try:
        sweep.run(comparison)
    finally:
        sweep.subject.close()
    failures = sweep.failures()
    typical = typical_point(sweep.subject.graphs, sweep.longest)
    points = sweep.points
    if not comparison.full_grid:
        points = list(dict.fromkeys([typical, *sweep.selection(sweep.points)]))
    evidence = {**evidence_of(sweep, verified=not failures), "not_perturbed": not_perturbed(yardstick)}
    del sweep, yardstick  # they hold perturbed weights
    adapters: dict[str, Any] = {}
    for number, adapter in enumerate(graphs.adapters, 1):
        errors: dict[str, Any] = {}
        for form in ("beside", "merged") if not failures else ():
            errors[form], lines = compare_adapter(graphs, number, form, points, provider=comparison.provider)
            failures = failures + lines
        facts = {"number": number, **adapter.facts()}
        adapters[adapter.name] = {**facts, "points": [point.to_dict() for point in points], "graphs": errors}
    return Report({**evidence, "verified": not failures, "adapters": adapters}, failures)


def compare_adapter(
    graphs: AdaptedGraphs,
    number: int,
    form: Form,
    points: Sequence[Point],
    *,
    provider: Provider = "cpu",
) -> tuple[dict[str, Any], list[str]]:
    """Compare graphs with the model and one adapter, by its number, at these points.

    Args:
        graphs: the graphs and the adapters.
        number: the number of the adapter; 0 is the model itself.
        form: whether the adapter of the PyTorch model is beside the weights, or merged into them.
        points: where to compare.
        provider: the execution provider.

    Returns:
        The errors of each output, by graph, and one line for each failure.
    """
    subject = AdapterSubject(graphs, provider, number, form)
    sweep = Sweep(subject)
    try:
        sweep.visit(points)
        if not sweep.findings.hopeless:
            sweep.decode()
        sweep.runtimes = {}
        if not sweep.findings.hopeless:
            sweep.perturb(points)
        lines = sweep.failures()
    finally:
        subject.close()
    return {graph.name: sweep.findings.outputs(graph) for graph in subject.graphs}, lines


class AdapterExecutor(OnnxExecutor):
    """Runs graphs with one adapter for all rows.

    Args:
        sessions: by graph name.
        dtype: dtype of floating-point inputs.
        number: the number of the adapter.
        others: with these numbers, each row has a copy before and after it that has one of these adapters, and whose
            results are dropped. All rows with this adapter are then between others, so that none decides for all.
    """

    def __init__(
        self,
        sessions: Mapping[str, ort.InferenceSession],
        dtype: np.dtype[Any],
        number: int,
        others: Sequence[int] = (),
    ) -> None:
        super().__init__(sessions, dtype, lean=True)
        self.number = number
        self.others = others

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        axes = {tensor.name: _batch_axis(tensor) for tensor in (*graph.input_tensors(), *graph.output_tensors())}
        rows = next(feeds[name].shape[axis] for name, axis in axes.items() if axis is not None and name in feeds)
        ids = np.full(rows, self.number)
        if not self.others:
            return super().__call__(graph, {**feeds, ADAPTER_IDS: ids})
        tripled = {
            name: values if (axis := axes.get(name)) is None else np.repeat(values, 3, axis)
            for name, values in feeds.items()
        }
        mixed = np.resize(self.others, (rows, 3))
        mixed[:, 1] = self.number
        outputs = super().__call__(graph, {**tripled, ADAPTER_IDS: mixed.reshape(-1)})
        return {
            name: values if (axis := axes.get(name)) is None else values.take(range(1, 3 * rows, 3), axis)
            for name, values in outputs.items()
        }


class _LoraFileExecutor(AdapterExecutor):
    """Runs graphs with the adapter in files of ONNX Runtime's LoraAdapter, by graph name."""

    def __init__(
        self, sessions: Mapping[str, ort.InferenceSession], dtype: np.dtype[Any], files: Mapping[str, Path]
    ) -> None:
        super().__init__(sessions, dtype, 1)
        self._adapters = {}
        for graph, path in files.items():
            self._adapters[graph] = ort.LoraAdapter()
            self._adapters[graph].Load(str(path))

    def _run(self, graph: Graph, session: ort.InferenceSession, arrays: Arrays) -> Arrays:
        options = ort.RunOptions()
        if graph.name in self._adapters:
            options.add_active_adapter(self._adapters[graph.name])
        names = [output.name for output in session.get_outputs()]
        with running(options):
            return dict(zip(names, session.run(names, arrays, options), strict=True))


def _batch_axis(tensor: TensorSpec) -> int | None:
    return tensor.dims.index("batch") if "batch" in tensor.dims else None


class AdapterSubject(OnnxSubject):
    """The graphs with one adapter, judged by the module with that adapter.

    Args:
        graphs: the graphs and the adapters.
        provider: the execution provider.
        number: the number of the adapter; 0 is the model itself.
        form: whether the adapter of the PyTorch model is beside the weights, or merged into them.
    """

    recorded = None

    def __init__(self, graphs: AdaptedGraphs, provider: Provider, number: int, form: Form = "beside") -> None:
        self._graphs = graphs
        self._number = number
        self._form = form
        stored = graphs.stored
        adapter = graphs.adapters[number - 1] if number else None
        self._file = (graphs.folder / FILE).read_bytes()
        super().__init__(stored, graphs.files, provider, stored.spec.graphs, load=partial(_load, stored, adapter, form))
        how = f"adapter {adapter.name}, {form}" if adapter is not None else BASE
        labels = {**self.labels, MIXED: "in a batch of several adapters", LORA_FILE: "from its file"}
        self.labels = {level: f"{how}, {label}" for level, label in labels.items()}

    def open(self) -> dict[str, Executor]:
        runtimes: dict[str, Executor] = {**super().open()}
        whole = runtimes["all"]
        assert isinstance(whole, OnnxExecutor)
        others = [number for number in range(len(self._graphs.adapters) + 1) if number != self._number]
        runtimes[MIXED] = AdapterExecutor(whole.sessions, whole.dtype, self._number, others)
        if self._graphs.lora_files and self._number:
            name = self._graphs.adapters[self._number - 1].name
            places = {graph.name: self._graphs.folder / file_name(graph.name, name) for graph in self.graphs}
            files = {graph: path for graph, path in places.items() if path.exists()}
            runtimes[LORA_FILE] = _LoraFileExecutor(whole.sessions, whole.dtype, files)
        return runtimes

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        """None for merged weights, which no others equal."""
        return super().open_perturbed() if self._form == "beside" else iter(())

    def conditions(self) -> Sequence[Conditions]:
        """Return those of the graphs without adapters."""
        longest = standard_fields(self.stored.spec.config).max_seq_len
        return [
            Conditions(graph, without_adapters(self.files[graph.name]), self.stored.path, longest)
            for graph in self.graphs
        ]

    def _executor(self, sessions: Mapping[str, ort.InferenceSession]) -> OnnxExecutor:
        return AdapterExecutor(sessions, self.models.yardstick.dtype, self._number)

    def _replaced(self, file: bytes) -> dict[str, Array]:
        """Return the stacks, with the current values of this adapter."""
        super()._replaced(without_adapters(file))
        stacks = stacks_of(file, self._file)
        if self._weights_now:
            for name, layer in self.models.yardstick.model.named_modules():
                if isinstance(layer, LowRankLinear) and name + LORA_A in stacks:
                    a, b = factors(Update(layer.lora_A.detach(), layer.lora_B.detach(), layer.scale))
                    one, other = stacks[name + LORA_A].copy(), stacks[name + LORA_B].copy()
                    one[self._number, : len(a)], other[self._number, :, : len(a)] = a, b
                    stacks |= {name + LORA_A: one, name + LORA_B: other}
        return stacks


def _load(stored: ModelDirectory, adapter: Adapter | None, form: Form) -> nn.Module:
    """Return a new instance of the module with an adapter beside its weights, or merged into them."""
    model = persist.load_directory(stored)
    if adapter is None:
        return model
    if form == "beside":
        add_updates(model, adapter.updates, adapter.name)
    for name, update in adapter.updates.items() if form == "merged" else ():
        parameter = model.get_parameter(name)
        parameter.data = update.added_to(parameter.data)
    return model.eval()
