"""The report of an audit, as data and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.artifact import abridged, coverage_summary
from zoo.probe.inputs import given_inputs
from zoo_export.audit.binding import Bound, FileSet
from zoo_export.audit.compare import Comparisons
from zoo_export.audit.findings import Question, answers, shared
from zoo_export.audit.judging import Outcome
from zoo_export.audit.names import POSITIONS
from zoo_export.parity.subject import LEVEL_LABELS, LEVELS

__all__ = ["AuditReport", "Fault", "report_of"]


@dataclass(frozen=True, slots=True)
class Fault:
    """An output that is wrong."""

    graph: str
    output: str
    levels: tuple[str, ...]
    """Levels of optimisation at which it is: ``off``, ``all``."""
    points: int
    """Number of points at which it is."""
    first: Mapping[str, Any]
    """The cheapest of them."""
    failure: str
    shared: tuple[str, ...]
    """The questions that the wrong points have in common, and the right ones have not."""

    def __str__(self) -> str:
        levels = "" if len(self.levels) == len(LEVELS) else f", with {LEVEL_LABELS[self.levels[0]]} alone"
        common = f", all with {', '.join(self.shared)}" if self.shared else ""
        where = f"; wrong at {self.points} points{levels}{common}"
        return f"{self.output}{_of(self.graph)} {self.failure}{where}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for audit.json."""
        names = ("graph", "output", "points", "failure")
        lists = {"levels": list(self.levels), "shared": list(self.shared), "first": dict(self.first)}
        return {name: getattr(self, name) for name in names} | lists


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit: the answers to the questions, the wrong outputs, and the limits."""

    model: Mapping[str, Any]
    graphs: Sequence[Mapping[str, Any]]
    rule: str
    questions: Sequence[Question]
    outputs: Mapping[str, Mapping[str, Any]]
    """The measured errors of each output."""
    faults: Sequence[Fault]
    limits: Sequence[str]
    """Questions that the graphs do not allow, and points that were left out."""
    notes: Sequence[str]
    """Facts that may explain a fault."""
    points: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    ids: Mapping[str, tuple[int, int]]
    """For inputs of token ids, how many ids were compared, and how many there are."""
    coverage: Mapping[str, Any] | None
    """The outcomes of the graph's conditions that the points show, as in parity.json; None for several graphs."""
    module: str | None = None
    """The first module of the model whose output no tensor of the graph equals, if it can be told."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def verdict(self) -> str:
        """Return one line: the first fault, or that all that could be asked is right."""
        if self.faults:
            more = f"; and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            module = f"; it begins in {self.module}" if self.module else ""
            return f"{self.faults[0]}{module}{more}"
        limits = f", within {len(self.limits)} limit{'s' * (len(self.limits) > 1)}" if self.limits else ""
        return f"right at {len(self.points)} points{limits}"

    def asked(self) -> str:
        """Return the inputs that were compared: sizes, padding, and how many of the token ids."""
        batches, lengths, pasts = ({point[key] for point in self.points} for key in ("batch", "length", "past"))
        sizes = [f"up to {max(batches)} rows", f"up to {max(lengths)} tokens"]
        sizes += [f"pasts of up to {max(pasts)}"] if max(pasts) else []
        sizes += ["padding at the ends of rows"] if any(point["padding"] != "none" for point in self.points) else []
        sizes += [f"{count:,} of the {whole:,} ids of {name}" for name, (count, whole) in self.ids.items()]
        return ", ".join(sizes)

    def covered(self) -> str | None:
        """Return how many outcomes of conditions the points show, and which they do not; None without conditions."""
        return None if self.coverage is None else coverage_summary({"grid": {"coverage": self.coverage}})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of audit.json."""
        return {
            "verdict": "right" if self.passed else "wrong",
            "summary": self.verdict(),
            "model": dict(self.model),
            "graphs": list(self.graphs),
            "rule": self.rule,
            "questions": [item.to_dict() for item in self.questions],
            "outputs": dict(self.outputs),
            "wrong": [item.to_dict() for item in self.faults],
            "first_module": self.module,
            "limits": list(self.limits),
            "notes": list(self.notes),
            "levels": list(LEVELS),
            "coverage": self.coverage,
            "points": list(self.points),
            "ids": {name: {"compared": count, "of": whole} for name, (count, whole) in self.ids.items()},
            "asked": self.asked(),
            "versions": dict(self.versions),
        }


def report_of(
    files: FileSet,
    found: Comparisons,
    *,
    model: Mapping[str, Any],
    rule: str,
    versions: Mapping[str, str],
) -> AuditReport:
    """Summarise comparisons."""
    faults = _faults(found)
    reads_lengths = any("sequence" in str(dim) for graph in files.declared for dim in graph.dim_names())
    return AuditReport(
        model=model,
        graphs=[_graph(item, files) for item in files.bound],
        rule=rule,
        questions=answers(found.points, found.outcomes, has_lengths=reads_lengths, has_past=files.decoder is not None),
        outputs={f"{name}{_of(graph)}": facts for (graph, name), facts in found.judge.facts().items()},
        faults=faults,
        limits=list(_limits(files, found)),
        notes=list(_notes(files, faults, found)),
        points=[point.to_dict() for point in found.points],
        versions=versions,
        ids={
            tensor.name: (len(found.ids[tensor.name]), tensor.upper)
            for tensor in given_inputs(files.declared).values()
            if tensor.upper is not None and not tensor.is_mask and tensor.name in found.ids
        },
        coverage=None if found.coverage is None else found.coverage.facts(),
        module=found.module,
    )


def _of(graph: str) -> str:
    return "" if graph == "model" else f" of {graph}"


def _graph(item: Bound, files: FileSet) -> dict[str, Any]:
    part = "model" if files.decoder is None else "encoder"
    if item is files.first:
        part = "merged decoder" if item.is_merged else "decoder"
    elif item is files.step:
        part = "decoder with a past"
    return {
        "file": item.graph.label,
        "sha256": item.graph.sha256,
        "producer": item.graph.producer,
        "opset": item.graph.opset,
        "precision": item.graph.precision,
        "part": part,
        "inputs": dict(item.inputs),
        "outputs": {name: ours for name, (_, ours) in item.outputs.items()},
        "past": len(item.past),
        "not_compared": list(item.ignored),
        "not_read": sorted(item.graph.unread),
    }


def _faults(found: Comparisons) -> list[Fault]:
    """Return the wrong outputs, each with its cheapest wrong point."""
    groups: dict[tuple[tuple[str, str], bool], list[Outcome]] = {}
    for outcome in found.wrong:
        groups.setdefault((outcome.place, outcome.refused), []).append(outcome)
    return [
        Fault(
            graph=graph,
            output=name,
            levels=tuple(dict.fromkeys(item.level for item in outcomes)),
            points=len({item.point for item in outcomes}),
            first=outcomes[0].point.to_dict(),
            failure=str(outcomes[0].failure),
            shared=tuple(shared(found.points, outcomes)),
        )
        for ((graph, name), _), outcomes in sorted(groups.items(), key=lambda item: item[0][1])
    ]


def _limits(files: FileSet, found: Comparisons) -> Iterator[str]:
    """Yield what could not be asked."""
    yield from found.not_askable
    for name, items in files.lacking().items():
        if items or name not in _of_encoder(files):
            yield f"no {name}" + (f" in {', '.join(item.graph.label for item in items)}" if items else "")
    if _of_encoder(files):
        yield "no graph of the encoder: its states were those of the model"
    if files.decoder is not None and files.first is None:
        yield "no graph of the decoder"
    for graph, name in files.missing_outputs():
        if not _of_encoder(files) or files.decoder is None or graph == files.decoder.name:
            yield f"no output {name}{_of(graph)}"
    for _, name in sorted(found.judge.last_only):
        yield f"{name} of the last position only"
    yield from found.judge.limits()
    if found.coverage is None:
        yield "conditions in the graphs were not looked for: there are several graphs, or other inputs than the model's"
    elif unseen := [line for part in found.coverage.facts().values() for line in part["unseen"]]:
        yield f"outcomes of conditions that no input shows: {abridged(unseen)}"
    if found.left_out:
        yield f"{found.left_out} points of the grid were left out, which take long: --grid full compares them"


def _of_encoder(files: FileSet) -> set[str]:
    """Return the inputs of an encoder that no graph computes, so that the model does."""
    if files.decoder is None or files.others:
        return set()
    return {item.name for graph in files.declared if graph is not files.decoder for item in graph.input_tensors()}


def _notes(files: FileSet, faults: Sequence[Fault], found: Comparisons) -> Iterator[str]:
    """Yield what may explain faults, and what was not compared."""
    for name, other in found.misnamed.items():
        yield f"{name} equals {other} of the model: --map {name}={other} compares it with that"
    by_position = any({"padding on the left", "a past"} & {*fault.shared} for fault in faults)
    for item in files.bound:
        name = item.graph.label
        if item.graph.unread:
            yield f"no node of {name} reads its input {abridged(sorted(item.graph.unread))}"
        decodes = files.decoder is not None and item in (files.first, files.step)
        if by_position and decodes and POSITIONS not in item.inputs.values():
            yield f"{name} has no input {POSITIONS}: it counts positions itself"
        if item.ignored:
            yield f"outputs of {name} that are not compared: {abridged(item.ignored)}"
