"""Parity of quantised models: a graph must compute what its own quantised weights say.

How far quantisation moves the model is measured by :mod:`zoo_export.certificate`. Here the reference is the module in
float64 with the weights that are stored quantised, dequantised in numpy by the definition of the format, so that a
wrong scale or a wrong order of blocks cannot pass as quantisation error. Two comparisons share the reference:

- The graph with each quantised product replaced by a MatMul on the dequantised weights. The yardstick is PyTorch in
  float32, as for any export. This finds wiring errors, however small.
- The graph as exported, whose operators also quantise activations. The yardstick is PyTorch with activations quantised
  in the same way. This finds weights that the runtime reads differently from how they were written. Kernels that do
  not quantise activations only make the error smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, UnreadableError
from zoo.models import create, persist
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import TorchExecutor, add_noise, declared_tensors
from zoo.probe.pipeline import Arrays, Executor
from zoo_export.parity.modules import ModuleError, module_errors
from zoo_export.parity.reference import SEED, Models
from zoo_export.parity.subject import REFERENCE, Subject, onnx_facts
from zoo_export.variants.quantized.exact import with_exact_products
from zoo_export.variants.quantized.packing import Packing, packings, read_dequantized
from zoo_export.variants.reduced.model import Place, ReducedModel, open_reduced
from zoo_export.variants.reduced.tensors import read_tensor
from zoo_runtime.onnx_runtime.providers import Memory, Provider

__all__ = ["EmulatedExecutor", "QuantizedSubject", "Values", "dequantized_model", "perturb_others"]

_NOISE = 0.02
EXACT, OFF, ALL, PERTURBED_EXACT, PERTURBED = "exact", "off", "all", "perturbed_exact", "perturbed"
_LABELS = {
    EXACT: "products in float32",
    OFF: "optimisations off",
    ALL: "optimisations on",
    PERTURBED_EXACT: "products in float32, with perturbed biases and norms",
    PERTURBED: "with perturbed biases and norms",
}
_IN_FLOAT32 = {EXACT, PERTURBED_EXACT}
Values = Mapping[Place, Array]
"""Values that override stored weights, by location."""


def dequantized_model(stored: ModelDirectory, reduced: ReducedModel) -> nn.Module:
    """Return the module in float32 with the dequantised weights of a quantised one."""
    return _filled(stored, _dequantized(stored, reduced))


def _filled(stored: ModelDirectory, tensors: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Return the module with these tensors, by name, as its weights."""
    model = create.build_on_meta(stored.spec, stored.dtype)
    persist.fill(model, tensors)
    return model


def _dequantized(stored: ModelDirectory, reduced: ReducedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a quantised model in float32, by name."""
    packed = packings(reduced.path)
    for name, place in stored.layout.items():
        if name not in packed:
            yield name, torch.from_numpy(read_tensor(stored.path, name, place))
    for name, weight in read_dequantized(reduced.path):
        yield name, torch.from_numpy(weight.reshape(stored.layout[name].shape))


def perturb_others(models: Models, packed: Iterable[str]) -> None:
    """Put noise on the weights of the models that are not quantised."""
    generator = torch.Generator().manual_seed(SEED)
    ids = {id(models.yardstick.model.get_parameter(name)) for name in packed}
    upper = declared_tensors(models.yardstick.model).upper

    def change(weight: torch.Tensor) -> None:
        if id(weight) not in ids:
            add_noise(weight, generator, _NOISE, upper=upper.get(id(weight)))

    models.change(change)


class EmulatedExecutor(TorchExecutor):
    """Runs graphs on the module, with quantised inputs to quantised Linear layers.

    Args:
        model: the module with dequantised weights.
        plan: the packing of each quantised weight, by name.
    """

    _can_defer = False

    def __init__(self, model: nn.Module, plan: Mapping[str, Packing]) -> None:
        super().__init__(model)
        self._packings = {id(model.get_parameter(name)): packing for name, packing in plan.items()}

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        with _QuantizedInputs(self._packings):
            return super().__call__(graph, feeds)


class _QuantizedInputs(TorchFunctionMode):
    """Quantises the inputs of quantised Linear layers as ONNX Runtime does."""

    def __init__(self, packings: Mapping[int, Packing]) -> None:
        self._packings = packings

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight = args[:2]
            packing = self._packings.get(id(weight))
            if packing is not None:
                args = (_round_by_block(x, packing.block) if packing.block else _round_as_one(x), *args[1:])
        return function(*args, **(kwargs or {}))


def _round_by_block(x: Tensor, block: int) -> Tensor:
    """Round to int8 with one scale per ``block`` numbers of a row (MatMulNBits, accuracy level 4)."""
    parts = x.unflatten(-1, (-1, block))
    scales = parts.abs().amax(-1, keepdim=True) / 127
    return (parts / scales.where(scales > 0, 1.0)).round().mul(scales).flatten(-2)


def _round_as_one(x: Tensor) -> Tensor:
    """Round to uint8 with one scale and zero point (DynamicQuantizeLinear)."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = scale.where(scale > 0, 1.0)
    zero_point = (-low / scale).round().clamp(0, 255)
    return ((x / scale).round().add(zero_point).clamp(0, 255) - zero_point) * scale


class QuantizedSubject(Subject):
    """Graphs with quantised weights, judged by the module on the same weights."""

    coarse = frozenset({OFF, ALL, PERTURBED})
    recorded: str | None = ALL

    def __init__(self, stored: ModelDirectory, reduced: ReducedModel, provider: Provider) -> None:
        self.reduced = reduced
        self.provider = provider
        self._packings = packings(reduced.path)
        tensors = [*_dequantized(stored, reduced)]  # once, and in the same memory for both models
        models = Models(partial(_filled, stored, tensors))
        super().__init__(stored, stored.spec.graphs, models, _LABELS)
        self._emulated = EmulatedExecutor(models.yardstick.model, self._packings)

    def open(self) -> dict[str, Executor]:
        return {
            EXACT: self._open_exact(optimize=False),
            OFF: self._open(self.reduced, optimize=False),
            ALL: self._open(self.reduced, optimize=True),
        }

    def long_runtimes(self, runtimes: Mapping[str, Executor]) -> Mapping[str, Executor]:
        """Leave out the quantised graph without optimisations, as for other exports."""
        return {level: runtime for level, runtime in runtimes.items() if level != OFF}

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        """Put noise on weights that are not quantised: a graph may ignore initial biases, which are 0."""
        perturb_others(self.models, self._packings)
        values = self._values()
        yield {
            PERTURBED_EXACT: self._open_exact(optimize=True, values=values),
            PERTURBED: self._open(self.reduced, optimize=True, values=values),
        }

    def yardstick(self, level: str) -> TorchExecutor:
        return self.models.yardstick if level in _IN_FLOAT32 else self._emulated

    def nudged(self, bits: int = 1) -> Iterator[TorchExecutor]:
        """None: packed weights cannot be perturbed by less than a quantisation step."""
        return iter(())

    def module_errors(self, level: str, name: str, feeds: Feeds, point: Point) -> list[ModuleError] | None:
        """None unless products are in float32, where no error is due to quantisation."""
        if level not in _IN_FLOAT32:
            return None
        graph = next(graph for graph in self.graphs if graph.name == name)

        def run_tapped(data: bytes) -> Executor:
            tapped = replace(exact, graphs={**exact.graphs, name: exact.parse(data, self.stored)})
            return self._open(tapped, optimize=False, values=expanded | self._values(), memory="mapped")

        exact, expanded = with_exact_products(self.reduced)
        references = self.models.reference, self.models.yardstick
        return module_errors(graph, exact.files()[name], self.graphs, run_tapped, references, feeds, point)

    def graph_facts(self, graph: Graph, runtimes: Mapping[str, Executor]) -> dict[str, Any]:
        return onnx_facts(graph, runtimes[ALL], self.reduced.files()[graph.name])

    def facts(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "precision": self.reduced.precision,
            "reference": f"{REFERENCE}, with the weights that are stored quantised",
            "yardstick": {
                level: f"torch in float32{'' if level in _IN_FLOAT32 else ', activations rounded to int8'}"
                for level in _LABELS
            },
        }

    def _open_exact(self, *, optimize: bool, values: Values | None = None) -> Executor:
        """Open the graphs with float32 products.

        The dequantised weights are not kept: the sessions have copies, as large as the model.
        """
        exact, expanded = with_exact_products(self.reduced)
        return self._open(exact, optimize=optimize, values=expanded | dict(values or {}), memory="mapped")

    def _open(
        self, reduced: ReducedModel, *, optimize: bool, values: Values | None = None, memory: Memory = "fast"
    ) -> Executor:
        try:
            return open_reduced(
                reduced,
                provider=self.provider,
                optimize=optimize,
                values=values,
                memory=memory,
                pool=False,  # three sessions would each keep the memory that the longest input needs
                placements=True,
            )
        except UnreadableError:
            raise
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error}", self.stored.path) from error

    def _values(self) -> dict[Place, Array]:
        """Return the current weights of the modules that are not packed, by their place in the weights file."""
        present = self.models.state()
        return {
            (place.file, place.offset): present[name]
            for name, place in self.stored.layout.items()
            if name not in self._packings
        }
