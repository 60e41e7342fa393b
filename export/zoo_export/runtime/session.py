"""An exported model, open: what people call from Python, and what ``zoo run`` calls."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args
from weakref import WeakSet

import numpy as np
import onnxruntime as ort

from zoo import plugins
from zoo.artifact import ATTENTIONS, LOOP, PRECISIONS, PROFILES, TOKENIZER, Export, ModelDirectory
from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import ArtifactError, PluginError, UsageError, ZooError, nearest
from zoo.plugins import Plugin, ZooWarning
from zoo.registry import load_reference
from zoo_export.grid import empty_past
from zoo_export.pipeline import Arrays, OnnxExecutor
from zoo_export.runtime.batching import batches
from zoo_export.runtime.runner import Answer, Pair, Runner
from zoo_export.session import (
    PROVIDERS,
    Memory,
    Provider,
    check_dtype,
    loading_problem,
    open_session,
    placement,
    unexpected_cpu_nodes,
)
from zoo_export.values import BFLOAT16, numpy_dtype

__all__ = ["Session", "load_session"]

_WINDOW = 1024
"""Inputs that are sorted by length together, and held in memory."""


def load_session(
    directory: Path | str,
    *,
    provider: Provider | Literal["auto"] = "cpu",
    dtype: str | None = None,
    variant: str | None = None,
    threads: int | None = None,
    memory: Memory = "fast",
    tokenizer: Path | str | None = None,
    unverified: bool = False,
) -> Session:
    """Open an exported model.

    Args:
        directory: a model directory with an export.
        provider: ``cpu``; ``cuda``; or ``auto``, which takes CUDA where it loads and says on stderr what it took.
        dtype: ``fp32``, ``fp16``, ``bf16``, ``int8`` or ``int4``; the model's own by default.
        variant: which export, by name. By default the one rewritten for the provider where it is there and verified,
            else the portable one.
        threads: for one operator; as many as there are cores by default.
        memory: ``fast``, or ``mapped``: see :func:`zoo_export.open_session`.
        tokenizer: a tokenizer file to use instead of the model's own.
        unverified: run an export that was never shown equal to the model with these weights.

    Raises:
        UsageError: there is no such dtype or variant, or the provider does not load or does not compute in that dtype.
            It is never replaced by another.
        ArtifactError: the model is not exported, or has been altered.
        ParityError: the export is not verified.
    """
    stored = ModelDirectory.open(directory)
    if provider == "auto":
        provider = _choose_provider()
    elif provider not in PROVIDERS:
        raise UsageError(f"unknown provider {provider!r}", None, nearest(provider, [*PROVIDERS, "auto"]))
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    if memory not in get_args(Memory):
        raise UsageError(f"unknown memory {memory!r}", None, nearest(memory, get_args(Memory)))
    export = _choose_export(stored, provider, dtype, variant)
    export.check()
    check_dtype(export.dtype, provider, directory)
    if not unverified:
        export.check_verified()
    session = Session(stored, export, provider, threads, memory, Path(tokenizer) if tokenizer else None)
    compared = export.evidence.get("provider")
    if not unverified and compared not in (None, provider):
        remedy = f"zoo verify {directory} --provider {provider} compares it there"
        warnings.warn(f"verified on {compared}, runs on {provider}: {directory}: {remedy}", ZooWarning, stacklevel=2)
    if provider == "cuda":
        _report_cpu_nodes(session)
    return session


def _report_cpu_nodes(session: Session) -> None:
    """Name what is computed on the CPU all the same."""
    for name, opened in session.sessions.items():
        path = session.path / session.export.graph_files[name]
        found = Counter(node.operator for node in unexpected_cpu_nodes(opened, path.read_bytes()))
        if found:
            operators = ", ".join(f"{count} x {operator}" for operator, count in sorted(found.items()))
            warnings.warn(f"runs partly on the CPU ({operators}): {path}", ZooWarning, stacklevel=3)


def _choose_provider() -> Provider:
    problem = loading_problem("cuda")
    line = f"provider: cpu ({problem})" if problem else "provider: cuda, which loads"
    print(line, file=sys.stderr, flush=True)
    return "cpu" if problem else "cuda"


def _choose_export(stored: ModelDirectory, provider: Provider, dtype: str | None, variant: str | None) -> Export:
    """The export that is asked for, or the best for a provider."""
    if variant is not None:
        if dtype is not None:
            raise UsageError(f"variant {variant!r} and dtype {dtype!r}", stored.path, "choose by one of them")
        names = {LOOP, ATTENTIONS, *PROFILES, *PRECISIONS, *(export.variant for export in stored.exports())}
        if variant and variant not in names:
            raise UsageError(f"unknown variant {variant!r}", stored.path, nearest(variant, filter(None, names)))
        return stored.export(variant)
    own = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[stored.dtype]
    if dtype not in (None, own):
        if dtype not in PRECISIONS:
            known = [own, *PRECISIONS]
            raise UsageError(f"this model has no {dtype!r}", stored.path, nearest(str(dtype), known))
        return stored.export(dtype)
    found = [export for export in map(stored.export, (provider, "")) if export.exists]
    verified = [export for export in found if export.is_verified()]
    return (*verified, *reversed(found), stored.export())[0]


class Session:
    """An exported model, open on a provider.

    Made by :func:`load_session`. It may be called from several threads at once, and opens anew in a process that was
    forked; that must end with ``os._exit``, as those of ``multiprocessing`` do, for the runtime cannot be taken down
    there. As a context manager it closes at the end of its block; one that is closed raises :class:`zoo.UsageError`.
    """

    def __init__(
        self,
        stored: ModelDirectory,
        export: Export,
        provider: Provider,
        threads: int | None,
        memory: Memory,
        tokenizer: Path | None,
    ) -> None:
        self.stored, self.export, self.provider = stored, export, provider
        self.threads, self.memory = threads, memory
        self._tokenizer_file = tokenizer or (stored.path / TOKENIZER if TOKENIZER in stored.files else None)
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._warnings: set[str] = set()
        self._opening = threading.Lock()
        self._closed = False
        if tokenizer is not None:
            _ = self.tokenizer  # one that is asked for is refused before any input is
        _ = self.sessions
        _LIVING.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self.provider}"
        return f"<zoo session of {self.stored.path} for {self.task}, {state}>"

    # What it is.

    @property
    def path(self) -> Path:
        """The model directory."""
        return self.stored.path

    @property
    def task(self) -> str:
        """What the model declares itself to be for."""
        return self.stored.spec.task

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs in the order in which they run."""
        return self.export.graphs

    @property
    def config(self) -> Settings:
        """The architecture's configuration."""
        return self.stored.spec.config

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of real inputs and of caches; for bfloat16 that of ``ml_dtypes``."""
        return numpy_dtype(self.export.dtype)

    @cached_property
    def tokenizer(self) -> Any:
        """Of the ``tokenizers`` library, or None: then inputs are token ids."""
        if self._tokenizer_file is None:
            return None
        from zoo.tokenizer import load_tokenizer

        return load_tokenizer(self._tokenizer_file)

    def option(self, name: str) -> Any:
        """A value of the configuration, None where the architecture has no such field."""
        return getattr(self.config, name, None)

    def warn(self, what: str) -> None:
        """Warn of something once, however often it is met."""
        if what not in self._warnings:
            self._warnings.add(what)
            warnings.warn(what, ZooWarning, stacklevel=2)

    def placement(self) -> Mapping[str, Mapping[str, int]]:
        """For each graph, how many nodes each execution provider runs."""
        self._check_open()
        return {name: placement(self._open(name, placements=True)) for name in self.export.graph_files}

    # What it does.

    def run(self, inputs: Any, *, task: str | None = None, batch_size: int | None = None, **options: Any) -> Any:
        """Answer one input, or a list of them.

        Args:
            inputs: a text, token ids, a :class:`Pair` of either, or what else the task takes; or a list of them.
            task: another than the model's own, of those that some plugin provides for it.
            batch_size: inputs that are computed at once.
            options: of the task, such as ``max_new_tokens``.

        Returns:
            A mapping, or a list of them in the order of the inputs. Which keys it has depends on the task.

        Raises:
            UsageError: an unknown task or option, or no tokenizer for a text.
            ArtifactError: an input is empty, too long, or has tokens that the model does not know.
        """
        several = isinstance(inputs, list | tuple) and not isinstance(inputs, Pair)
        single = not several or (bool(inputs) and isinstance(inputs[0], int | np.integer))
        answers = []
        for answer in self.map([inputs] if single else inputs, task=task, batch_size=batch_size, **options):
            if answer.error is not None:
                raise answer.error
            answers.append(answer.result)
        return answers[0] if single else answers

    def map(
        self, inputs: Iterable[Any], *, task: str | None = None, batch_size: int | None = None, **options: Any
    ) -> Iterator[Answer]:
        """Answer inputs in their order, a thousand at a time: the first answer comes when so many are read, or all.

        Inputs of like length are computed together, so that hardly any padding is. One that cannot be answered has an
        ``error``, and the others are answered all the same.
        """
        runner = self.runner(task, **options)
        return self.answer(runner, (Answer(number, value) for number, value in enumerate(inputs, 1)), batch_size)

    def answer(self, runner: Runner[Any], answers: Iterable[Answer], batch_size: int | None = None) -> Iterator[Answer]:
        """As :meth:`map`, for inputs with numbers of their own, and with a runner that is there already."""
        size = runner.batch_size if batch_size is None else batch_size
        if size < 1:
            raise UsageError(f"batch_size must be at least 1, got {size}")
        return self._answer_all(runner, answers, size)

    def stream(self, text: str | Sequence[int], *, task: str | None = None, **options: Any) -> Iterator[str]:
        """The continuation of a prompt, or the target of a source, piece by piece as it is generated."""
        return self.pieces(self.runner(task, **options), text)

    def pieces(self, runner: Runner[Any], value: Any) -> Iterator[str]:
        """As :meth:`stream`, with a runner that is there already."""
        with _blame(runner, "cannot generate"):
            pieces = runner.stream(runner.read(value, 1))
        return _steps(runner, "cannot generate", pieces)

    def lead(self, runner: Runner[Any], text: str) -> str:
        """What is shown before the pieces that continue a text."""
        with _blame(runner, "cannot generate"):
            return str(runner.lead(text))

    def show(self, runner: Runner[Any], answers: Sequence[Answer]) -> Iterator[str]:
        """Answers without errors as lines for people, in relation to each other where the task says so."""
        with _blame(runner, "cannot show answers"):
            lines = iter(runner.show(answers))
        yield from _steps(runner, "cannot show answers", lines)

    def runner(self, task: str | None = None, **options: Any) -> Runner[Any]:
        """What does a task for this session, with these options."""
        self._check_open()
        name = task or self.task
        plugin, cls = self._runner_class(name)
        with plugins.blame(plugin, f"cannot prepare the task {name}"):
            where = f"task {name}"
            given = {key: cls.options.check_field(key, value, where) for key, value in options.items()}
            runner = cls(self, cls.options.from_dict({**cls.defaults(self, given), **given}, where))
        runner.plugin = plugin
        return runner

    def options(self, task: str | None = None) -> type[Settings]:
        """What can be chosen for a task."""
        return self._runner_class(task or self.task)[1].options

    def _runner_class(self, task: str) -> tuple[Plugin, type[Runner[Any]]]:
        plugin, found = plugins.active().task(task, self.task)
        cls = load_reference(found.run, plugin)
        if not (isinstance(cls, type) and issubclass(cls, Runner)):
            raise PluginError(f"{plugin}: {found.run} is not a subclass of zoo_export.Runner")
        with plugins.blame(plugin, f"cannot say the options of the task {task}"):
            cls.options.field_types()
        return plugin, cls

    def execute(self, graph: Graph, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        """Run one declared graph on arrays. A decoder begins where no past is given.

        What is bfloat16 comes as float32, which holds all its numbers and which numpy's functions know.
        """
        if graph.past is not None and graph.past.tensors()[0].name not in feeds:
            rows = len(next(iter(feeds.values())))
            feeds = {**feeds, **empty_past(graph, rows, self.dtype)}
        outputs = OnnxExecutor(self.sessions, self.dtype, twice=False)(graph, feeds)
        return {name: value.astype(np.float32) if value.dtype == BFLOAT16 else value for name, value in outputs.items()}

    def _answer_all(self, runner: Runner[Any], answers: Iterable[Answer], batch_size: int) -> Iterator[Answer]:
        window: list[Answer] = []
        for answer in answers:
            window.append(answer)
            if len(window) == _WINDOW:
                yield from self._answer(runner, window, batch_size)
                window = []
        yield from self._answer(runner, window, batch_size)

    def _answer(self, runner: Runner[Any], window: list[Answer], batch_size: int) -> Iterator[Answer]:
        """Answer a window, in its order, each as soon as it and those before it are done."""
        with _blame(runner, "cannot read inputs"):
            items = dict(runner.read_all(window))
            sizes = [(place, runner.size(item)) for place, item in items.items()]
            planned = list(batches(sizes, batch_size, runner.fits))
        waiting = set(items)
        shown = 0
        for batch in planned:
            self._compute(runner, [window[place] for place in batch], [items[place] for place in batch])
            waiting.difference_update(batch)
            while shown < len(window) and shown not in waiting:
                yield window[shown]
                shown += 1
        yield from window[shown:]

    @staticmethod
    def _compute(runner: Runner[Any], answers: Sequence[Answer], items: Sequence[Any]) -> None:
        results: list[Any]
        try:
            with _blame(runner, "cannot answer"):
                results = list(runner.answer(items))
        except ArtifactError as error:
            results = [error] * len(items)
        if len(results) != len(items):
            raise PluginError(f"{runner.plugin} returned {len(results)} results for {len(items)} inputs")
        for answer, result in zip(answers, results, strict=True):
            if isinstance(result, ZooError):
                answer.error = result
            elif isinstance(result, dict):
                answer.result = result
            else:
                raise PluginError(f"{runner.plugin} returned {type(result).__name__} as a result, which must be a dict")

    # How long it lives.

    @property
    def sessions(self) -> dict[str, ort.InferenceSession]:
        """ONNX Runtime's sessions by the names of the graphs, of this process."""
        with self._opening:
            self._check_open()
            if not self._sessions:
                self._sessions = {name: self._open(name) for name in self.export.graph_files}
            return self._sessions

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", self.path, "open another")

    def _open(self, graph: str, *, placements: bool = False) -> ort.InferenceSession:
        return open_session(
            self.path / self.export.graph_files[graph],
            provider=self.provider,
            threads=self.threads,
            memory=self.memory,
            placements=placements or self.provider == "cuda",
        )

    def close(self) -> None:
        """Give threads and memory back now. A session that is closed cannot be run."""
        with self._opening:
            self._closed = True
            self._sessions = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self) -> None:
        """Leave the runtime's sessions to the parent process, which has their threads.

        Destroying one here would wait for these threads for ever: a reference that nobody gives back keeps it.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._sessions))
        self._sessions = {}
        self._opening = threading.Lock()


_LIVING: WeakSet[Session] = WeakSet()


def _forget_all() -> None:
    for session in _LIVING:
        session._forget()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget_all)

Step = TypeVar("Step")


def _blame(runner: Runner[Any], what: str) -> AbstractContextManager[None]:
    """Keep a runner's errors to its plugin. Sessions compute in any thread, so stdout stays where it is."""
    return plugins.blame(runner.plugin, what, redirect=False)


def _steps(runner: Runner[Any], what: str, steps: Iterator[Step]) -> Iterator[Step]:
    """What a runner yields, each step of it under :func:`_blame`."""
    while True:
        with _blame(runner, what):
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step
