"""The comparison of graphs with PyTorch at one point: of usual inputs, of other magnitudes, and not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zoo.errors import IncomparableError, ParityError
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Executor
from zoo.system import release_memory
from zoo_export.parity.ahead import Results, size_of
from zoo_export.parity.evaluation import Allowed, Evaluator
from zoo_export.parity.magnitudes import Magnitude
from zoo_export.parity.nonfinite import Agreed, Asking, NonFinite, masks, other_kind, without
from zoo_export.parity.recording import Recording
from zoo_export.parity.rule import WIDE, Findings
from zoo_export.parity.running import running
from zoo_export.parity.settle import Settling

__all__ = ["Judging"]

_FRAGMENTS = 2**22
"""Bytes of outputs from which freed memory is returned to the system between two points."""


class Judging:
    """Judges the results of executors at one point by those of PyTorch.

    Args:
        evaluator: runs the subject.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.subject = evaluator.subject
        self._settling = Settling(evaluator)

    def new_findings(self) -> Findings:
        """Return findings without any comparison."""
        subject = self.subject
        return Findings(
            subject.graphs,
            subject.labels,
            {level: subject.epsilon(level) for level in subject.labels},
            subject.coarse,
            discontinuous=bool(subject.stored.spec.architecture.discontinuous),
        )

    def compare(
        self,
        findings: Findings,
        point: Point,
        runtimes: Mapping[str, Executor],
        recording: Recording | None = None,
    ) -> None:
        """Compare executors, by level, at one point, and add the errors to findings, and the outputs to a recording.

        The graphs are first, because their sessions need most memory, and the yardstick last, because its outputs are
        smaller than those of the reference. An error of PyTorch is reported all the same: it is the model's.
        """
        feeds = self.evaluator.feeds(point)
        where = self.subject.stored.path
        failure = None
        try:
            results = self.evaluator.run(runtimes, feeds, point)
        except ParityError as error:
            failure = error
        with running(f"at {point}", where):
            exact = self.evaluator.run_reference(feeds, point)
            allowed = self.evaluator.run_yardsticks(runtimes, feeds, point)
        if failure is not None:
            raise failure
        self._judge(findings, point, runtimes, feeds, results, exact, allowed)
        if recording is not None:
            recording.add(findings, exact, feeds, point)

    def compare_magnitude(self, magnitude: Magnitude, point: Point, runtimes: Mapping[str, Executor]) -> None:
        """Compare floating-point inputs of another magnitude, at the levels at which PyTorch itself is accurate."""
        feeds = self.evaluator.feeds(point)
        try:
            exact = self.evaluator.run_reference(feeds, point)
            allowed = self.evaluator.run_yardsticks(runtimes, feeds, point)
        except Exception as error:  # a model may raise any at numbers that it does not expect
            magnitude.left_out |= dict.fromkeys(runtimes, f"PyTorch fails ({error})")
            return
        magnitude.left_out |= self._unstable(feeds, exact, allowed, point)
        stable = {level: runtimes[level] for level in runtimes if level not in magnitude.left_out}
        self._judge(magnitude.findings, point, stable, feeds, self.evaluator.run(stable, feeds, point), exact, allowed)

    def compare_non_finite(self, point: Point, runtimes: Mapping[str, Executor]) -> NonFinite:
        """Compare inputs that are NaN or infinite."""
        result = self._non_finite(point, runtimes)
        self.evaluator.agreed = None
        return result

    def _non_finite(self, point: Point, runtimes: Mapping[str, Executor]) -> NonFinite:
        feeds = self.evaluator.feeds(point)
        finite = replace(point, values="finite")
        findings = self.new_findings()
        reference = self.subject.models.reference
        try:
            with Asking() as usual:
                self.evaluator.run_one(reference, self.evaluator.feeds(finite), finite)
            with Asking() as asking:
                exact = self.evaluator.run_one(reference, feeds, point)
            allowed = self.evaluator.run_yardsticks(runtimes, feeds, point)
        except Exception as error:  # a model may raise any at numbers that it does not expect
            return NonFinite(f"PyTorch fails ({error})")
        is_expected = asking.count > usual.count
        agreed = masks(exact, {level: outputs for levels, outputs in allowed for level in levels})
        judged = without(exact, agreed)
        allowed_judged = [(levels, without(outputs, agreed)) for levels, outputs in allowed]
        if unstable := self._unstable(feeds, judged, allowed_judged, point):
            return NonFinite(next(iter(unstable.values())))
        try:
            results = self.evaluator.run(runtimes, feeds, point)
            if difference := self._other_kind(exact, results, agreed, finite=True):
                return NonFinite(f"{difference}, at {point}", is_expected)
            self.evaluator.agreed = agreed  # from here on, results have no others
            rest = {level: without(outputs, agreed) for level, outputs in results.items()}
            self._judge(findings, point, runtimes, feeds, rest, judged, allowed_judged)
        except IncomparableError:
            raise
        except ParityError as error:
            return NonFinite(str(error), is_expected)
        if failures := findings.failures():
            return NonFinite(failures[0], is_expected)
        difference = self._other_kind(exact, results, agreed, finite=False)
        return NonFinite(difference and f"{difference}, at {point}")

    def _other_kind(
        self, exact: Results, results: Mapping[str, Results], agreed: Agreed, *, finite: bool
    ) -> str | None:
        """Describe the first difference of kind, with its level, or return None."""
        for level, outputs in results.items():
            if (difference := other_kind(exact, outputs, agreed, finite=finite)) is not None:
                return f"{difference}, {self.subject.labels[level]}"
        return None

    def _unstable(self, feeds: Feeds, exact: Results, allowed: Iterable[Allowed], point: Point) -> dict[str, str]:
        """Return the levels at which PyTorch itself breaks the rule, and how."""
        findings = self.new_findings()
        for levels, outputs in allowed:
            for level in levels:
                findings.add_torch(level, exact, outputs, feeds, point)
                findings.add(level, exact, outputs, feeds, point)
        return {
            level: f"{name} of {graph} {failure}"
            for (level, graph, name), errors in findings.errors.items()
            if (failure := errors.failure())
        }

    def _judge(
        self,
        findings: Findings,
        point: Point,
        runtimes: Mapping[str, Executor],
        feeds: Feeds,
        results: Mapping[str, Results],
        exact: Results,
        allowed: Iterable[Allowed],
    ) -> None:
        """Compare the results of executors, by level, with those of PyTorch at one point, and add the errors."""
        with running(f"at {point}", self.subject.stored.path):
            torch = {level: outputs for levels, outputs in allowed for level in levels if level in runtimes}
            for level, outputs in torch.items():
                findings.add_torch(level, exact, outputs, feeds, point)
            for level, outputs in results.items():
                findings.add(level, exact, outputs, feeds, point)
            self._settling.by_rounding(findings, findings.errors, runtimes, exact, feeds, point)
            self._settling.by_constants(findings, findings.errors, runtimes, exact, feeds, point)
            self._settling.by_rounding(findings, findings.jumping(), runtimes, exact, feeds, point, bits=WIDE)
            for level, outputs in results.items():
                findings.add_distributions(level, exact, torch[level], outputs, feeds, point)
            self._settling.by_rounding(findings, findings.distributions, runtimes, exact, feeds, point)
            self._settling.by_constants(findings, findings.distributions, runtimes, exact, feeds, point)
        if size_of(exact) > _FRAGMENTS:
            release_memory()
