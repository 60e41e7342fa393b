"""The gate: an exported graph is compared with the unmodified module, evaluated in float64.

Torch in the model's own dtype is the yardstick: what it loses to rounding, the graph may lose twice, and a few units in
the last place. A fixed tolerance would be blind for a small model and strict for a deep one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from zoo import models
from zoo.artifact import ATTENTIONS, HALVES, LOOP, PRECISIONS, PROFILES, ModelDirectory
from zoo.contract import Dim, Graph, TensorSpec, dim_size
from zoo.errors import ArtifactError, ParityError, UsageError, ZooError
from zoo.exporting import Progress
from zoo_export.bisect import ModuleError, module_errors
from zoo_export.decoding import greedy_agreement
from zoo_export.evidence import versions, weights_of, write_export
from zoo_export.graph_file import EVIDENCE_KEY, graph_digest, metadata, pointers, referenced_tensors, widen
from zoo_export.grid import DEFAULT_MAX, ODD, PAST, Feeds, Point, make_feeds, make_grid
from zoo_export.metrics import FACTOR, FLOOR_ULPS, Distribution, Errors
from zoo_export.pipeline import Arrays, Executor, OnnxExecutor, run_pipeline
from zoo_export.reference import TorchExecutor, as_array, noisy
from zoo_export.session import Provider, check_dtype, open_session, placement
from zoo_export.values import epsilon

__all__ = [
    "Comparison",
    "Progress",
    "Report",
    "check_memory",
    "compare",
    "diff_model",
    "smallest_points",
    "valid_positions",
    "verify_model",
]

SEED = 0
LEVELS = {"off": False, "all": True}
"""The runtime's optimisation levels that are compared."""
PERTURBED, FAINT = "perturbed", "faint"
"""Two more comparisons, with noise on every weight: a graph must equal the model for any weights of its layout."""
_FAINT = 1 / 8
"""What all weights are multiplied by for a faint signal, beside which the epsilon of a norm is not lost."""
_NUDGES = 16
"""How often the model is compared with itself where a graph is further from float64 than torch is."""
_COPIES = 11
"""Peak memory of a comparison in sizes of the weights, without what any comparison takes."""
_NUMBERS = 2**28
"""Attention weights that are compared at once: their number grows with the square of a length."""
_HALVES = tuple(HALVES.values())
_LABELS = {
    "off": "optimisations off",
    "all": "optimisations on",
    PERTURBED: "with perturbed weights",
    FAINT: "with faint weights",
}


@dataclass
class Report:
    """The outcome of a comparison."""

    evidence: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    subject: str = "the ONNX graph"

    @property
    def passed(self) -> bool:
        """Whether the graphs were shown equal to the model."""
        return not self.failures

    def verdict(self) -> str:
        """One line that says what diverges."""
        more = f" and {len(self.failures) - 1} more" if len(self.failures) > 1 else ""
        return f"{self.subject} is not equal to the model: {self.failures[0]}{more}"


def compare(
    stored: ModelDirectory,
    graphs: Mapping[str, bytes],
    *,
    declared: Sequence[Graph] | None = None,
    provider: Provider = "cpu",
    whole_grid: bool = False,
    longest: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare serialised graphs, by name, with the model over the grid and at each optimisation level.

    The grid ends at ``longest`` tokens, by default with the longest input of the model.

    Raises :class:`ParityError` when the comparison cannot be made at all: no evidence is a failure. A provider that
    does not load, or does not compute in the model's dtype, is a :class:`UsageError`.
    """
    check_dtype(stored.dtype, provider, stored.path)
    check_memory(stored)
    comparison = Comparison(stored, graphs, provider, declared, longest)
    report = comparison.run(whole_grid, progress)
    wider = {name: widen(graph) for name, graph in graphs.items()} if stored.dtype in _HALVES else {}
    if wider:
        report.evidence["in_float32"] = "not compared: the graph has constants that may be rounded"
    if wider and all(wider.values()):
        wide = _WideComparison(stored, {name: graph for name, graph in wider.items() if graph}, provider, declared)
        wide.perturb(comparison.points)
        report.failures += wide.failures()
        report.evidence |= {
            "verified": report.passed,
            "in_float32": {graph.name: {"outputs": wide.outputs(graph)} for graph in wide.graphs},
        }
    return report


def check_memory(stored: ModelDirectory) -> None:
    """Raise :class:`ParityError` when this machine cannot hold what a comparison holds at once.

    That is the model in float64 and in its own dtype, its noisy copy, and what the sessions make of the weights.
    """
    size = sum(tensor.length for tensor in stored.layout.values()) * (2 if stored.dtype in _HALVES else 1)
    needed, free = size * _COPIES, free_memory()
    if needed > free:
        raise ParityError(
            f"too large to verify here: that takes {needed / 1e9:.3g} GB of memory, {free / 1e9:.3g} GB are free",
            stored.path,
            "export with --graph-only, and run zoo verify on a larger machine",
        )


def free_memory() -> float:
    """Bytes of memory that can be had without swapping, unlimited where the system does not tell."""
    free = float("inf")
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = float(line.split()[1]) * 1024
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        free = min(free, float(limit) - float(used))
    return free


class Comparison:
    """The model in float64, in its own dtype, and as graphs at each optimisation level, side by side."""

    levels: Mapping[str, bool] = LEVELS
    labels: Mapping[str, str] = _LABELS

    def __init__(
        self,
        stored: ModelDirectory,
        graphs: Mapping[str, bytes],
        provider: Provider,
        declared: Sequence[Graph] | None = None,
        longest: int | None = None,
    ) -> None:
        self.stored, self.files, self.provider = stored, graphs, provider
        self.graphs = tuple(declared or stored.spec.graphs)
        self.epsilon = epsilon(stored.dtype)
        self.longest = int(getattr(stored.spec.config, "max_seq_len", DEFAULT_MAX))
        if longest is not None:
            self.longest = min(self.longest, longest)
        while self._numbers(Point(1, self.longest, 0, "none")) > _NUMBERS:
            self.longest //= 2
        self.yardstick = TorchExecutor(self._model())
        self.runtimes = self._runtimes()
        self.reference = TorchExecutor(self._model().double())
        self.errors = {
            (level, graph.name, tensor.name): Errors()
            for level in self.labels
            for graph in self.graphs
            for tensor in graph.output_tensors()
        }
        self.distributions = {key: Distribution() for key in self.errors if key[2] == "logits"}
        self.greedy: dict[str, dict[str, Any]] = {}
        self.points: list[Point] = []

    def _numbers(self, point: Point) -> int:
        """How many numbers the attention weights are, where they are compared."""
        total = point.length + point.past
        shapes = (
            tensor.shape(dict.fromkeys(graph.dim_names(), total) | {"batch": point.batch, "past_sequence": 0})
            for graph in self.graphs
            for tensor in graph.recorded()
        )
        return sum(math.prod(shape) for shape in shapes)

    def _model(self) -> nn.Module:
        """The model, once for each call."""
        return models.load_directory(self.stored)

    def _runtimes(self) -> dict[str, Executor]:
        """What is compared at every point."""
        return {level: self._runtime(optimize) for level, optimize in self.levels.items()}

    def _runtime(
        self,
        optimize: bool,
        weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Executor:
        """Sessions for all graphs: on the stored weights, or on others of the same layout."""
        sessions = {}
        try:
            for graph in self.graphs:
                file = (files or self.files)[graph.name]
                sessions[graph.name] = open_session(
                    file,
                    weights=self.stored.path,
                    provider=self.provider,
                    optimize=optimize,
                    placements=True,
                    spin=False,  # torch takes turns with the sessions; their threads must not fight for the cores
                    replace=self._by_place(file, weights) if weights else None,
                )
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error}", self.stored.path) from error
        return OnnxExecutor(sessions, self.yardstick.dtype)

    def _by_place(self, file: bytes, weights: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """For each initialiser the weight that lies where it points, whatever it is called."""
        names = {(tensor.file, tensor.offset): name for name, tensor in self.stored.layout.items()}
        places = pointers(file)
        astray = [name for name, place in places.items() if place not in names]
        if astray:
            raise ParityError(f"initialiser {astray[0]} points at no tensor", self.stored.path)
        return {name: weights[names[place]] for name, place in places.items()}

    def run(self, whole_grid: bool, progress: Progress | None) -> Report:
        """Compare everything, and say how it came out."""
        left_out = self.sweep(whole_grid, progress)
        failures = self.failures()
        return Report(self.evidence(left_out, verified=not failures), failures)

    def sweep(self, whole_grid: bool, progress: Progress | None) -> int:
        """Compare at every point of the grid, and greedily decoded text. Returns how many points were left out."""
        parameters = models.count_parameters(self.yardstick.model)
        points, left_out = make_grid(self.graphs, self.longest, parameters, whole=whole_grid)
        everything = len(points)
        points = [point for point in points if self._numbers(point) <= _NUMBERS]
        left_out += everything - len(points)
        self.visit(points, progress)
        for level, runtime in self.runtimes.items():
            margin = (
                2 * self.errors[level, self.graphs[-1].name, "logits"].limit(self.epsilon) if self.distributions else 0
            )
            agreement = greedy_agreement(self.reference, runtime, self.graphs, margin, self.longest)
            if agreement is not None:
                self.greedy[level] = agreement
        self.perturb(points)
        return left_out

    def visit(self, points: Sequence[Point], progress: Progress | None = None) -> None:
        """Compare at these points."""
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

    def perturb(self, points: list[Point]) -> None:
        """Compare twice more with noise on every weight, at the smallest point that has several rows and tokens.

        Fresh biases are 0 and fresh norms are 1: without noise, a graph that lost them would pass. Fresh matrices are
        so small that every token attends to all others alike: a wrong score would be lost in rounding.
        """
        generator = torch.Generator().manual_seed(SEED)
        smallest = smallest_points(points)

        self._change_weights(lambda weight: noisy(weight, generator) * _FAINT)
        for level in (FAINT, PERTURBED):
            runtime = {level: self._runtime(optimize=True, weights=self._weights())}
            for point in smallest:
                self._compare_at(point, runtime)
            if level == FAINT:
                self._change_weights(lambda weight: weight / _FAINT)

    def _change_weights(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            pairs = zip(self.yardstick.model.parameters(), self.reference.model.parameters(), strict=True)
            for own, exact in pairs:
                own.copy_(change(own))
                exact.copy_(own)

    def _recall(self, level: str) -> None:
        """Give the models the weights that they had at a level; at the end they have the perturbed ones."""
        if level == FAINT:
            self._change_weights(lambda weight: weight * _FAINT)
        elif level != PERTURBED:
            stored = iter(models.load_directory(self.stored).parameters())
            self._change_weights(lambda _: next(stored))

    def _weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """The weights that the models have now, by every name."""
        return {name: as_array(tensor) for name, tensor in self.yardstick.model.state_dict().items()}

    def _compare_at(self, point: Point, runtimes: Mapping[str, Executor]) -> None:
        feeds = make_feeds(self.graphs, point, SEED, self.longest)
        wanted = run_pipeline(self.reference, self.graphs, feeds, point, split=False)
        yardsticks = {
            executor: run_pipeline(executor, self.graphs, feeds, point, split=True)
            for executor in {self._yardstick(level) for level in runtimes}
        }
        nudged: list[dict[str, Arrays]] | None = None
        for level, runtime in runtimes.items():
            allowed = yardsticks[self._yardstick(level)]
            found = run_pipeline(runtime, self.graphs, feeds, point, split=True)
            for graph in self.graphs:
                for tensor in graph.output_tensors():
                    key = level, graph.name, tensor.name
                    valid = valid_positions(graph, tensor, feeds, point)
                    exact, made = wanted[graph.name][tensor.name], found[graph.name][tensor.name]
                    _check_shape(graph, tensor, made.shape, feeds, point)
                    self.errors[key].add(exact, allowed[graph.name][tensor.name], made, valid, point)
                    if not self.errors[key].passed(self.epsilon):
                        nudged = nudged or list(self._nudged(feeds, point))
                        for other in nudged:
                            self.errors[key].allow(exact, other[graph.name][tensor.name], valid)
                    if key in self.distributions:
                        rows = np.broadcast_to(valid, exact.shape)[..., 0]
                        margin = 2 * self.errors[key].limit(self.epsilon)
                        self.distributions[key].add(exact[rows], made[rows], margin)

    def _yardstick(self, level: str) -> TorchExecutor:
        """What tells how far off the graphs of a level may be."""
        return self.yardstick

    def _nudged(self, feeds: Feeds, point: Point) -> Iterator[dict[str, Arrays]]:
        """Torch's results on weights moved by less than a unit in the last place.

        One result of torch's may be close by luck where the model magnifies rounding, as a norm of two numbers does
        that are nearly the same. No graph can be asked to be closer than the model is to itself.
        """
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(_NUDGES):
            self._move_yardstick(lambda exact: exact * (1 + self.epsilon * (_uniform(exact, generator) - 0.5)))
            yield run_pipeline(self.yardstick, self.graphs, feeds, point, split=True)
        self._move_yardstick(lambda exact: exact)

    def _move_yardstick(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give it weights that are a function of the reference's."""
        with torch.no_grad():
            pairs = zip(self.yardstick.model.parameters(), self.reference.model.parameters(), strict=True)
            for own, exact in pairs:
                own.copy_(change(exact))

    def failures(self) -> list[str]:
        """One line for each thing that diverges, the first with the module where it begins."""
        lines = []
        for (level, graph, name), error in self.errors.items():
            where = f"{name} of {graph}, {self.labels[level]}"
            if not error.finite:
                lines.append(f"{where}, is not finite")
            elif not error.passed(self.epsilon):
                limit = error.limit(self.epsilon)
                lines.append(f"{where}, is off by {error.runtime:.3g}, allowed {limit:.3g}, at {error.worst}")
        for (level, graph, _), item in self.distributions.items():
            if item.disagreements:
                where = f"{graph}, {self.labels[level]}"
                lines.append(f"{where}, chooses another token in {item.disagreements} of {item.rows} rows")
        for level, agreement in self.greedy.items():
            if not agreement["passed"]:
                lines.append(f"greedy decoding, {self.labels[level]}, diverges after {agreement['agreed']} tokens")
        module = self._first_divergence() if lines else None
        return [f"{lines[0]}; it begins in {module}", *lines[1:]] if module else lines

    def _first_divergence(self) -> str | None:
        for (level, name, _), error in self.errors.items():
            if error.worst is not None and not error.passed(self.epsilon):
                self._recall(level)
                try:
                    modules = self.module_errors(name, error.worst)
                except Exception:  # the verdict stands already; a graph too broken to run here only lacks the module
                    return None
                return next((f"{item}, of {self.stored.spec.plugin}" for item in modules if item.diverges), None)
        return None

    def module_errors(self, name: str, point: Point) -> list[ModuleError]:
        """What each module of a graph returns at one point of the grid, without optimisations."""
        graph = next(graph for graph in self.graphs if graph.name == name)
        feeds = make_feeds(self.graphs, point, SEED, self.longest)
        run = partial(self._run_tapped, name)
        references = self.reference, self.yardstick
        return module_errors(graph, self.files[name], self.graphs, run, references, feeds, point)

    def _run_tapped(self, name: str, data: bytes) -> Executor:
        """All graphs without optimisations on the models' present weights, one file replaced."""
        return self._runtime(optimize=False, weights=self._weights(), files={**self.files, name: data})

    def _about(self, graph: Graph) -> dict[str, Any]:
        """What the evidence says of a graph's file."""
        runtime = self.runtimes["all"]
        assert isinstance(runtime, OnnxExecutor)
        nodes = placement(runtime.sessions[graph.name])
        return {"sha256": graph_digest(self.files[graph.name]), "placement": dict(nodes)}

    def outputs(self, graph: Graph) -> dict[str, Any]:
        """What the evidence says of each output of a graph."""
        return {
            tensor.name: {
                level: self.errors[level, graph.name, tensor.name].to_dict(self.epsilon) for level in self.labels
            }
            for tensor in graph.output_tensors()
        }

    def evidence(self, left_out: int, *, verified: bool) -> dict[str, Any]:
        """The content of parity.json."""
        rule = f"max_abs_error <= {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|"
        return {
            "schema": 1,
            "verified": verified,
            "model": self.stored.description["name"],
            "provider": self.provider,
            "dtype": self.stored.dtype,
            "rule": rule,
            "reference": "the module in float64, without a cache",
            "graphs": {
                graph.name: {
                    **self._about(graph),
                    "outputs": self.outputs(graph),
                }
                for graph in self.graphs
            },
            "logits": {level: item.to_dict() for (level, _, _), item in self.distributions.items()},
            "greedy_decoding": self.greedy,
            "grid": {"seed": SEED, "left_out": left_out, "points": [point.to_dict() for point in self.points]},
            "unused_tensors": sorted(
                set(self.stored.layout) - referenced_tensors(self.files.values(), self.stored.layout)
            ),
            "weights": weights_of(self.stored),
            "versions": versions(),
        }


class _WideComparison(Comparison):
    """Graphs in float16 or bfloat16 and their model, both computed in float32.

    What a graph computes does not depend on how it rounds, and where all numbers are rounded to two or three digits
    a wrong one may hide.
    """

    levels: Mapping[str, bool] = MappingProxyType({})
    labels: Mapping[str, str] = MappingProxyType(
        {level: f"{_LABELS[level]}, in float32" for level in (PERTURBED, FAINT)}
    )

    def __init__(
        self,
        stored: ModelDirectory,
        graphs: Mapping[str, bytes],
        provider: Provider,
        declared: Sequence[Graph] | None = None,
    ) -> None:
        super().__init__(stored, graphs, provider, declared)
        self.epsilon = epsilon("float32")
        self.yardstick = TorchExecutor(self.yardstick.model.float())


def verify_model(
    directory: Path,
    *,
    variant: str = "",
    provider: Provider = "cpu",
    whole_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check every digest of an exported model and compare it here.

    Nothing is written when the export was verified before; else the evidence is, once there is some.

    Raises :class:`ArtifactError` for anything altered or missing, :class:`ParityError` when the graphs are not equal
    to the model on this machine, and ``UsageError`` when the provider does not load.
    """
    if variant in PRECISIONS:
        from zoo_export.certify import verify_stored_variant

        return verify_stored_variant(
            directory, cast(Any, variant), provider=provider, whole_grid=whole_grid, progress=progress
        )
    if variant in PROFILES:
        provider = cast(Provider, variant)
    stored = ModelDirectory.open(directory)
    export = stored.export(variant)
    export.check()
    digest = stored.files[export.evidence_file]["sha256"]
    graphs = export.read()
    for name, data in graphs.items():
        if metadata(data).get(EVIDENCE_KEY) != digest:
            what, where = (
                f"{export.evidence_file} is not the evidence for this graph",
                directory / export.graph_files[name],
            )
            raise ArtifactError(what, where, "export again")
    if variant == LOOP:
        from zoo_export.loop_parity import compare_loop

        plain = stored.export()
        plain.check()
        plain.check_verified()
        report = compare_loop(stored, plain.read(), graphs[LOOP], provider=provider)
    else:
        report = compare(
            stored, graphs, declared=export.graphs, provider=provider, whole_grid=whole_grid, progress=progress
        )
    if not report.passed:
        raise ParityError(report.verdict(), directory)
    if not export.is_verified():
        write_export(export, graphs, report.evidence)
    return report


def diff_model(directory: Path, *, variant: str = "", provider: Provider = "cpu") -> dict[str, list[ModuleError]]:
    """For each graph, how far each module's output is from float64 at one point: two rows, padded, with a past.

    The graphs are those that are there, or what an export would make where there is none. Raises what
    :func:`verify_model` raises, but for a graph that is not equal to the model.
    """
    if variant == LOOP or variant in PRECISIONS:
        raise UsageError(f"the modules of {variant} are not compared", "--variant", "compare the plain export")
    stored = ModelDirectory.open(directory)
    check_dtype(stored.dtype, provider, directory)
    export = stored.export(variant)
    if export.exists:
        export.check()
    from zoo_export.exporter import PORTABLE, Options, make_graphs

    shows = variant == ATTENTIONS
    options = Options(attentions=shows, profile=PORTABLE if shows else variant or PORTABLE)
    graphs = export.read() if export.exists else make_graphs(stored, options)
    check_memory(stored)
    comparison = Comparison(stored, graphs, provider, export.graphs)
    past = PAST if any(graph.past for graph in comparison.graphs) and comparison.longest > PAST else 0
    padded = any(tensor.is_mask for graph in comparison.graphs for tensor in graph.input_tensors())
    point = Point(2, min(ODD, comparison.longest - past), past, "left" if padded else "none")
    try:
        return {name: comparison.module_errors(name, point) for name in graphs}
    except ZooError:
        raise
    except Exception as error:  # the runtime raises a dozen classes without a common base
        raise ParityError(f"the graph fails at {point} ({error})", stored.path) from error


def smallest_points(points: Sequence[Point]) -> list[Point]:
    """Of the points that have several rows, several tokens and the longest past, those of the fewest tokens.

    Images have one length, which the points do not tell.
    """
    past, longest = max(point.past for point in points), max(point.length for point in points)
    enough = min(2, longest)
    several = [point for point in points if point.batch > 1 and point.length >= enough and point.past == past] or points
    fewest = min(point.tokens for point in several)
    return [point for point in several if point.tokens == fewest]


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers in [0, 1) of a tensor's shape and dtype."""
    return torch.rand(like.shape, generator=generator, dtype=like.dtype)


def _check_shape(graph: Graph, tensor: TensorSpec, shape: tuple[int, ...], feeds: Feeds, point: Point) -> None:
    """Raise unless an output has the dimensions that are declared, as far as the inputs tell them."""
    sizes: dict[Dim, int] = {
        dim: feeds[item.name].shape[axis]
        for item in graph.input_tensors()
        if item.name in feeds
        for axis, dim in enumerate(item.dims)
    }
    sizes |= {"batch": point.batch, "sequence": point.length if graph.past else point.length + point.past}
    if graph.past:
        sizes |= {graph.past.length: point.past, f"{graph.past.length} + sequence": point.length + point.past}
    declared = tuple(_size(dim, sizes) for dim in tensor.dims)
    if len(declared) != len(shape) or any(
        size not in (None, there) for size, there in zip(declared, shape, strict=True)
    ):
        dims = ", ".join(map(str, tensor.dims))
        raise ParityError(f"{tensor.name} of graph {graph.name!r} has shape {shape} at {point}, declared is ({dims})")


def _size(dim: Dim, sizes: Mapping[Dim, int]) -> int | None:
    """The size of a dimension as far as the inputs tell it."""
    if dim in sizes:
        return sizes[dim]
    try:
        return dim_size(dim, {name: size for name, size in sizes.items() if isinstance(name, str)})
    except KeyError:
        return None


def valid_positions(graph: Graph, tensor: TensorSpec, feeds: Feeds, point: Point) -> np.ndarray[Any, Any]:
    """Where an output means something: rows with a token in every mask, and positions that are not padding."""
    masks: dict[Any, Any] = {item.dims[1]: feeds[item.name] != 0 for item in graph.input_tensors() if item.is_mask}
    if graph.past and f"{graph.past.length} + sequence" in masks:
        masks["sequence"] = masks[f"{graph.past.length} + sequence"][:, -point.length :]
    rank = len(tensor.dims)
    valid = np.ones([1] * rank, dtype=bool)
    if "batch" not in tensor.dims:
        return valid
    for mask in masks.values():
        valid = valid & mask.any(1).reshape([-1] + [1] * (rank - 1))
    for axis, dim in enumerate(tensor.dims):
        if dim in masks:
            rows, length = masks[dim].shape
            valid = valid & masks[dim].reshape([rows, *[length if n == axis else 1 for n in range(1, rank)]])
    return valid
