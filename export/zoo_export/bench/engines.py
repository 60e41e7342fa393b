"""The verified exports of one model side by side, each on the engine that it was verified on.

B rows of N tokens each, and K tokens after them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import OPENVINO, Export, ModelDirectory, find_exports
from zoo.errors import UsageError, ZooError
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import Arrays, decoder_inputs
from zoo_export.bench.cases import make_cases
from zoo_export.bench.measure import cpu_name, thread_times, waited_since
from zoo_runtime import Session, load_session
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Provider, loading_problem
from zoo_runtime.openvino.compiled import engine_version

__all__ = ["bench_engines"]

_NEW = 32
"""K, if the model has positions for them."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 100
_PAUSE = 0.01
"""Pause before each turn in seconds, for the threads of the previous engine to stop spinning."""
_SEED = 0
_COMPARED = ("declared", "int8 cache")
"""Interfaces that run the graphs of the model, whose time is that of a call or a token."""


@dataclass
class _Entrant:
    """An export on an engine, and the seconds of its turns."""

    session: Session
    prompts: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    @property
    def engine(self) -> str:
        return engine_version() if self.session.provider == OPENVINO else f"onnxruntime {ort.__version__}"

    def facts(self) -> dict[str, Any]:
        session = self.session
        step = statistics.median(self.steps) if self.steps else None
        return {
            "engine": self.engine,
            "provider": session.provider,
            "variant": session.export.variant,
            "precision": _precision(session.export),
            "seconds": statistics.median(self.prompts),
            "step_seconds": step,
        }

    def rank(self) -> float:
        """Seconds by which engines are ordered: of a token, or of a call if the model does not generate."""
        return statistics.median(self.steps or self.prompts)


def bench_engines(
    directory: Path | str,
    *,
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] | None = None,
    threads: int | None = None,
    seconds: float = 2.0,
    unverified: bool = False,
    describe: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time the exports of a model in turns, on every engine that is installed and that they were verified on.

    Args:
        directory: a model directory with exports.
        batches: batch sizes, B.
        lengths: lengths in tokens, N. By default 128, or the model's maximum if smaller.
        threads: number of threads; the number of cores by default.
        seconds: approximate time to spend on each export at each size.
        unverified: include exports that are not verified.
        describe: called with what is prepared or measured next.

    Returns:
        Plain data: for each size, the median seconds of a prompt or a call and those of a further token by export, and
        the fastest export of each precision, and the fraction of time that threads waited for a core, None if unknown;
        and why others were left out.

    Raises:
        UsageError: no export can be measured, or a length exceeds the model's positions.
    """
    stored = ModelDirectory.open(Path(directory))
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        entrants: list[_Entrant] = []
        for export, provider in _candidates(stored):
            name = f"{export.variant or 'portable'} on {provider}"
            describe(f"opening {name}")
            try:
                session = load_session(
                    directory, provider=provider, variant=export.variant, threads=threads, unverified=unverified
                )
            except ZooError as error:
                left_out[name] = error.what
                continue
            entrants.append(_Entrant(stack.enter_context(session)))
        if not entrants:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise UsageError(f"no export can be measured ({reasons or 'there is none'})", stored.path)
        results = []
        for batch, length in _sizes(entrants[0].session, batches, lengths):
            describe(f"timing {batch} x {length}")
            results.append(_measure(entrants, batch, length, seconds))
    return {
        "model": stored.spec.name,
        "cpu": cpu_name(),
        "threads": threads,
        "left_out": left_out,
        "cases": results,
    }


def _candidates(stored: ModelDirectory) -> Iterator[tuple[Export, Provider]]:
    """Yield the exports that run the graphs of the model, with where each was verified, or may be run."""
    for export in find_exports(stored):
        if export.traits.interface in _COMPARED:
            yield export, export.traits.provider or "cpu"
            if export.traits.provider is None and loading_problem("cuda") is None:
                yield export, "cuda"


def _precision(export: Export) -> str:
    return export.traits.precision or export.traits.base or export.stored.dtype


def _sizes(session: Session, batches: Sequence[int], lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return the sizes to measure. Raises :class:`UsageError` for a length that the model does not have."""
    cases = make_cases(session, batches, lengths)
    return list(dict.fromkeys((case.batch, case.length) for case in cases))


def _measure(entrants: Sequence[_Entrant], batch: int, length: int, seconds: float) -> dict[str, Any]:
    """Time all exports at one size, in turns."""
    turns = {id(entrant): _turn(entrant.session, batch, length) for entrant in entrants}
    spent = 0.0
    before = thread_times()
    for number in range(_MOST_ROUNDS):
        if number > _LEAST_ROUNDS and spent > seconds * len(entrants):
            break
        for entrant in entrants:
            time.sleep(_PAUSE)
            prompt, step = turns[id(entrant)]()
            spent += prompt + (step or 0.0) * _NEW
            if number:  # the first turn allocates memory
                entrant.prompts.append(prompt)
                entrant.steps += [] if step is None else [step]
    exports = [entrant.facts() for entrant in sorted(entrants, key=_Entrant.rank)]
    fastest: dict[str, str] = {}
    for item in exports:
        fastest.setdefault(item["precision"], item["variant"])
    result = {
        "batch": batch, "length": length, "exports": exports, "fastest": fastest, "waited": waited_since(before),
    }  # fmt: skip
    for entrant in entrants:
        entrant.prompts, entrant.steps = [], []
    return result


def _turn(session: Session, batch: int, length: int) -> Callable[[], tuple[float, float | None]]:
    """Return a function that runs a model once, and returns the seconds of a prompt or call, and of a further token."""
    graphs = session.graphs
    generates = bool(graphs[-1].pasts)
    point = Point(batch, length, int(generates), "none")
    feeds: Arrays = make_feeds(graphs, point, _SEED, 0, other=length)
    if not generates:
        return lambda: (_timed(lambda: _run(session, feeds)), None)
    names = {tensor.name for tensor in graphs[-1].past_tensors()}
    ids = feeds[decoder_inputs(graphs[-1])[0]][:, :length]
    source: Mapping[str, Array] = {name: value for name, value in feeds.items() if name not in names}
    positions = session.option("max_seq_len")
    count = _NEW if positions is None else min(_NEW, positions - length)

    def generate() -> tuple[float, float]:
        with session.stepper(source, rows=batch) as stepper:
            prompt = _timed(lambda: stepper.step(ids))
            following = np.ascontiguousarray(ids[:, -1:])
            return prompt, _timed(lambda: [stepper.step(following) for _ in range(count)]) / count

    return generate


def _run(session: Session, feeds: Arrays) -> None:
    values = dict(feeds)
    for graph in session.graphs:
        values |= session.execute(graph, {tensor.name: values[tensor.name] for tensor in graph.input_tensors()})


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
