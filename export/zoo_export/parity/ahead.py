"""Results of graphs whose sessions are closed before PyTorch runs.

ONNX Runtime repacks weights for its kernels, and PyTorch maps the file: together they take twice the memory of the
weights. Sessions with weights of their own therefore run first and are closed. They run at as many points as a small
amount of memory has room for results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zoo.probe.inputs import Point
from zoo.probe.pipeline import Arrays, Executor
from zoo.system import release_memory
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["Ahead", "Results", "Sessions", "size_of"]

Results = Mapping[str, Arrays]
"""The outputs of each graph. Of large ones, only the kept positions."""
_BYTES = 2**26
"""Bytes of results from which no further point is run ahead."""


class Sessions(Mapping[str, ort.InferenceSession]):
    """Sessions by graph name, which can be closed. They are opened again when one is used.

    Args:
        open_all: opens them.
        apart: whether they hold weights that no one else reads, so that closing them frees memory.
    """

    def __init__(self, open_all: Callable[[], dict[str, ort.InferenceSession]], *, apart: bool) -> None:
        self._open_all, self.apart = open_all, apart
        self._opened = open_all()
        self._names = tuple(self._opened)

    def __getitem__(self, name: str) -> ort.InferenceSession:
        if not self._opened:
            self._opened = self._open_all()
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def close(self) -> None:
        """Close all sessions, if they have weights of their own."""
        if self.apart:
            self._opened = {}


class Ahead:
    """Results of the executors that have sessions of their own weights (:class:`Sessions`), by level and point."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, Point], Results] = {}

    def run(
        self,
        runtimes: Mapping[str, Executor],
        points: Sequence[Point],
        run: Callable[[Executor, Point], Results],
    ) -> int:
        """Run executors of apart sessions at the first points, in order. Returns the number of points, at least one.

        An error ends it: the point is run again when it is compared, and fails there, unless PyTorch fails first.
        """
        apart = self.apart(runtimes)
        if not apart:
            return len(points)
        held = 0
        for number, point in enumerate(points):
            try:
                for level, runtime in apart.items():
                    if (level, point) not in self._results:
                        self._results[level, point] = run(runtime, point)
                    held += size_of(self._results[level, point])
            except Exception:  # any: the comparison at this point reports it
                return number or 1
            if held > _BYTES:
                return number + 1
        return len(points)

    @staticmethod
    def apart(runtimes: Mapping[str, Executor]) -> dict[str, Executor]:
        """Return the executors whose sessions have weights of their own."""
        return {level: runtime for level, runtime in runtimes.items() if _sessions(runtime) is not None}

    def take(self, level: str, point: Point) -> Results | None:
        """Return the results at a point, once, or None if there are none."""
        return self._results.pop((level, point), None)

    @staticmethod
    def close(runtimes: Mapping[str, Executor]) -> None:
        """Close the sessions that have weights of their own, and return their memory to the system."""
        apart = [sessions for runtime in runtimes.values() if (sessions := _sessions(runtime)) is not None]
        for sessions in apart:
            sessions.close()
        if apart:
            release_memory()


def _sessions(runtime: Executor) -> Sessions | None:
    """Return the sessions of an executor, if they are apart."""
    sessions: Any = getattr(runtime, "sessions", None)
    return sessions if isinstance(sessions, Sessions) and sessions.apart else None


def size_of(results: Results) -> int:
    """Return the bytes of all outputs."""
    return sum(values.nbytes for outputs in results.values() for values in outputs.values())
