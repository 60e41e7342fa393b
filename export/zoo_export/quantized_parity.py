"""The gate for smaller precisions: a graph must compute what its own weights say, be they far from the model's or not.

How far the model moves is for :mod:`zoo_export.certify` to say. Here the reference is the module in float64 with the
weights that the variant stores, unpacked in numpy by the format's definition. So a scale of another tensor or blocks in
another order cannot pass for the error of quantisation. Two comparisons share that reference:

- The graph with MatMul in place of the quantised products, of the numbers that those point at, by the rule for every
  export: torch in float32 is the yardstick. It finds whatever is wired wrongly, however small.
- The graph as it is, whose operators also quantise activations. The yardstick is torch with activations quantised in
  the same way, and twice its error is allowed. It finds weights that the runtime reads otherwise than they were
  written. Where a machine's kernels do not quantise activations, the error is only smaller.

A float16 variant is a model in float16, and is compared like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo import models
from zoo.artifact import ModelDirectory, digest_file
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, ZooError
from zoo.weights import read_header
from zoo_export.bisect import module_errors
from zoo_export.decoding import greedy_agreement
from zoo_export.evidence import versions, weights_of
from zoo_export.graph_file import graph_digest
from zoo_export.grid import DEFAULT_MAX, Feeds, Point, make_feeds, make_grid
from zoo_export.metrics import FACTOR, FLOOR_ULPS, Distribution, Errors
from zoo_export.packing import Packing, packings, read_dequantized, read_tensor
from zoo_export.parity import Progress, Report, compare, valid_positions
from zoo_export.pipeline import Arrays, OnnxExecutor, run_pipeline
from zoo_export.quantize import Place, Variant, open_variant, with_exact_products
from zoo_export.reference import TorchExecutor
from zoo_export.session import Provider, placement

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
    if variant.precision == "fp16":
        files, model = variant.files(), _as_model(stored, variant)
        report = compare(model, files, provider=provider, whole_grid=whole_grid, progress=progress)
        report.evidence |= _weights(stored, variant)
        return report
    comparison = _Comparison(stored, variant, provider)
    left_out = comparison.sweep(whole_grid, progress)
    failures = comparison.failures()
    return Report(comparison.evidence(left_out, verified=not failures), failures)


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


class _Comparison:
    """The module with a variant's weights, and the variant's graphs, side by side."""

    def __init__(self, stored: ModelDirectory, variant: Variant, provider: Provider) -> None:
        self.stored, self.variant, self.provider = stored, variant, provider
        self.exact, self.expanded = with_exact_products(variant)
        self.graphs = stored.spec.graphs
        self.plan = packings(variant.path)
        self.epsilon = float(np.finfo(np.float32).eps)
        self.longest = int(getattr(stored.spec.config, "max_seq_len", DEFAULT_MAX))
        self.runtimes = {
            EXACT: self._open(self.exact, optimize=False, values=self.expanded),
            OFF: self._open(variant, optimize=False),
            ALL: self._open(variant, optimize=True),
        }
        model = dequantized_model(stored, variant)
        self.reference = TorchExecutor(copy.deepcopy(model).double())
        self.yardstick, self.emulated = TorchExecutor(model), EmulatedExecutor(model, self.plan)
        self.errors = {
            (level, graph.name, tensor.name): Errors()
            for level in _LABELS
            for graph in self.graphs
            for tensor in graph.output_tensors()
        }
        self.distributions = {key: Distribution() for key in self.errors if key[2] == "logits"}
        self.greedy: dict[str, dict[str, Any]] = {}
        self.points: list[Point] = []

    def _open(
        self, variant: Variant, *, optimize: bool, values: Mapping[Place, np.ndarray[Any, Any]] | None = None
    ) -> OnnxExecutor:
        try:
            return open_variant(variant, provider=self.provider, optimize=optimize, values=values, placements=True)
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error}", self.stored.path) from error

    def sweep(self, whole_grid: bool, progress: Progress | None) -> int:
        """Compare at every point of the grid, and greedily decoded text. Returns how many points were left out."""
        parameters = models.count_parameters(self.yardstick.model)
        points, left_out = make_grid(self.graphs, self.longest, parameters, whole=whole_grid)
        for number, point in enumerate(points, 1):
            if progress is not None:
                progress(number, len(points))
            try:
                self._compare_at(point, self.runtimes)
            except ZooError:
                raise
            except Exception as error:  # the runtime raises a dozen classes without a common base
                raise ParityError(f"the graph fails at {point} ({error})", self.stored.path) from error
            self.points.append(point)
        for level, runtime in self.runtimes.items():
            key = level, self.graphs[-1].name, "logits"
            margin = 2 * self.errors[key].limit(self.epsilon) if key in self.errors else 0
            agreement = greedy_agreement(self.reference, runtime, self.graphs, margin)
            if agreement is not None:
                self.greedy[level] = agreement
        self._perturb(points)
        return left_out

    def _perturb(self, points: list[Point]) -> None:
        """Compare once more with noise on what is not quantised: fresh biases are 0, and could be lost unseen."""
        generator = torch.Generator().manual_seed(SEED)
        exact = dict(self.reference.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.yardstick.model.named_parameters():
                if name not in self.plan:
                    parameter.add_(torch.randn(parameter.shape, generator=generator).mul_(_NOISE))
                    exact[name].copy_(parameter)
        past = max(point.past for point in points)
        several = [point for point in points if point.batch > 1 and point.length > 1 and point.past == past] or points
        fewest = min(several, key=lambda point: point.tokens)
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

    def _compare_at(self, point: Point, runtimes: Mapping[str, OnnxExecutor]) -> None:
        feeds = make_feeds(self.graphs, point, SEED, self.longest)
        wanted = run_pipeline(self.reference, self.graphs, feeds, point, split=False)
        yardsticks = {
            executor: run_pipeline(executor, self.graphs, feeds, point, split=True)
            for executor in {self._yardstick(level) for level in runtimes}
        }
        for level, runtime in runtimes.items():
            allowed = yardsticks[self._yardstick(level)]
            found = run_pipeline(runtime, self.graphs, feeds, point, split=True)
            for graph in self.graphs:
                for tensor in graph.output_tensors():
                    key = level, graph.name, tensor.name
                    valid = valid_positions(graph, tensor, feeds, point)
                    true, made = wanted[graph.name][tensor.name], found[graph.name][tensor.name]
                    self.errors[key].add(true, allowed[graph.name][tensor.name], made, valid, point)
                    if key in self.distributions:
                        rows = np.broadcast_to(valid, true.shape)[..., 0]
                        self.distributions[key].add(true[rows], made[rows], 2 * self.errors[key].limit(self.epsilon))

    def _yardstick(self, level: str) -> TorchExecutor:
        return self.yardstick if level in _IN_FLOAT32 else self.emulated

    def failures(self) -> list[str]:
        """One line for each thing that diverges, the first with the module where it begins."""
        lines = []
        for (level, graph, name), error in self.errors.items():
            where = f"{name} of {graph}, {_LABELS[level]}"
            if not error.finite:
                lines.append(f"{where}, is not finite")
            elif not error.passed(self.epsilon):
                limit = error.limit(self.epsilon)
                lines.append(f"{where}, is off by {error.runtime:.3g}, allowed {limit:.3g}, at {error.worst}")
        for (level, graph, _), item in self.distributions.items():
            if item.disagreements:
                where = f"{graph}, {_LABELS[level]}"
                lines.append(f"{where}, chooses another token in {item.disagreements} of {item.rows} rows")
        for level, agreement in self.greedy.items():
            if not agreement["passed"]:
                lines.append(f"greedy decoding, {_LABELS[level]}, diverges after {agreement['agreed']} tokens")
        module = self._first_divergence() if lines else None
        return [f"{lines[0]}; it begins in {module}", *lines[1:]] if module else lines

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
        files = self.variant.files()
        return {
            "schema": 1,
            "verified": verified,
            "model": self.stored.description["name"],
            "precision": self.variant.precision,
            "provider": self.provider,
            "rule": f"max_abs_error <= {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|",
            "reference": "the module in float64, without a cache, with the weights that are stored quantised",
            "yardstick": {
                level: f"torch in float32{'' if level in _IN_FLOAT32 else ', activations rounded to int8'}"
                for level in _LABELS
            },
            "graphs": {
                graph.name: {
                    "sha256": graph_digest(files[graph.name]),
                    "placement": dict(placement(self.runtimes[ALL].sessions[graph.name])),
                    "outputs": {
                        tensor.name: {
                            level: self.errors[level, graph.name, tensor.name].to_dict(self.epsilon)
                            for level in _LABELS
                        }
                        for tensor in graph.output_tensors()
                    },
                }
                for graph in self.graphs
            },
            "logits": {level: item.to_dict() for (level, _, _), item in self.distributions.items()},
            "greedy_decoding": self.greedy,
            "grid": {"seed": SEED, "left_out": left_out, "points": [point.to_dict() for point in self.points]},
            **_weights(self.stored, self.variant),
            "versions": versions(),
        }


def _weights(stored: ModelDirectory, variant: Variant) -> dict[str, Any]:
    """The digests of the weights that a variant was made from, and of its own."""
    return {"weights": weights_of(stored), "packed_weights": {variant.file: digest_file(variant.path)}}


def _as_model(stored: ModelDirectory, variant: Variant) -> ModelDirectory:
    """A float16 variant as the model directory that it would be alone."""
    entry = {"sha256": digest_file(variant.path), "size": variant.path.stat().st_size}
    model = ModelDirectory(variant.directory, {variant.file: entry}, {**stored.description, "dtype": "float16"})
    vars(model)["layout"] = read_header(variant.path)
    return model
