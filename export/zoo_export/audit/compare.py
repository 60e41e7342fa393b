"""The comparison of graphs of other tools with their model at the points of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from zoo.artifact import ModelDirectory
from zoo.contract import TensorSpec
from zoo.errors import ArtifactError, UsageError
from zoo.exporters import Progress
from zoo.models import create, persist
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Feeds, Point, given_inputs, make_feeds
from zoo.probe.module import fixed_values
from zoo.probe.pipeline import token_input
from zoo_export.audit.binding import FileSet
from zoo_export.audit.covering import cover_files
from zoo_export.audit.findings import QUESTIONS
from zoo_export.audit.judging import ByDivergence, ByError, Case, Judge, Outcome, run_model
from zoo_export.audit.modules import first_module, misnamed
from zoo_export.audit.names import TOKEN_TYPES
from zoo_export.audit.running import ForeignModel, NotAskable, baked_in, encoder_states
from zoo_export.coverage.coverage import Coverage
from zoo_export.parity.laws import special_ids
from zoo_export.parity.memory import check_memory, fits, longest_input
from zoo_export.parity.points import in_order
from zoo_export.parity.reference import SEED, Models, without_advice
from zoo_export.parity.subject import LEVELS
from zoo_export.variants.reduced.recipe import BOUNDS
from zoo_runtime.onnx_runtime.run_errors import OutOfMemoryError, RunError, cause

__all__ = ["Comparisons", "compare_files"]


@dataclass
class Comparisons:
    """The compared points, and the verdicts on the outputs at them."""

    judge: Judge
    points: list[Point] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    not_askable: dict[str, None] = field(default_factory=dict)
    """Why inputs could not be compared."""
    left_out: int = 0
    """Number of points of the grid that would take too long."""
    module: str | None = None
    """The first module of the model that a wrong graph lacks, with its class, if it can be told."""
    coverage: Coverage | None = None
    """The outcomes of conditions that the points show; None if conditions were not looked for."""
    ids: dict[str, set[int]] = field(default_factory=dict)
    """The token ids that were compared, by input."""
    misnamed: dict[str, str] = field(default_factory=dict)
    """Wrong outputs that equal another output of the model."""

    @property
    def wrong(self) -> list[Outcome]:
        """The outcomes that are wrong."""
        return [item for item in self.outcomes if item.failure]


@without_advice()
def compare_files(
    stored: ModelDirectory,
    files: FileSet,
    precision: str,
    *,
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Comparisons:
    """Run graphs at every point of the grid that they accept, with and without optimisations, and judge the outputs.

    Args:
        stored: the model.
        files: the graphs.
        precision: that of the graphs, which chooses the rule.
        full_grid: compare at every point, regardless of the time it takes.
        progress: called with the number of the current point and the number of points.

    Raises:
        ArtifactError: a graph cannot be loaded, or accepts no input of the grid.
        UsageError: no graph takes an input that the model needs.
        ParityError: there is not enough memory.
    """
    check_memory(stored, files.declared)
    models = Models(lambda: persist.load_directory(stored).float())
    inputs = _Inputs(stored, files, models)
    judge: Judge
    if precision in BOUNDS:
        judge = ByDivergence(files.declared, BOUNDS[precision])
    else:
        discontinuous = bool(stored.spec.architecture.discontinuous)
        judge = ByError(files.declared, models, discontinuous=discontinuous)
    runtimes = {level: ForeignModel(files, optimize=optimize) for level, optimize in LEVELS.items()}
    found = Comparisons(judge, not_askable=dict.fromkeys(inputs.reasons))
    parameters = create.count_parameters(models.yardstick.model)
    points, found.left_out = inputs.points(parameters, full_grid)
    covered = cover_files(files, points, inputs.askable, inputs.longest, parameters)
    if covered is not None:
        added, found.coverage = covered
        points += added
    for number, point in enumerate(points):
        if progress is not None:
            progress(number + 1, len(points))
        try:
            _compare(found, files, runtimes, models, inputs.feeds(point), point)
        except NotAskable as reason:
            found.not_askable[str(reason)] = None
    found.outcomes += judge.finish()
    if not found.points:
        where = files.bound[0].graph.path
        raise ArtifactError("no input of the grid can be asked", where, "; ".join(found.not_askable))
    if found.wrong:
        found.module = _first_module(found, files, models, inputs)
    return found


def _first_module(found: Comparisons, files: FileSet, models: Models, inputs: _Inputs) -> str | None:
    """Look for the module where a fault begins, at the cheapest wrong point and at the most similar right one."""
    wrong = {item.point for item in found.wrong}
    first = next((item for item in found.wrong if not item.refused), found.wrong[0])
    graph = next(graph for graph in files.declared if graph.name == first.place[0])

    def differs(point: Point) -> int:
        return sum(asks(point) != asks(first.point) for asks in QUESTIONS.values())

    right = min((point for point in found.points if point not in wrong), key=differs, default=None)
    try:
        watching = ForeignModel(files, optimize=False, watch=True)
    except ArtifactError:  # a tensor that cannot be an output
        return None
    return first_module(
        watching,
        models,
        graph,
        (inputs.feeds(first.point), first.point),
        None if right is None else (inputs.feeds(right), right),
    )


def _compare(
    found: Comparisons, files: FileSet, runtimes: Mapping[str, ForeignModel], models: Models, feeds: Feeds, point: Point
) -> None:
    """Compare at one point. Raises :class:`NotAskable` before anything is counted."""
    exact = run_model(models.reference, files.declared, feeds, point)
    states = encoder_states(files, exact)
    results, failures = {}, {}
    for level, runtime in runtimes.items():
        try:
            results[level] = runtime.run(feeds, point, states)
        except OutOfMemoryError:
            raise
        except (RunError, UsageError) as error:
            failures[level] = error
    found.points.append(point)
    for name, values in feeds.items():
        if values.dtype.kind == "i" and values.ndim == 2:
            found.ids.setdefault(name, set()).update(np.unique(values).tolist())
    case = Case(point, feeds, exact, run_model(models.yardstick, files.declared, feeds, point))
    for level, outputs in results.items():
        outcomes = list(found.judge.add(level, outputs, case))
        found.outcomes += outcomes
        for graph, name in [item.place for item in outcomes if item.failure]:
            if name not in found.misnamed and (other := misnamed((graph, name), outputs, exact)) is not None:
                found.misnamed[name] = other
    for level, failure in failures.items():
        place = next(iter(files.bound[-1].outputs.values()))
        found.outcomes.append(Outcome(level, place, point, f"fails at {point} ({cause(failure)})", refused=True))


class _Inputs:
    """Makes inputs that the graphs accept."""

    def __init__(self, stored: ModelDirectory, files: FileSet, models: Models) -> None:
        self._files, self._graphs = files, files.declared
        self.longest = longest_input(stored.spec.config, self._graphs)
        self._special = special_ids(stored.spec, fixed_values(models.yardstick.model))
        self._lacking = files.lacking()
        self.fixed, self.reasons = _fixed_sizes(files)
        compared = {graph for item in files.bound for graph, _ in item.outputs.values()}
        for graph in self._graphs:
            for tensor in graph.input_tensors():
                needed = tensor.name in self._lacking and graph.name in compared
                if needed and not self._is_optional(tensor):
                    where = ", ".join(item.graph.label for item in files.bound)
                    raise UsageError(f"no graph takes {tensor.name}, which the model reads", where, "use --map")

    def points(self, parameters: int, full_grid: bool) -> tuple[list[Point], int]:
        """Return the points of the grid, and those that fit what graphs have baked in; and the number left out."""
        points, left_out = make_grid(self._graphs, self.longest, parameters, whole=full_grid, fixed=self.fixed)
        points += self._points_of_steps()
        return in_order(point for point in dict.fromkeys(points) if fits(self._graphs, point)), left_out

    def _points_of_steps(self) -> list[Point]:
        """Return points with pasts of the sizes that a graph with a past has baked in."""
        step, decoder = self._files.step, self._files.decoder
        if step is None or decoder is None:
            return []
        pasts = {port.fixed(-2) for port in step.graph.inputs if port.name in step.past} - {None, 0}
        ids = step.port(token_input(decoder) or "")
        length = (ids.fixed(1) if ids is not None else None) or 1
        pasts |= {self.fixed["sequence"]} if "sequence" in self.fixed else set()
        batches = [self.fixed["batch"]] if "batch" in self.fixed else [1, 2]
        return [Point(batch, length, past, "none") for past in pasts if past for batch in batches]

    def feeds(self, point: Point) -> Feeds:
        """Return the inputs at a point: of what no graph takes, the values that mean nothing is there.

        The source of a decoder is padded on the right, as tokenizers pad it, and other rows as their mask declares.

        Raises:
            NotAskable: the point has padding, and no graph takes a mask for it.
        """
        fixed = {name: size for name, size in self.fixed.items() if self._files.decoder is None or name != "sequence"}
        feeds = make_feeds(self._graphs, point, SEED, self.longest, special=self._special, fixed=fixed)
        sides = set[str]()
        for tensor in given_inputs(self._graphs).values():
            if tensor.name in self._lacking:
                neutral = np.ones_like if tensor.is_mask else np.zeros_like
                if self._is_optional(tensor):
                    feeds[tensor.name] = neutral(feeds[tensor.name])
            elif tensor.is_mask and point.padding in ("left", "right"):
                side = self._side(tensor, point.padding)
                sides.add(side)
                if side != point.padding:
                    feeds[tensor.name] = feeds[tensor.name][:, ::-1]
            elif tensor.is_mask:
                sides.add(point.padding)
        if point.padding != "none" and not sides:
            raise NotAskable("padded batches: without a mask, rows must have the same length")
        if point.padding != "none" and point.padding not in sides:
            raise NotAskable(f"rows padded on the {point.padding}: the tokenizer pads these inputs on the other side")
        return feeds

    def askable(self, point: Point) -> Feeds | None:
        """Return the inputs at a point, or None if it cannot be asked."""
        try:
            return self.feeds(point)
        except NotAskable:
            return None

    def _is_optional(self, tensor: TensorSpec) -> bool:
        return tensor.is_mask or tensor.name == TOKEN_TYPES

    def _side(self, tensor: TensorSpec, side: Literal["left", "right"]) -> str:
        """Return the side on which a mask is padded at a point with padding on a given one."""
        decoder = self._files.decoder
        is_source = decoder is not None and tensor.dims[1] != decoder.total_length
        return "right" if is_source else side if tensor.padding == "both" else tensor.padding


def _fixed_sizes(files: FileSet) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of declared dimensions that the inputs of graphs have baked in, by name, and in words."""
    fixed, reasons = dict[str, int](), list[str]()
    for graph in files.declared:
        parts = files.others if not graph.pasts else (files.first,)
        for tensor in graph.input_tensors():
            for item in filter(None, parts):
                port = item.port(tensor.name)
                for axis, dim in enumerate(tensor.dims):
                    size = port.fixed(axis) if port is not None and str(dim).isidentifier() else None
                    if size and port is not None:
                        fixed.setdefault(str(dim), size)
                        reasons.append(baked_in(item, port, axis))
    return fixed, reasons
