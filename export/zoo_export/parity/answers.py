"""Comparison of the answers of tasks: graphs may equal the model, and their task still misread the outputs.

Each task that declares a formula (:mod:`zoo_runtime.formula`) is run on its samples by the code of ``zoo run``, once on
the exported graphs and once on the module in its own dtype. Both answers must equal those of the formula on the module
in float64, by the rule for outputs: twice the error of the formula on the module in its own dtype, plus a few units in
the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zoo import plugins
from zoo.arrays import Array
from zoo.contract import Graph, Task
from zoo.errors import IncomparableError, UnreadableError, UsageError, ZooError
from zoo.plugins import Plugin
from zoo.probe.dtypes import epsilon
from zoo.probe.errors import allowed_error
from zoo.probe.pipeline import Arrays, Executor
from zoo.registry import load_reference
from zoo.system import release_memory
from zoo_export.opened import ExecutorSession, execute
from zoo_export.parity.subject import Subject
from zoo_runtime.formula import Choice, Formula, Numbers, Same
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session

__all__ = ["Answers", "Questions"]

_KEPT = 2**25
"""Bytes of outputs that are kept for tasks that read the same inputs."""


@dataclass
class Answers:
    """The outcome: evidence by task, and one line per failure."""

    evidence: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Questions:
    """The answers of the model's tasks on the graphs, to be compared with those of the model.

    Args:
        subject: the graphs and their model, not perturbed.
        runtimes: executors of the graphs, by level. The last whose yardstick is the module itself is asked.
    """

    def __init__(self, subject: Subject, runtimes: Mapping[str, Executor]) -> None:
        self.subject, self._known = subject, _Known()
        self.level = [level for level in runtimes if subject.yardstick(level) is subject.models.yardstick][-1]
        self._asked = [(task, self._ask(runtimes, plugin, task)) for plugin, task in _tasks(subject.stored.spec.task)]

    def _ask(self, runtimes: Mapping[str, Executor], plugin: Plugin, task: Task) -> _Comparison | ZooError:
        try:
            return _Comparison(self.subject, runtimes[self.level], plugin, task, self._known)
        except ZooError as error:
            return error
        except MemoryError as error:
            return IncomparableError(f"too little memory for the task {task.name} ({error})", self.subject.stored.path)

    def compare(self) -> Answers:
        """Compare the answers with those of the module and of the formulas. To be called once."""
        answers, declared = Answers(), self.subject.stored.spec.task
        for task, asked in self._asked:
            try:
                if isinstance(asked, ZooError):
                    raise asked
                asked.compare()
                answers.evidence[task.name] = asked.evidence()
                label = self.subject.labels[self.level]
                answers.failures += [f"task {task.name}, {label}: {line}" for line in asked.failures]
            except UnreadableError:
                raise
            except UsageError as reason:  # as zoo run would refuse
                answers.evidence[task.name] = _not_compared(str(reason))
            except ZooError as error:
                answers.evidence[task.name] = _not_compared(str(error))
                answers.failures.append(f"task {task.name} fails ({error})")
        self._asked = []
        self._known.clear()
        release_memory()
        if declared not in answers.evidence:
            answers.evidence[declared] = _not_compared("no task of this name declares a formula")
        return answers


def _not_compared(reason: str) -> dict[str, Any]:
    return {"compared": False, "reason": reason}


def _tasks(declared: str) -> Iterator[tuple[Plugin, Task]]:
    """Yield the tasks for models of a declared task that have a formula."""
    for plugin in plugins.active().loaded():
        for task in plugin.tasks:
            if task.formula is not None and task.can_serve(declared):
                yield plugin, task


class _Known:
    """Outputs of the models on the stored weights, by model and inputs: tasks read the same few short inputs.

    The oldest are forgotten, so that the logits of a large vocabulary do not add up.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[object, ...], Arrays] = {}
        self._bytes = 0

    def find(self, key: tuple[object, ...], compute: Callable[[], Arrays]) -> Arrays:
        """Return the outputs of a call, computed only if they are not known."""
        if key in self._outputs:
            return self._outputs[key]
        outputs = self._outputs[key] = compute()
        self._bytes += _size(outputs)
        while self._bytes > _KEPT and len(self._outputs) > 1:
            self._bytes -= _size(self._outputs.pop(next(iter(self._outputs))))
        return outputs

    def clear(self) -> None:
        """Forget all."""
        self._outputs.clear()
        self._bytes = 0


def _size(outputs: Arrays) -> int:
    return sum(value.nbytes for value in outputs.values())


class _WholePass:
    """The outputs of all graphs, in one pass without a cache, as float64. Those in ``seen`` are not computed again.

    The past after the pass is left out.
    """

    def __init__(self, executor: Executor, graphs: Sequence[Graph], seen: _Known) -> None:
        self._executor, self._graphs, self._seen = executor, graphs, seen

    def __call__(self, feeds: Mapping[str, Array]) -> Arrays:
        inputs = ((name, value.shape, value.dtype, value.tobytes()) for name, value in sorted(feeds.items()))
        key = (self._executor, *inputs)
        return {name: value.copy() for name, value in self._seen.find(key, partial(self._compute, feeds)).items()}

    def _compute(self, feeds: Mapping[str, Array]) -> Arrays:
        tensors, outputs = dict(feeds), Arrays()
        for graph in self._graphs:
            names = {tensor.name for tensor in graph.input_tensors()} - {tensor.name for tensor in graph.past_tensors()}
            if names <= tensors.keys():
                outputs |= execute(self._executor, graph, {name: tensors[name] for name in names})
                tensors |= outputs
        past = {tensor.name for graph in self._graphs for tensor in graph.present_tensors()}
        return {name: np.asarray(value, np.float64) for name, value in outputs.items() if name not in past}


@dataclass
class _AnswerErrors:
    """The errors of one part of the answers, over all samples."""

    graphs: float = 0.0
    """Largest error of the task on the graphs."""
    module: float = 0.0
    """Largest error of the task on the module in its own dtype."""
    torch: float = 0.0
    """Largest error of the formula on the module in its own dtype."""
    scale: float = 0.0
    worst: Any = None

    def limit(self, ulp: float) -> float:
        return allowed_error(self.torch, self.scale, ulp)

    def passed(self, ulp: float) -> bool:
        return max(self.graphs, self.module) <= self.limit(ulp) < np.inf


class _Comparison:
    """One task on its samples, answered on the graphs."""

    def __init__(self, subject: Subject, runtime: Executor, plugin: Plugin, task: Task, known: _Known) -> None:
        self.subject, self.plugin, self.task, self.known = subject, plugin, task, known
        self.ulp = max(epsilon(subject.models.yardstick.dtype), epsilon(np.dtype(np.float32)))  # answers are float32
        self.parts: dict[str, _AnswerErrors] = {}
        assert task.formula is not None
        self.formula: Formula = load_reference(task.formula, plugin)
        self.runner = self._runner(runtime)
        self._samples: list[Any] = []
        for value in self.runner.samples():
            answer = Answer(len(self._samples) + 1, value)
            if self.runner.read_all([answer]):
                self._samples.append(value)
        self.answers = self._answers(self.runner, self._samples)
        self.on_module = False
        self.cases: list[tuple[Any, Answer, Answer]] = []
        self.failures: list[str] = []

    def compare(self) -> None:
        """Compare the answers with those on the module, and with the formula."""
        try:
            module_answers = self._answers(self._runner(self.subject.models.yardstick), self._samples)
        except UsageError:  # generation
            module_answers = self.answers
        self.on_module = module_answers is not self.answers
        self.cases = [
            (self.runner.read(mine.input, mine.number), mine, other)
            for mine, other in zip(self.answers, module_answers, strict=True)
            if mine.error is None and other.error is None
        ]
        self.failures = [
            f"{mine.error or other.error}"
            for mine, other in zip(self.answers, module_answers, strict=True)
            if (mine.error is None) != (other.error is None) or (mine.error is not None and not self.on_module)
        ]  # an input that both refuse is left out
        self._compare()

    def _runner(self, executor: Executor) -> Runner[Any]:
        with plugins.blame(self.plugin, f"cannot prepare the task {self.task.name}"):
            cls: type[Runner[Any]] = load_reference(self.task.run, self.plugin)
            runner = cls(
                ExecutorSession(self.subject.stored, self.subject.graphs, executor),
                cls.options.from_dict(cls.sample_options),
            )
        runner.plugin = self.plugin
        return runner

    def _answers(self, runner: Runner[Any], samples: Sequence[Any]) -> list[Answer]:
        session = runner.session
        assert isinstance(session, Session)
        answers = list(session.answer(runner, (Answer(number, value) for number, value in enumerate(samples, 1))))
        for answer in answers:
            if isinstance(answer.error, UnreadableError):
                raise answer.error
        return answers

    def _compare(self) -> None:
        exact = []
        for item, mine, other in self.cases:
            expected = self._expected(item, mine, self.subject.models.reference)
            same = expected if other is mine else self._expected(item, other, self.subject.models.reference)
            exact.append((expected, same))
        for (_, mine, _), (expected, wanted_too) in zip(self.cases, exact, strict=True):
            for name, value in expected.items():
                part = self.parts.setdefault(name, _AnswerErrors())
                error = _error(value)
                if not error <= part.graphs:
                    part.graphs, part.worst = error, mine.input
                part.module = max(part.module, _error(wanted_too[name]))
                sizes = np.abs(_values(value))
                part.scale = max(part.scale, float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)))
        self._allow(self.subject.models.yardstick, exact)
        if not all(part.passed(self.ulp) for part in self.parts.values()):
            for executor in self.subject.nudged():
                self._allow(executor, exact)
        for name, part in self.parts.items():
            if not part.passed(self.ulp):
                limit = part.limit(self.ulp)
                problem = f"{name} is off by {max(part.graphs, part.module):.3g}, allowed {limit:.3g}"
                self.failures.append(f"{problem}, at {part.worst!r:.60}")

    def _allow(self, executor: Executor, exact: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Raise the limits by the errors of the formula on a module that rounds differently."""
        for (item, mine, _), (wanted, _) in zip(self.cases, exact, strict=True):
            for name, value in self._expected(item, mine, executor).items():
                error = float(np.max(_distances(_values(value), _values(wanted[name])), initial=0.0))
                self.parts[name].torch = error if np.isnan(error) else max(self.parts[name].torch, error)

    def _expected(self, item: Any, answer: Answer, executor: Executor) -> Mapping[str, Numbers | Choice | Same]:
        models = self.subject.models
        # Others have nudged weights, whose outputs are needed only here.
        seen = self.known if executor in (models.reference, models.yardstick) else _Known()
        with plugins.blame(self.plugin, f"cannot evaluate {self.task.formula}"):
            return self.formula(self.runner, item, answer.result, _WholePass(executor, self.subject.graphs, seen))

    def evidence(self) -> dict[str, Any]:
        if not self.cases and not self.failures:
            return _not_compared("no sample fits the model")
        return {
            "compared": True,
            "inputs": len(self.cases),
            "on_the_module": self.on_module,
            "answers": {
                name: {
                    "passed": part.passed(self.ulp),
                    "max_abs_error": part.graphs,
                    "module_max_abs_error": part.module,
                    "torch_max_abs_error": part.torch,
                    "limit": part.limit(self.ulp),
                }
                for name, part in self.parts.items()
            },
        }


def _values(value: Numbers | Choice | Same) -> Array:
    """Return the numbers that the formula computed."""
    if isinstance(value, Same):
        return np.zeros(0)
    return np.asarray(value.scores if isinstance(value, Choice) else value.expected, np.float64)


def _distances(numbers: Array, expected: Array) -> Array:
    """Return the absolute differences of numbers, 0 where both are infinite with the same sign."""
    result: Array = np.abs(np.subtract(numbers, expected, where=numbers != expected, out=np.zeros(np.shape(expected))))
    return result


def _error(value: Numbers | Choice | Same) -> float:
    """Return the distance of a part of a result from what it should be; infinite if the two cannot be compared.

    Two scores that are each off by the allowed error may change places, so the error of a choice is half the difference
    of the scores.
    """
    if isinstance(value, Same):
        return 0.0 if value.found == value.expected else np.inf
    expected = _values(value)
    if isinstance(value, Choice):
        if np.shape(value.chosen) != expected.shape[:-1] or np.asarray(value.chosen).dtype.kind != "i":
            return np.inf
        taken = np.take_along_axis(expected, np.asarray(value.chosen)[..., None], -1)[..., 0]
        error = (expected.max(-1) - taken) / 2
    else:
        try:
            numbers = np.asarray(value.found, np.float64)
        except (TypeError, ValueError):
            return np.inf
        if numbers.shape != expected.shape:
            return np.inf
        error = _distances(numbers, expected)
    highest = float(np.max(error, initial=0.0))
    return highest if np.isfinite(highest) else np.inf
