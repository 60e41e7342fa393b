"""The gate for smaller precisions: a graph must compute what its own weights say, be they far from the model's or not.

How far the model moves is for :mod:`zoo_export.certify` to say. Here the reference is the module in float64 with the
weights that the variant stores, unpacked in numpy by the format's definition. So a scale of another tensor or blocks in
another order cannot pass for the error of quantisation. Two comparisons share that reference:

- The graph with MatMul in place of the quantised products, of the numbers that those point at, by the rule for every
  export: torch in float32 is the yardstick. It finds whatever is wired wrongly, however small.
- The graph as it is, whose operators also quantise activations. The yardstick is torch with activations quantised in
  the same way, and twice its error is allowed. It finds weights that the runtime reads otherwise than they were
  written. Where a machine's kernels do not quantise activations, the error is only smaller.

A variant in float16 or bfloat16 is a model in that dtype, and is compared like any other.
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

from zoo import models
from zoo.artifact import HALVES, ModelDirectory, digest_file
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError
from zoo.weights import read_header
from zoo_export.bisect import module_errors
from zoo_export.evidence import weights_of
from zoo_export.grid import Feeds, Point, make_feeds
from zoo_export.packing import Packing, packings, read_dequantized, read_tensor
from zoo_export.parity import Comparison, Progress, Report, compare, smallest_points
from zoo_export.pipeline import Arrays, Executor, OnnxExecutor
from zoo_export.quantize import Place, Variant, open_variant, with_exact_products
from zoo_export.reference import TorchExecutor
from zoo_export.session import Provider

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
    whole_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare a variant's graphs with the module that has the variant's own weights.

    Raises :class:`ParityError` when the comparison cannot be made at all: no evidence is a failure.
    """
    if variant.precision in HALVES:
        files, model = variant.files(), _as_model(stored, variant)
        report = compare(model, files, provider=provider, whole_grid=whole_grid, progress=progress)
        report.evidence |= _weights(stored, variant)
        return report
    return _QuantizedComparison(stored, variant, provider).run(whole_grid, progress)


def dequantized_model(stored: ModelDirectory, variant: Variant) -> nn.Module:
    """The module in float32 with the weights that a variant stands for."""
    model = models.build_on_meta(stored.spec, stored.dtype)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        packed = packings(variant.path)
        for name, place in stored.layout.items():
            if name not in packed:
                yield name, torch.from_numpy(read_tensor(stored.path, name, place))
        for name, weight in read_dequantized(variant.path):
            yield name, torch.from_numpy(weight)

    models.fill(model, tensors())
    return model


class EmulatedExecutor(TorchExecutor):
    """Runs graphs on the module, with the activations quantised that enter a quantised Linear.

    Args:
        model: with the weights that a variant stands for.
        plan: how each is packed, by its name.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, Packing]) -> None:
        super().__init__(model)
        self._packings = {id(model.get_parameter(name)): packing for name, packing in plan.items()}

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        with _QuantizedInputs(self._packings):
            return super().__call__(graph, feeds)


class _QuantizedInputs(TorchFunctionMode):
    """Quantises what is multiplied by certain weights, as the runtime does."""

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
    """To 8 bits with a sign: the largest of ``block`` numbers in a row becomes 127 (MatMulNBits, accuracy level 4)."""
    parts = x.unflatten(-1, (-1, block))
    scales = parts.abs().amax(-1, keepdim=True) / 127
    return (parts / scales.where(scales > 0, 1.0)).round().mul(scales).flatten(-2)


def _round_as_one(x: Tensor) -> Tensor:
    """To 8 bits without a sign, with one scale and zero point for all (DynamicQuantizeLinear)."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = scale.where(scale > 0, 1.0)
    zero_point = (-low / scale).round().clamp(0, 255)
    return ((x / scale).round().add(zero_point).clamp(0, 255) - zero_point) * scale


class _QuantizedComparison(Comparison):
    """The module with a variant's weights, and the variant's graphs, side by side."""

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
        """Compare once more with noise on what is not quantised: fresh biases are 0, and could be lost unseen."""
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
        """The weights that the modules have now, by where the variant's graphs look for them; packed ones apart."""
        present = self.yardstick.model.state_dict()
        return {
            (place.file, place.offset): present[name].numpy()
            for name, place in self.stored.layout.items()
            if name not in self.plan
        }

    def _yardstick(self, level: str) -> TorchExecutor:
        return self.yardstick if level in _IN_FLOAT32 else self.emulated

    def _nudged(self, feeds: Feeds, point: Point) -> Iterator[dict[str, Arrays]]:
        """No other weights stand for the packed ones."""
        return iter(())

    def _first_divergence(self) -> str | None:
        """Where the graphs with products in float32 part from the module: there every error is a fault."""
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
                except Exception:  # the verdict stands already; a graph too broken to run here only lacks the module
                    return None
                return next((f"{item}, of {self.stored.spec.plugin}" for item in modules if item.diverges), None)
        return None

    def evidence(self, left_out: int, *, verified: bool) -> dict[str, Any]:
        """What was compared, and how it came out."""
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
            **_weights(self.stored, self.variant),
        }


def _weights(stored: ModelDirectory, variant: Variant) -> dict[str, Any]:
    """The digests of the weights that a variant was made from, and of its own."""
    return {"weights": weights_of(stored), "packed_weights": {variant.file: digest_file(variant.path)}}


def _as_model(stored: ModelDirectory, variant: Variant) -> ModelDirectory:
    """A variant in another dtype as the model directory that it would be alone."""
    entry = {"sha256": digest_file(variant.path), "size": variant.path.stat().st_size}
    description = {**stored.description, "dtype": HALVES[variant.precision]}
    model = ModelDirectory(variant.directory, {variant.file: entry}, description)
    vars(model)["layout"] = read_header(variant.path)
    return model
