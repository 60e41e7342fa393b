"""Parity of quantised variants: a graph must compute what its own quantised weights say.

How far quantisation moves the model is measured by :mod:`zoo_export.precision.certify`. Here the reference is the
module in float64 with the weights that the variant stores, dequantised in numpy by the definition of the format, so
that a wrong scale or a wrong order of blocks cannot pass as quantisation error. Two comparisons share the reference:

- The graph with each quantised product replaced by a MatMul on the dequantised weights. The yardstick is PyTorch in
  float32, as for any export. This finds wiring errors, however small.
- The graph as exported, whose operators also quantise activations. The yardstick is PyTorch with activations quantised
  in the same way. This finds weights that the runtime reads differently from how they were written. Kernels that do
  not quantise activations only make the error smaller.

A variant in float16 or bfloat16 is a model in that dtype, compared like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo.artifact import HALVES, ModelDirectory, entry_of
from zoo.artifact.weights import read_header
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError
from zoo.models import create, persist
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, Executor
from zoo_export.parity.compare import Comparison, Progress, compare, smallest_points
from zoo_export.parity.evidence import weights_of
from zoo_export.parity.modules import module_errors
from zoo_export.parity.report import Report
from zoo_export.precision.packing import Packing, packings, read_dequantized, read_tensor
from zoo_export.precision.quantize import Place, Variant, open_variant, with_exact_products
from zoo_runtime.executor import OnnxExecutor
from zoo_runtime.providers import Provider

__all__ = ["EmulatedExecutor", "dequantized_model", "verify_variant"]

SEED = 0
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


def verify_variant(
    stored: ModelDirectory,
    variant: Variant,
    *,
    provider: Provider = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare a variant's graphs with the module that has the variant's own weights.

    Raises :class:`ParityError` if the comparison cannot be made.
    """
    if variant.precision in HALVES:
        files, model = variant.files(), _as_model(stored, variant)
        report = compare(model, files, provider=provider, full_grid=full_grid, progress=progress)
        report.evidence["weights"] = weights_of(stored)
        return report
    return _QuantizedComparison(stored, variant, provider).run(full_grid, progress)


def dequantized_model(stored: ModelDirectory, variant: Variant) -> nn.Module:
    """Return the module in float32 with the dequantised weights of a variant."""
    model = create.build_on_meta(stored.spec, stored.dtype)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        packed = packings(variant.path)
        for name, place in stored.layout.items():
            if name not in packed:
                yield name, torch.from_numpy(read_tensor(stored.path, name, place))
        for name, weight in read_dequantized(variant.path):
            yield name, torch.from_numpy(weight)

    persist.fill(model, tensors())
    return model


class EmulatedExecutor(TorchExecutor):
    """Runs graphs on the module, with quantised inputs to quantised Linear layers.

    Args:
        model: the module with dequantised weights.
        plan: the packing of each quantised weight, by name.
    """

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


class _QuantizedComparison(Comparison):
    """Comparison of a variant's graphs with the module on the variant's weights."""

    labels = _LABELS

    def __init__(self, stored: ModelDirectory, variant: Variant, provider: Provider) -> None:
        self.variant, self.plan = variant, packings(variant.path)
        self.exact, self.expanded = with_exact_products(variant)
        super().__init__(stored, variant.files(), provider)
        self.epsilon = float(np.finfo(np.float32).eps)
        self.emulated = EmulatedExecutor(self.yardstick.model, self.plan)

    def _model(self) -> nn.Module:
        return dequantized_model(self.stored, self.variant)

    def _runtimes(self) -> dict[str, Executor]:
        return {
            EXACT: self._open(self.exact, optimize=False, values=self.expanded),
            OFF: self._open(self.variant, optimize=False),
            ALL: self._open(self.variant, optimize=True),
        }

    def _open(
        self, variant: Variant, *, optimize: bool, values: Mapping[Place, np.ndarray[Any, Any]] | None = None
    ) -> OnnxExecutor:
        try:
            return open_variant(variant, provider=self.provider, optimize=optimize, values=values, placements=True)
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error}", self.stored.path) from error

    def perturb(self, points: list[Point]) -> None:
        """Compare with noise on weights that are not quantised: a graph may ignore initial biases, which are 0."""
        generator = torch.Generator().manual_seed(SEED)
        exact = dict(self.reference.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.yardstick.model.named_parameters():
                if name not in self.plan:
                    parameter.add_(torch.randn(parameter.shape, generator=generator).mul_(_NOISE))
                    exact[name].copy_(parameter)
        fewest = smallest_points(points)[0]
        values = self._values()
        runtimes = {
            PERTURBED_EXACT: self._open(self.exact, optimize=True, values=self.expanded | values),
            PERTURBED: self._open(self.variant, optimize=True, values=values),
        }
        self._compare_at(fewest, runtimes)

    def _values(self) -> dict[Place, np.ndarray[Any, Any]]:
        """Return the current weights of the modules that are not packed, by their place in the weights file."""
        present = self.yardstick.model.state_dict()
        return {
            (place.file, place.offset): present[name].numpy()
            for name, place in self.stored.layout.items()
            if name not in self.plan
        }

    def _yardstick(self, level: str) -> TorchExecutor:
        return self.yardstick if level in _IN_FLOAT32 else self.emulated

    def _nudged(self, feeds: Feeds, point: Point) -> Iterator[dict[str, Arrays]]:
        """None: packed weights cannot be perturbed by less than a quantisation step."""
        return iter(())

    def _first_divergence(self) -> str | None:
        """The first module that diverges with products in float32, where no error is due to quantisation."""
        for (level, name, _), error in self.errors.items():
            if level in _IN_FLOAT32 and error.worst is not None and not error.passed(self.epsilon):
                graph = next(graph for graph in self.graphs if graph.name == name)

                def run_tapped(data: bytes, name: str = name) -> OnnxExecutor:
                    tapped = self.exact.parse(data, self.stored)
                    graphs = {**self.exact.graphs, name: tapped}
                    return self._open(
                        replace(self.exact, graphs=graphs), optimize=False, values=self.expanded | self._values()
                    )

                references = self.reference, self.yardstick
                feeds = make_feeds(self.graphs, error.worst, SEED, self.longest)
                try:
                    data = self.exact.files()[name]
                    modules = module_errors(graph, data, self.graphs, run_tapped, references, feeds, error.worst)
                except Exception as problem:  # the comparison has failed in any case
                    return f"a module that cannot be named ({problem})"
                return next((f"{item}, of {self.stored.spec.plugin}" for item in modules if item.diverges), None)
        return None

    def evidence(self, left_out: int, *, verified: bool) -> dict[str, Any]:
        """Return the content of the evidence file."""
        evidence = super().evidence(left_out, verified=verified)
        del evidence["dtype"], evidence["unused_tensors"]
        return {
            **evidence,
            "precision": self.variant.precision,
            "reference": "the module in float64, without a cache, with the weights that are stored quantised",
            "yardstick": {
                level: f"torch in float32{'' if level in _IN_FLOAT32 else ', activations rounded to int8'}"
                for level in _LABELS
            },
            "weights": weights_of(self.stored),
        }


def _as_model(stored: ModelDirectory, variant: Variant) -> ModelDirectory:
    """Return a variant in another dtype as a model directory of its own."""
    entry = entry_of(variant.path)
    description = {**stored.description, "dtype": variant.precision}
    model = ModelDirectory(variant.directory, {variant.file: entry}, description)
    vars(model)["layout"] = read_header(variant.path)
    return model
