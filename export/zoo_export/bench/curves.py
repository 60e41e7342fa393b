"""Time and memory of models as functions of text length, compared with a baseline model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import Export, ModelDirectory
from zoo.contract import rows_of, standard_fields
from zoo.errors import ParityError, UsageError, argument, nearest
from zoo.exporters import Progress
from zoo.models import create, persist
from zoo.registry import ModelSpec, registry
from zoo.storage import scratch_folder
from zoo.system import free_memory
from zoo_export.bench.cases import check_declared
from zoo_export.bench.measure import cpu_name
from zoo_export.bench.points import MEASURED, measure_point
from zoo_export.comparison import Comparison
from zoo_export.parity.compare import compare
from zoo_export.parity.evidence import versions, write_export
from zoo_export.trace.make import Options, make_graphs
from zoo_runtime import load_session

__all__ = ["COMPARED", "FULL", "below_from", "bench_curves", "growth"]

FULL = "layer-full"
"""Default baseline."""
COMPARED = 512
"""Maximum length at which graphs of presets are verified. Beyond, float64 takes minutes or longer."""
_OCTAVES = 2
"""Number of doublings at the end of a curve over which growth is fitted."""
_SCORES = 2
"""Minimum number of score matrices in full attention: before and after the softmax."""


@dataclass(frozen=True)
class _Source:
    """A model to measure."""

    name: str
    spec: ModelSpec
    directory: Path | None
    """Model directory; None for a preset, which is built."""


def bench_curves(
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    baseline: str | None = None,
    threads: int | None = None,
    seconds: float = 2.0,
    max_memory: float | None = None,
    progress: Progress | None = None,
    describe: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure models at several lengths on the CPU, with one text at a time and a separate process per measurement.

    Presets are built and exported, and their graphs verified on up to :data:`COMPARED` tokens; longer texts are only
    timed. Lengths that may not fit into memory are skipped, assuming that memory grows with the square of the length.

    Args:
        names: presets, globs of presets, and model directories with a verified export.
        lengths: text lengths in tokens, ascending.
        baseline: one of the models; by default :data:`FULL` if it is among them, else the first.
        threads: number of threads per session.
        seconds: time to spend on each measurement, which makes at least one pass.
        max_memory: memory limit per measurement, in bytes; by default the free memory.
        progress: called with the number of each step and the total.
        describe: called with what is exported or measured next.

    Returns:
        The settings as plain data and, under ``models``, the curve and growth exponents of each model.

    Raises:
        UsageError: a model, length or baseline is invalid.
        ArtifactError: a directory is not an intact model with an export.
        ParityError: a graph differs from its model.
    """
    sources = [source for name in names for source in _find(name)]
    sources = list({source.name: source for source in sources}.values())
    known = [source.name for source in sources]
    reference = baseline or (FULL if FULL in known else known[0])
    if reference not in known:
        raise UsageError(
            f"baseline {reference!r} is not among the models", argument("baseline"), nearest(reference, known)
        )
    sources.sort(key=lambda source: source.name != reference)  # baseline first, then in the given order
    known = [source.name for source in sources]
    for source in sources:
        _check_lengths(source, lengths)
    steps, total = 0, len(sources) * (1 + len(lengths))
    with scratch_folder() as folder:
        places = {}
        for source in sources:
            steps = _step(progress, steps, total)
            describe(f"exporting {source.name}" if source.directory is None else f"opening {source.name}")
            places[source.name] = _prepare(source, folder, min(COMPARED, max(lengths)))
        curves: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
        for length in lengths:  # models take turns, so that background load affects all of them equally
            for source in sources:
                steps = _step(progress, steps, total)
                describe(f"{source.name}, {length:,} tokens")
                free = free_memory() if max_memory is None else min(max_memory, free_memory())
                reason = _reason_against(source, curves[source.name], length, free)
                point = (
                    {"length": length, "failure": reason, **dict.fromkeys(MEASURED)}
                    if reason
                    else measure_point(places[source.name], length, seconds=seconds, threads=threads, memory=free)
                )
                curves[source.name].append(point)
    built = [source.name for source in sources if source.directory is None]
    return {
        "baseline": reference,
        "lengths": list(lengths),
        "compared_to": {name: min(COMPARED, max(lengths)) if name in built else None for name in known},
        "threads": threads,
        "cpu": cpu_name(),
        "seconds": seconds,
        "versions": versions(),
        "models": [{"name": name, **_describe(points, curves[reference])} for name, points in curves.items()],
    }


def _step(progress: Progress | None, done: int, total: int) -> int:
    if progress is not None:
        progress(done + 1, total)
    return done + 1


def _find(name: str) -> list[_Source]:
    """Return the models that a name stands for: a directory, the presets matching a glob, or one preset."""
    if Path(name).is_dir():
        return [_Source(name, ModelDirectory.open(name).spec, Path(name))]
    presets = registry()
    matching = [preset for preset in presets.names() if fnmatchcase(preset, name)]
    if not matching and any(character in name for character in "*?["):
        raise UsageError(f"no preset matches {name!r}", None, "see zoo list")
    return [_Source(preset, presets.resolve(preset), None) for preset in matching or [name]]


def _check_lengths(source: _Source, lengths: Sequence[int]) -> None:
    """Raise :class:`UsageError` unless a model accepts texts of these lengths."""
    if not {name for graph in source.spec.graphs for name in graph.dim_names()} - {*rows_of(source.spec.graphs)}:
        raise UsageError("inputs have a fixed length", source.name, "choose a model that reads texts")
    longest = standard_fields(source.spec.config).max_seq_len
    for length in lengths:
        where = f"{source.name}, length {length}"
        check_declared(source.spec.graphs, length, where)
        if longest is not None and length > longest:
            raise UsageError(f"the model has {longest} positions", where, f"choose at most {longest}")


def _prepare(source: _Source, folder: Path, longest: int) -> Path:
    """Return a model directory with a verified export; presets are built and exported in ``folder``."""
    if source.directory is not None:
        with load_session(source.directory) as session:
            if session.export.traits.interface == "loop":
                raise UsageError(
                    "a graph with the whole decoding loop cannot be measured", source.name, "run zoo export"
                )
        return source.directory
    target = folder / source.name
    model = create.build(source.spec, seed=0, dtype="float32")
    stored = ModelDirectory.open(persist.save_spec(source.spec, model, target))
    graphs = make_graphs(stored)
    report = compare(stored, graphs, Comparison(longest=longest))
    if not report.passed:
        raise ParityError(report.verdict(), source.name, "nothing was measured")
    write_export(Export(stored), graphs, {**report.evidence, "options": Options().facts()})
    return target


def _reason_against(source: _Source, points: Sequence[Mapping[str, Any]], length: int, free: float) -> str | None:
    """Return why a length is skipped: a shorter one failed, or it may not fit into memory. None to measure it."""
    failed = next((point["length"] for point in points if point["failure"]), None)
    if failed is not None:
        return f"skipped, because {failed} tokens failed"
    last = next((point for point in reversed(points) if point["memory"]), None)
    scores = 4 * _SCORES * getattr(source.spec.config, "num_heads", 0) * length**2
    expected = scores if last is None else last["memory"] * (length / last["length"]) ** 2
    if expected <= free:
        return None
    return f"skipped, because it may need {expected / 1e9:.3g} GB of memory; the limit is {free / 1e9:.3g} GB"


def _describe(points: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a curve with its growth and its ratios to the baseline."""
    facts: dict[str, Any] = {}
    ratios: dict[str, dict[int, float]] = {}
    for key, quantity, less in (("best_seconds", "time", "faster"), ("memory", "memory", "smaller")):
        own, other = (
            {point["length"]: float(point[key]) for point in curve if point[key]} for curve in (points, others)
        )
        facts[f"{quantity}_growth"] = growth(own)
        facts[f"{less}_from"] = below_from(own, other)
        ratios[quantity] = {length: value / other[length] for length, value in own.items() if length in other}
    compared = [
        {**point, **{f"{quantity}_ratio": found.get(point["length"]) for quantity, found in ratios.items()}}
        for point in points
    ]
    return {**facts, "points": compared}


def growth(values: Mapping[int, float]) -> float | None:
    """Fit the exponent of a power law to the last doublings of a curve. None if there is only one point."""
    lengths = [length for length in values if length * 2**_OCTAVES >= max(values)]
    if len(lengths) < 2:
        return None
    slope, _ = np.polyfit(np.log(lengths), np.log([values[length] for length in lengths]), 1)
    return float(slope)


def below_from(own: Mapping[int, float], other: Mapping[int, float]) -> int | None:
    """Return the length from which on values stay below the others, or None if the last is not below."""
    first = None
    for length in sorted(own.keys() & other.keys(), reverse=True):
        if own[length] >= other[length]:
            break
        first = length
    return first
