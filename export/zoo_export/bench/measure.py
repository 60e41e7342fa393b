"""Benchmark of one model: interleaved timing of backends, whose outputs are compared first, and of limits."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.errors import ParityError
from zoo.exporters import Progress
from zoo.probe.pipeline import Arrays
from zoo_export.bench.cases import Backend, BenchCase, Call, CompileError, OnnxBackend, feeds_of, make_cases
from zoo_export.bench.limits import Count, Limits, closed_form
from zoo_export.parity.evidence import versions
from zoo_runtime import Session, load_session
from zoo_runtime.generation.memory import past_bytes
from zoo_runtime.onnx_runtime.providers import Provider

__all__ = ["Times", "bench_model", "check_outputs", "cpu_name", "in_turns", "thread_times"]

_ROUNDS, _LEAST_ROUNDS = 10, 3
"""Rounds of measurement, and the minimum for slow calls."""
_PAUSE = 0.01
"""Pause before each turn in seconds, for the previous backend's threads to stop spinning."""
_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1, "int8": 0.3, "int4": 0.6}
"""Tolerance per precision: root mean square of the difference from torch, relative to torch's outputs."""
_CACHE_TOLERANCE = 0.1
"""Tolerance at least, if keys and values are stored as int8."""


def bench_model(
    directory: Path | str,
    *,
    provider: Provider = "cpu",
    dtype: str | None = None,
    variant: str | None = None,
    threads: int | None = None,
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] | None = None,
    seconds: float = 2.0,
    torch: bool = True,
    compiled: bool = True,
    unverified: bool = False,
    progress: Progress | None = None,
    describe: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure an exported model.

    Args:
        directory: a model directory with an export.
        provider: ``cpu`` or ``cuda``. Torch runs there too, in the model's own dtype.
        dtype: which export, see :func:`zoo_runtime.load_session`.
        variant: which export, see :func:`zoo_runtime.load_session`.
        threads: number of threads for the session, torch and the limits; each has its own default.
        batches: batch sizes, B.
        lengths: lengths in tokens, N. By default 128, or the model's maximum if smaller.
        seconds: approximate time to spend on each call.
        torch: also measure torch, and compare outputs with it. If false, torch is not imported.
        compiled: also measure ``torch.compile``. If it fails, ``left_out`` has the reason.
        unverified: allow exports that are not verified.
        progress: called before each case with its number and the total.
        describe: called with what is prepared or measured next.

    Returns:
        Plain data. Times are in seconds. ``waited`` is the fraction of time that threads waited for a free core, None
        if the system does not report it. ``of_limit`` is the minimum possible time divided by the median, None if
        unknown: without torch, for prompts and inputs of models with several graphs.

    Raises:
        UsageError: there is no such export, or a length exceeds the model's positions.
        ParityError: the outputs of a backend differ from torch's.
    """
    with ExitStack() as stack:
        session = stack.enter_context(
            load_session(
                directory, provider=provider, dtype=dtype, variant=variant, threads=threads, unverified=unverified
            )
        )
        cases = make_cases(session, batches, lengths)
        backends: dict[str, Backend] = {"onnxruntime": OnnxBackend(session)}
        left_out: dict[str, str] = {}
        count: Count = closed_form
        if torch:
            from zoo_export.bench.torch_backend import TorchBackend, count_flops, device_problem, limited_threads

            stack.enter_context(limited_threads(threads))
            count = count_flops
            problem = device_problem(provider)
            if problem is None:
                eager = TorchBackend(session.stored, provider)
                backends |= {"torch": eager, **({"torch.compile": eager.compiled} if compiled else {})}
            else:
                left_out["torch"] = problem
        results = []
        for number, case in enumerate(cases, 1):
            if progress is not None:
                progress(number, len(cases))
            feeds = feeds_of(session, case)
            calls = _prepare(session, case, feeds, backends, left_out, describe)
            describe(f"{case}: timing {', '.join(calls)}")
            results.append(_measure(session, case, feeds, calls, count, seconds))
    return {
        "model": session.stored.spec.name,
        "variant": session.export.variant,
        "dtype": session.stored.dtype,
        "provider": provider,
        "threads": threads,
        "cpu": cpu_name(),
        "seconds": seconds,
        "versions": versions(),
        "left_out": left_out,
        "cases": results,
    }


def _prepare(
    session: Session,
    case: BenchCase,
    feeds: Arrays,
    backends: dict[str, Backend],
    left_out: dict[str, str],
    describe: Callable[[str], None],
) -> dict[str, Call]:
    """Prepare a case on all backends and compare outputs. Backends that fail to compile move to ``left_out``."""
    calls: dict[str, Call] = {}
    for name, prepare in list(backends.items()):
        describe(f"{case}: preparing {name}")
        try:
            calls[name] = prepare(case, feeds)
        except CompileError as error:
            left_out[name] = f"{case}: {error}"
            del backends[name]
    describe(f"{case}: comparing outputs")
    outputs = {name: [np.array(value, np.float64) for value in call()] for name, call in calls.items()}
    variant, own = session.export.variant, _TOLERANCE[session.stored.dtype]
    tolerance = _TOLERANCE.get(variant, own)
    if session.export.traits.interface == "int8 cache":
        tolerance = max(_CACHE_TOLERANCE, _TOLERANCE.get(session.export.traits.base or "", own))
    for name in outputs.keys() - {"torch"} if "torch" in outputs else ():
        check_outputs(f"{name}, {case}", outputs[name], outputs["torch"], tolerance)
    return calls


def check_outputs(where: str, outputs: Sequence[Array], expected: Sequence[Array], tolerance: float) -> None:
    """Raise :class:`ParityError` unless arrays are close to the expected ones: timing wrong results is pointless."""
    for number, (one, other) in enumerate(zip(outputs, expected, strict=True)):
        same = one.shape == other.shape
        error = np.sqrt(np.mean((one - other) ** 2) / max(np.mean(other**2), 1e-30)) if same else np.inf
        if not error <= tolerance:
            raise ParityError(
                f"output {number} differs from torch's (relative error {error:.2g})", where, "try zoo verify"
            )


def _measure(
    session: Session, case: BenchCase, feeds: Arrays, calls: Mapping[str, Call], count: Count, seconds: float
) -> dict[str, Any]:
    """Time the calls of a case and its limits in interleaved rounds."""
    limits = Limits(session, case, feeds, count)
    before = thread_times()
    times = in_turns({**calls, **limits.calls}, seconds)
    waited = waited_since(before)
    limit = limits.describe({name: times.pop(name).best for name in limits.calls})
    return {
        "graph": case.graph.name,
        "phase": case.phase,
        "batch": case.batch,
        "length": case.length,
        "past_bytes": case.batch * past_bytes(case.graph, session.dtype, case.past) if case.past else None,
        "waited": waited,
        "limit": limit,
        "backends": {
            name: {
                "seconds": taken.median,
                "best_seconds": taken.best,
                "turns": len(taken.turns),
                "tokens_per_second": case.batch * case.new / taken.median,
                "rows_per_second": case.batch / taken.median,
                "times_torch": times["torch"].median / taken.median if "torch" in times else None,
                "times_torch_best": times["torch"].best / taken.best if "torch" in times else None,
                "of_limit": limit["seconds"] / taken.median if limit["bound"] else None,
            }
            for name, taken in times.items()
        },
    }


@dataclass(frozen=True, slots=True)
class Times:
    """Mean duration of a call, in seconds, per turn."""

    turns: Sequence[float]

    @property
    def median(self) -> float:
        """Median over the turns."""
        return statistics.median(self.turns)

    @property
    def best(self) -> float:
        """Minimum over the turns."""
        return min(self.turns)


def in_turns(calls: Mapping[str, Call], seconds: float) -> dict[str, Times]:
    """Time calls in ten rounds, for a tenth of ``seconds`` each per round. Slow calls get fewer rounds.

    Short calls are repeated within a turn, so that CPU caches are as warm as in production.
    """
    turns: dict[str, list[float]] = {name: [] for name in calls}
    spent = 0.0
    for number in range(_ROUNDS):
        if number >= _LEAST_ROUNDS and spent > 2 * seconds * len(calls):
            break
        for name, call in calls.items():
            time.sleep(_PAUSE)
            started, count, taken = time.perf_counter(), 0, 0.0
            while count == 0 or taken < seconds / _ROUNDS:
                call()
                count, taken = count + 1, time.perf_counter() - started
            turns[name].append(taken / count)
            spent += taken
    return {name: Times(values) for name, values in turns.items()}


def thread_times() -> tuple[float, float]:
    """Return the seconds that this process's threads ran and waited for a core; zeros if the system does not report."""
    ran, waited = 0, 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread may end while being read
            numbers = path.read_text(encoding="ascii").split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran / 1e9, waited / 1e9


def waited_since(before: tuple[float, float]) -> float | None:
    """Return the fraction of time that threads waited for a core since an earlier :func:`thread_times`, if known."""
    ran, waited = (now - then for now, then in zip(thread_times(), before, strict=True))
    return waited / (ran + waited) if ran else None


def cpu_name() -> str | None:
    """Return the name of the processor, or None if unknown."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
