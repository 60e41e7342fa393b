"""The decision of what is beyond its limit: PyTorch, or the graph, with other rounding may raise the limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Executor
from zoo_export.parity.ahead import Results
from zoo_export.parity.evaluation import Evaluator
from zoo_export.parity.reference import SEED
from zoo_export.parity.rule import Findings, Judges

__all__ = ["Settling"]


class Settling:
    """Settles doubtful results of a subject.

    Args:
        evaluator: runs the subject.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.subject = evaluator.subject

    def by_rounding(
        self,
        findings: Findings,
        judges: Judges,
        levels: Collection[str],
        exact: Results,
        feeds: Feeds,
        point: Point,
        *,
        bits: int = 1,
    ) -> None:
        """Where something is beyond its limit, run PyTorch with different rounding, which may raise the limit."""
        doubtful = findings.doubtful(judges, levels)
        generator = np.random.default_rng(SEED)
        for other in self.subject.nudged(bits) if doubtful else ():
            nudged = self._nudged(feeds, bits, generator)
            results = exact, self.evaluator.run_one(other, nudged, point)
            findings.allow(doubtful, judges, results, feeds, point, bits=bits)

    def _nudged(self, feeds: Feeds, bits: int, generator: np.random.Generator) -> Feeds:
        """Return inputs of which the floating-point ones are changed in their last bits."""
        size = (2**bits - 1) * self.subject.models.epsilon
        return {
            name: values * (1 + generator.uniform(-size, size, values.shape)) if values.dtype.kind == "f" else values
            for name, values in feeds.items()
        }

    def by_constants(
        self,
        findings: Findings,
        judges: Judges,
        runtimes: Mapping[str, Executor],
        exact: Results,
        feeds: Feeds,
        point: Point,
    ) -> None:
        """Where something is beyond its limit, add how far the rounding of the graphs' constants moves the outputs."""
        for level, runtime in runtimes.items():
            doubtful = findings.doubtful(judges, {level})
            first = None
            for executor in self.subject.moved() if doubtful else ():
                first = first or self.evaluator.run_one(runtime, feeds, point)
                other = self.evaluator.run_one(executor, feeds, point)
                shifted = {
                    graph: {
                        name: values + (other[graph][name] - first[graph][name]) for name, values in outputs.items()
                    }
                    for graph, outputs in exact.items()
                }
                findings.allow(doubtful, judges, (exact, shifted), feeds, point, bits=0)
