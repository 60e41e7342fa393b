"""Sessions: exported models opened for running, from Python or by ``zoo run``."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args, overload
from weakref import WeakSet

import numpy as np

from zoo import plugins, system
from zoo.artifact import ADAPTERS, PREFILL, SERVING, TOKENIZER, Export, ModelDirectory
from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import ArtifactError, PluginError, UsageError, ZooError, argument, nearest
from zoo.plugins import ZooWarning
from zoo.probe.dtypes import BFLOAT16, numpy_dtype
from zoo.probe.inputs import empty_past
from zoo.probe.pipeline import Arrays
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.truncation import text_limit, trained_length
from zoo_runtime.arguments import (
    check_adapters,
    check_count,
    check_flag,
    check_path,
    check_seconds,
    check_text,
    check_texts,
)
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.onnx_runtime.adapters import number_of
from zoo_runtime.onnx_runtime.executor import OnnxExecutor, check_feeds, check_finite
from zoo_runtime.onnx_runtime.mapped_weights import MappedWeights
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.placement import placement, unexpected_cpu_nodes
from zoo_runtime.onnx_runtime.providers import Memory, Provider, check_dtype, open_session
from zoo_runtime.onnx_runtime.stopping import Call
from zoo_runtime.running.batching import batches
from zoo_runtime.running.choosing import chosen_provider, find_export, runner_class
from zoo_runtime.running.inputs import Answer, Pair
from zoo_runtime.running.opening import open_stepper
from zoo_runtime.running.runner import Runner
from zoo_runtime.serving.capture import open_for_capture
from zoo_runtime.serving.executor import ServingExecutor
from zoo_runtime.serving.names import CAPACITY
from zoo_runtime.serving.rows import Rows, sizes_of_session

if TYPE_CHECKING:
    import torch

    from zoo.tokenizers.chat import ChatTemplate
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["Session", "load_session"]

Step = TypeVar("Step")
_WINDOW = 1024
"""Number of inputs that are read, sorted by length and batched together."""


def load_session(
    directory: str | os.PathLike[str],
    *,
    provider: Provider | Literal["auto"] = "cpu",
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    task: str | None = None,
    threads: int | None = None,
    memory: Memory = "fast",
    provider_options: Mapping[str, str] = MappingProxyType({}),
    tokenizer: str | os.PathLike[str] | None = None,
    special_tokens: bool = True,
    truncate: bool | None = None,
    chat: bool = False,
    unverified: bool = False,
) -> Session:
    """Open an exported model.

    Args:
        directory: a model directory with an export.
        provider: ``cpu``, ``cuda``, or ``auto``: CUDA if it loads, else the CPU with a warning.
        dtype: ``float32``, ``float16``, ``bfloat16``, ``int8`` or ``int4``, or a torch dtype; by default the model's
            own.
        variant: the export to open. By default the provider-specific one if it exists and is verified, else the
            portable one.
        task: the task to run instead of the model's own. If it requires a certain variant, that one is opened, unless
            ``variant`` or ``dtype`` is given.
        threads: number of threads per operator; the number of cores by default.
        memory: ``fast`` or ``mapped``: see :func:`zoo_runtime.open_session`.
        provider_options: options of ONNX Runtime for the provider. Exports are verified without them.
        tokenizer: a tokenizer file to use instead of the model's own.
        special_tokens: whether the tokenizer puts its special tokens, such as [CLS] and [SEP], around texts.
        truncate: truncate long texts, with a warning, to the length with which zoo trained the model, else to
            ``max_seq_length`` of a sentence encoder, else to ``model_max_length`` of the tokenizer, and at most to the
            positions; otherwise texts longer than the positions are errors. By default only for models that zoo
            trained on truncated texts, and for sentence encoders with sentence_bert_config.json.
        chat: inputs are chats, lists of messages with ``role`` and ``content`` or texts of the user, which the
            model's chat template turns into prompts. The template writes the special tokens itself.
        unverified: allow an export that has not been verified with the current weights.

    Raises:
        UsageError: the dtype or variant does not exist, or the provider does not load, does not support the dtype or
            refuses an option. There is no fallback to another provider.
        ArtifactError: the model is not exported, or has been altered.
        ParityError: the export is not verified.
    """
    directory = check_path("directory", directory)
    threads = check_count("threads", threads, system.MAX_THREADS)
    check_texts("provider_options", provider_options)
    special_tokens = check_flag("special_tokens", special_tokens)
    chat, unverified = check_flag("chat", chat), check_flag("unverified", unverified)
    for name, value in {"provider": provider, "variant": variant, "task": task, "memory": memory}.items():
        check_text(name, value)
    stored = ModelDirectory.open(directory)
    provider = chosen_provider(provider, directory)
    if memory not in get_args(Memory):
        raise UsageError(f"unknown memory {memory!r}", None, nearest(str(memory), get_args(Memory)))
    export = find_export(stored, provider=provider, dtype=dtype, variant=variant, task=task)
    export.check()
    check_dtype(export.dtype, provider, directory)
    if not unverified:
        export.check_verified()
    session = Session(
        stored,
        export,
        provider,
        threads,
        memory,
        provider_options,
        None if tokenizer is None else check_path("tokenizer", tokenizer),
        task=task,
        special_tokens=special_tokens,
        truncate=text_limit(stored, truncate),
        chat=_chat_template(directory) if chat else None,
    )
    compared = export.evidence.get("provider")
    if not unverified and compared not in (None, provider):
        remedy = f"verify it there with zoo verify {directory} --provider {provider}"
        what = f"verified on {compared}, but running on {provider}"
        warnings.warn(f"{what}: {directory}: {remedy}", ZooWarning, stacklevel=2)
    if provider == "cuda":
        _report_cpu_nodes(session)
    return session


def _chat_template(directory: Path) -> ChatTemplate:
    from zoo.tokenizers.chat import read_chat_template

    return read_chat_template(directory)


def _report_cpu_nodes(session: Session) -> None:
    """Warn of operators that a CUDA session runs on the CPU."""
    for name, opened in session.sessions.items():
        path = session.path / session.export.graph_files[name]
        found = Counter(node.operator for node in unexpected_cpu_nodes(opened))
        if found:
            operators = ", ".join(f"{count} x {operator}" for operator, count in sorted(found.items()))
            warnings.warn(f"running partly on the CPU ({operators}): {path}", ZooWarning, stacklevel=3)


class Session:
    """An exported model, open on a provider. Created by :func:`load_session`.

    A session is thread-safe, and :meth:`interrupt` stops what other threads run. In a forked process it reopens its
    graphs. As a context manager, a session closes at the end of the block; a closed session raises
    :class:`zoo.UsageError`.
    """

    def __init__(
        self,
        stored: ModelDirectory,
        export: Export,
        provider: Provider,
        threads: int | None,
        memory: Memory,
        provider_options: Mapping[str, str],
        tokenizer: Path | None,
        *,
        task: str | None = None,
        special_tokens: bool = True,
        truncate: int | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        self.special_tokens, self.truncate, self.chat = special_tokens and chat is None, truncate, chat
        self.stored, self.export, self.provider = stored, export, provider
        self.task = task or stored.spec.task
        """The task that is run by default."""
        self.threads, self.memory, self.provider_options = threads, memory, provider_options
        self._tokenizer_file = tokenizer
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._drafts: dict[Path, Session] = {}
        self.free_rows: list[Rows] = []
        """Buffers of an export for serving that are not in use."""
        self._warnings: set[str] = set()
        self._opening = threading.Lock()
        self._calls: set[Call] = set()
        self._weights = MappedWeights(stored.path, {})
        self._closed = False
        if tokenizer is not None:
            _ = self.tokenizer  # report an invalid tokenizer before reading inputs
        _ = self.sessions
        _LIVING.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self.provider}"
        return f"<zoo session of {self.stored.path} for {self.task}, {state}>"

    # Properties.

    @property
    def path(self) -> Path:
        """The model directory."""
        return self.stored.path

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs in execution order."""
        return self.export.graphs

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """The names of the low-rank adapters in the variant ``adapters``; empty in others."""
        return tuple(self.export.evidence.get("adapters", ())) if self.export.variant == ADAPTERS else ()

    @property
    def config(self) -> Settings:
        """The architecture's configuration."""
        return self.stored.spec.config

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of floating-point inputs and of caches; for bfloat16 the one of ``ml_dtypes``."""
        return numpy_dtype(self.export.dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, which does not truncate, or None if inputs are token ids."""
        if self._tokenizer_file is None and TOKENIZER not in self.stored.files:
            return None
        from zoo.tokenizers.tokenizer import model_tokenizer

        inputs = TextInputs(self.graphs, self.config, self.path)
        return model_tokenizer(self.stored, inputs, self._tokenizer_file, special_tokens=self.special_tokens)

    def option(self, name: str) -> Any:
        """Return a field of the configuration, or None if the architecture has no such field."""
        return getattr(self.config, name, None)

    @cached_property
    def input_limits(self) -> Mapping[str, int]:
        """Sizes of an export for serving that limit the tokens of an input, by dimension; empty for other exports."""
        if self.export.variant != SERVING:
            return {}
        graph, sizes = self.graphs[0], sizes_of_session(self.sessions[PREFILL])
        names = {CAPACITY} if graph.growing_pairs() else {str(tensor.dims[1]) for tensor in graph.input_tensors()}
        return {name: sizes[name] for name in sorted(names - {"sequence"}) if name in sizes}

    def warn(self, what: str) -> None:
        """Issue a warning once per session."""
        if what not in self._warnings:
            self._warnings.add(what)
            warnings.warn(what, ZooWarning, stacklevel=2)

    def placement(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of nodes that each execution provider runs, by graph."""
        self._check_open()
        return {name: placement(self._open(name, placements=True)) for name in self.export.graph_files}

    # Running.

    @overload
    def run(
        self,
        inputs: str | bytes | os.PathLike[str] | list[int] | Pair | Mapping[str, Any] | np.ndarray[Any, Any],
        *,
        task: str | None = None,
        batch_size: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any]: ...

    @overload
    def run(
        self,
        inputs: list[Any],
        *,
        task: str | None = None,
        batch_size: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]: ...

    @overload
    def run(
        self,
        inputs: object,
        *,
        task: str | None = None,
        batch_size: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]: ...

    def run(
        self,
        inputs: Any,
        *,
        task: str | None = None,
        batch_size: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer one input, or a list of them.

        Args:
            inputs: a text, token ids, a :class:`Pair` of either, a chat, or another input that the task accepts; or a
                list of inputs.
            task: a task to run instead of the model's own.
            batch_size: number of inputs per batch.
            adapter: the name of a low-rank adapter, or one for each input; None or ``base`` is the model itself. A
                batch may mix them. Requires the variant ``adapters``.
            timeout: seconds after which running graphs are stopped.
            options: options of the task, such as ``max_new_tokens``.

        Returns:
            A dictionary whose keys depend on the task, or a list of them in the order of the inputs.

        Raises:
            UsageError: an unknown task, option or adapter, or a text for a model without a tokenizer.
            ArtifactError: an input is empty, too long, or has tokens outside the vocabulary.
            StoppedError: the time is over, or another thread has called :meth:`interrupt`.
        """
        several = isinstance(inputs, list | tuple) and not isinstance(inputs, Pair)
        parts = int | np.integer if self.chat is None else int | np.integer | Mapping
        single = not several or (bool(inputs) and isinstance(inputs[0], parts))
        answers: list[dict[str, Any]] = []
        listed = [inputs] if single else inputs
        check_adapters(adapter, len(listed))
        with self._stoppable(check_seconds("timeout", timeout)):
            for answer in self.map(listed, task=task, batch_size=batch_size, adapter=adapter, **options):
                if answer.error is not None:
                    raise answer.error
                answers.append(answer.result)
        return answers[0] if single else answers

    def map(
        self,
        inputs: Iterable[Any],
        *,
        task: str | None = None,
        batch_size: int | None = None,
        adapter: str | Iterable[str | None] | None = None,
        **options: Any,
    ) -> Iterator[Answer]:
        """Yield answers in the order of the inputs.

        Inputs are read in windows of 1024, and batched by length within a window to minimise padding, so the first
        answer comes once a window is read. An input that fails has its ``error`` set and does not affect the others.
        """
        runner = self.runner(task, **options)
        names = repeat(adapter) if adapter is None or isinstance(adapter, str) else adapter
        pairs = enumerate(zip(inputs, names, strict=False), 1)
        return self.answer(runner, (Answer(n, value, adapter=name) for n, (value, name) in pairs), batch_size)

    def example(self, runner: Runner[Any]) -> dict[str, Any]:
        """Return a result of a runner, for one of the samples of its task; an empty one if none can be read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in runner.samples():
                for answer in self.answer(runner, [Answer(1, sample)]):
                    if answer.error is None:
                        return answer.result
        return {}

    def answer(self, runner: Runner[Any], answers: Iterable[Answer], batch_size: int | None = None) -> Iterator[Answer]:
        """Like :meth:`map`, with an existing runner and inputs that are already numbered."""
        size = check_count("batch_size", batch_size) or self._fixed_batch(runner) or runner.batch_size
        runner.batch_size = size
        return self._answer_all(runner, answers, size)

    def stream(
        self, text: str | Sequence[int], *, task: str | None = None, adapter: str | None = None, **options: Any
    ) -> Iterator[str]:
        """Yield the continuation of a prompt, or the target of a source, piece by piece as it is generated."""
        return self.pieces(self.runner(task, **options), text, adapter)

    def pieces(self, runner: Runner[Any], value: Any, adapter: str | None = None) -> Iterator[str]:
        """Like :meth:`stream`, with an existing runner."""
        if not runner.streams:
            raise UsageError(f"{self.task} does not support streaming", self.path)
        with _blame(runner, "cannot generate"), self._stoppable():
            pieces = runner.stream(self._adapted(runner.read(value, 1), adapter))
        self._report_truncated(runner)
        return self._steps(runner, "cannot generate", pieces)

    def lead(self, runner: Runner[Any], text: str) -> str:
        """Return the text to show before the streamed pieces."""
        with _blame(runner, "cannot generate"):
            return str(runner.lead(text))

    def show(self, runner: Runner[Any], answers: Sequence[Answer]) -> Iterator[str]:
        """Yield human-readable lines for answers without errors. Some tasks compare the answers with each other."""
        with _blame(runner, "cannot show answers"):
            lines = iter(runner.show(answers))
        yield from self._steps(runner, "cannot show answers", lines)

    def runner(self, task: str | None = None, **options: Any) -> Runner[Any]:
        """Create the runner of a task with the given options."""
        return self.runner_with(task, options)

    def runner_with(self, task: str | None, options: Mapping[str, Any]) -> Runner[Any]:
        """Like :meth:`runner`, with options of any names, which another program has chosen."""
        self._check_open()
        name = task or self.task
        plugin, cls = runner_class(name, self.stored.spec.task)
        if self.chat is not None and not cls.chats:
            raise UsageError(f"the task {name} does not read chats", self.path, argument("chat", text="leave out {}"))
        with plugins.blame(plugin, f"cannot prepare the task {name}", fault=ArtifactError):
            where = f"task {name}"
            given = {key: cls.options.check_field(key, value, where) for key, value in options.items()}
            runner = cls(self, cls.options.from_dict({**cls.defaults(self, given), **given}, where))
        runner.plugin = plugin
        return runner

    def options(self, task: str | None = None) -> type[Settings]:
        """Return the options class of a task."""
        return runner_class(task or self.task, self.stored.spec.task)[1].options

    def execute(
        self, graph: Graph, feeds: Mapping[str, np.ndarray[Any, Any]], *, timeout: float | None = None
    ) -> Arrays:
        """Run one declared graph on arrays. If a decoder is given no past, it starts with an empty one.

        The graphs of the variant ``adapters`` also need ``adapter_ids``, the number of each row's adapter in
        :attr:`adapters`, from 1 on; 0 is the model itself.

        bfloat16 outputs are converted to float32, which is lossless and supported by numpy.

        Args:
            graph: the graph.
            feeds: its inputs by name.
            timeout: seconds after which the run is stopped.

        Raises:
            ArtifactError: inputs contradict each other, have a size that the model does not declare or contain NaN or
                infinity where the comparison has not shown that the graph treats them as the model does, or ONNX
                Runtime refuses them.
            UsageError: an input is missing.
            StoppedError: the time is over, or another thread has called :meth:`interrupt`.
        """
        check_feeds(graph, feeds)
        if self.export.is_verified():
            known = self.export.evidence.get("grid", {}).get("non_finite", {})
            check_finite(self.graphs, graph, feeds, {name for name, facts in known.items() if facts["equal"]})
        if graph.pasts and graph.past_tensors()[0].name not in feeds:
            rows = len(next(iter(feeds.values())))
            feeds = {**feeds, **empty_past(graph, rows, self.dtype)}
        with self._stoppable(check_seconds("timeout", timeout)):
            if self.export.variant == SERVING:
                outputs = ServingExecutor(self.sessions, self.dtype)(graph, feeds)
            else:
                outputs = OnnxExecutor(self.sessions, self.dtype, twice=False)(graph, feeds)
        return {name: value.astype(np.float32) if value.dtype == BFLOAT16 else value for name, value in outputs.items()}

    def interrupt(self) -> None:
        """Stop calls of this session that run in other threads. They raise :class:`zoo.StoppedError`.

        Graphs are stopped between operators. Steps of :meth:`stepper` and :meth:`open_rows` are not stopped.
        """
        for call in list(self._calls):
            call.stop()

    def check_weights(self) -> None:
        """Raise :class:`ArtifactError` if a file of the open weights has been truncated or altered.

        Reading lost bytes ends the process, and others change the answers.
        Calls of this session check it themselves; steps of :meth:`stepper` and :meth:`open_rows` do not.
        """
        self._weights.check()

    @contextmanager
    def _stoppable(self, seconds: float | None = None) -> Iterator[None]:
        """Let the block be ended by :meth:`interrupt`, or after a time."""
        self._check_open()
        self.check_weights()
        call = Call(seconds, self.path)
        self._calls.add(call)
        try:
            with call:
                yield
        finally:
            self._calls.discard(call)

    def stepper(
        self, feeds: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}), *, rows: int | None = None
    ) -> Stepper:
        """Open the decoder, the last graph, to be run token by token. Its past is empty.

        Args:
            feeds: the inputs of the earlier graphs, such as the source of an encoder-decoder; or their outputs, in
                place of running them; and inputs of the decoder that do not change between steps. Others are ignored,
                so these may be the whole batch that :meth:`zoo_runtime.TextRunner.feed` returns.
            rows: number of texts; by default the rows of ``feeds``, or 1 without any.

        Raises:
            UsageError: the decoder has no past or no logits, or an input is missing or unsupported.
        """
        return open_stepper(self, feeds, rows)

    def open_rows(self) -> Rows:
        """Allocate the buffers of an export for serving, for texts that join, grow and leave at any step.

        They belong to the caller, and are independent of those of other calls.

        Raises :class:`UsageError` for other exports.
        """
        if self.export.variant != SERVING:
            what = f"the variant {self.export.variant or 'that is open'} has no rows of its own"
            raise UsageError(what, self.path, f"open the variant {SERVING}")
        graph = self.graphs[-1]
        return Rows(self.sessions[graph.name], self.sessions[PREFILL], graph, self.dtype, self.option("max_seq_len"))

    def draft(self, directory: str | os.PathLike[str]) -> Session:
        """Open another exported model, which drafts tokens for this one. It closes with this session."""
        path = check_path("directory", directory).resolve()
        with self._opening:
            self._check_open()
            if path not in self._drafts:
                self._drafts[path] = load_session(
                    path,
                    provider=self.provider,
                    threads=self.threads,
                    memory=self.memory,
                    provider_options=self.provider_options,
                    special_tokens=self.special_tokens,
                )
            return self._drafts[path]

    def _fixed_batch(self, runner: Runner[Any]) -> int | None:
        """Return the batch size that the graph of a task requires, or None if it takes any."""
        if self.export.variant == SERVING:
            return sizes_of_session(self.sessions[PREFILL])["batch"]
        graph: Graph = getattr(runner, "graph", self.graphs[0])
        opened = self.sessions.get(graph.name)
        shapes = {item.name: item.shape for item in opened.get_inputs()} if opened else {}
        for tensor in graph.input_tensors():
            if tensor.dims[0] == graph.rows[0] and isinstance(shapes.get(tensor.name, [None])[0], int):
                return int(shapes[tensor.name][0])
        return None

    def _answer_all(self, runner: Runner[Any], answers: Iterable[Answer], batch_size: int) -> Iterator[Answer]:
        window: list[Answer] = []
        for answer in answers:
            window.append(answer)
            if len(window) == _WINDOW:
                yield from self._answer(runner, window, batch_size)
                window = []
        yield from self._answer(runner, window, batch_size)
        self._report_truncated(runner)

    def _report_truncated(self, runner: Runner[Any]) -> None:
        truncated = getattr(runner, "truncated", None)
        if truncated is not None:
            remedy = ""
            if self.truncate is not None and self.truncate == trained_length(self.stored):
                truncated, remedy = (
                    f"{truncated}, as in training",
                    ": read whole texts with --no-truncate (truncate=False)",
                )
            warnings.warn(f"{truncated}: {self.path}{remedy}", ZooWarning, stacklevel=2)

    def _answer(self, runner: Runner[Any], window: list[Answer], batch_size: int) -> Iterator[Answer]:
        """Answer a window of inputs, yielding each answer once it and all earlier ones are done."""
        with _blame(runner, "cannot read inputs"):
            read = runner.read_all(window)
            items = {place: self._adapted(item, window[place].adapter) for place, item in read}
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

    def _adapted(self, item: Any, adapter: str | None) -> Any:
        """Return an item that names its adapter by number."""
        number = number_of(adapter, self.adapters, self.path)
        if not number:
            return item
        if not hasattr(item, "adapter"):
            raise UsageError("the task does not support adapters", self.path)
        return replace(item, adapter=number)

    def _compute(self, runner: Runner[Any], answers: Sequence[Answer], items: Sequence[Any]) -> None:
        results: list[Any]
        try:
            with _blame(runner, "cannot answer"), self._stoppable():
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

    def _steps(self, runner: Runner[Any], what: str, steps: Iterator[Step]) -> Iterator[Step]:
        """Iterate over a runner's results, with each step under :func:`_blame`."""
        while True:
            with _blame(runner, what), self._stoppable():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step

    # Lifetime.

    @property
    def sessions(self) -> dict[str, ort.InferenceSession]:
        """ONNX Runtime sessions of this process, by graph name."""
        with self._opening:
            self._check_open()
            if not self._sessions:
                files = self.stored.files.items()
                entries = {name: entry for name, entry in files if name.endswith(".safetensors")}
                self._weights.close()
                self._weights = MappedWeights(self.path, entries)
                self._weights.check()
                self._sessions = {name: self._open(name) for name in self.export.graph_files}
            return self._sessions

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed", self.path, "open another")

    def _open(self, graph: str, *, placements: bool = False) -> ort.InferenceSession:
        path = self.path / self.export.graph_files[graph]

        def open_with(options: Mapping[str, str]) -> ort.InferenceSession:
            return open_session(
                path,
                provider=self.provider,
                threads=self.threads,
                memory=self.memory,
                provider_options=options,
                placements=placements or self.provider == "cuda",
            )

        steps = self.export.variant == SERVING and graph == self.graphs[-1].name
        if steps and self.provider == "cuda":
            return open_for_capture(open_with, self.provider_options, path)
        return open_with(self.provider_options)

    def close(self) -> None:
        """Release threads and memory. A closed session cannot run."""
        with self._opening:
            self._closed = True
            self._sessions, self.free_rows = {}, []
            self._weights.close()
            for draft in self._drafts.values():
                draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget(self) -> None:
        """In a forked child: abandon the ONNX Runtime sessions, whose threads exist only in the parent.

        Buffers may lie on a device that the child cannot use, so a leaked reference keeps them alive.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.free_rows))
        self._sessions, self.free_rows = {}, []
        self._opening, self._calls = threading.Lock(), set()


_LIVING: WeakSet[Session] = WeakSet()


def _forget_all() -> None:
    for session in _LIVING:
        session._forget()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget_all)


def _blame(runner: Runner[Any], what: str) -> AbstractContextManager[None]:
    """Attribute a runner's errors to its plugin. stdout is not redirected, since sessions run in any thread."""
    return plugins.blame(runner.plugin, what, fault=ArtifactError, redirect=False)
