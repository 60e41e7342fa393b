"""Sessions: exported models opened for running, from Python or by ``zoo run``."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, overload

import numpy as np

from zoo import plugins, system
from zoo.arrays import Array
from zoo.artifact import PREFILL, SERVING, TOKENIZER, Export, ModelDirectory
from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError, argument, nearest
from zoo.plugins import ZooWarning
from zoo.probe.dtypes import BFLOAT16, numpy_dtype
from zoo.probe.inputs import empty_past
from zoo.probe.pipeline import Arrays
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.truncation import text_limit
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
from zoo_runtime.onnx_runtime.executor import OnnxExecutor, check_feeds, check_finite
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.placement import placement, unexpected_cpu_nodes
from zoo_runtime.onnx_runtime.providers import Memory, Provider, check_dtype
from zoo_runtime.running.answering import Answering, blame_runner, fixed_batch
from zoo_runtime.running.choosing import chosen_provider, find_export, runner_class
from zoo_runtime.running.inputs import Answer, Pair
from zoo_runtime.running.opened import OpenExport
from zoo_runtime.running.opening import open_stepper
from zoo_runtime.running.runner import Runner
from zoo_runtime.serving.executor import ServingExecutor
from zoo_runtime.serving.names import CAPACITY
from zoo_runtime.serving.rows import Rows
from zoo_runtime.serving.sizes import sizes_of_session

if TYPE_CHECKING:
    import torch

    from zoo.tokenizers.chat import ChatTemplate
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["Session", "load_session"]


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
    chat = check_flag("chat", chat)
    unverified = check_flag("unverified", unverified)
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
        problem = f"verified on {compared}, but running on {provider}"
        warnings.warn(f"{problem}: {directory}: {remedy}", ZooWarning, stacklevel=2)
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
        counts = Counter(node.operator for node in unexpected_cpu_nodes(opened))
        if counts:
            operators = ", ".join(f"{count} x {operator}" for operator, count in sorted(counts.items()))
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
        self.special_tokens = special_tokens and chat is None  # a chat template writes them itself
        self.truncate = truncate
        self.chat = chat
        self.stored = stored
        self.export = export
        self.provider = provider
        self.task = task or stored.spec.task
        """The task that is run by default."""
        self.threads = threads
        self.memory = memory
        self.provider_options = provider_options
        self._opened = OpenExport(stored, export, provider, threads, memory, provider_options)
        self._answering = Answering(self._opened, truncate)
        self._tokenizer_file = tokenizer
        self._drafts: dict[Path, Session] = {}
        self._warnings: set[str] = set()
        if tokenizer is not None:
            _ = self.tokenizer  # report an invalid tokenizer before reading inputs
        _ = self.sessions

    def __repr__(self) -> str:
        state = "closed" if self._opened.is_closed else f"on {self.provider}"
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

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the low-rank adapters in the variant ``adapters``; empty in others."""
        return self._opened.adapters

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
        if self.export.traits.interface != "rows":
            return {}
        graph = self.graphs[0]
        sizes = sizes_of_session(self.sessions[PREFILL])
        names = {CAPACITY} if graph.growing_pairs() else {str(tensor.dims[1]) for tensor in graph.input_tensors()}
        return {name: sizes[name] for name in sorted(names - {"sequence"}) if name in sizes}

    def warn(self, message: str) -> None:
        """Issue a warning once per session."""
        if message not in self._warnings:
            self._warnings.add(message)
            warnings.warn(message, ZooWarning, stacklevel=2)

    def placement(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of nodes that each execution provider runs, by graph."""
        self._opened.check_open()
        return {name: placement(self._opened.open_graph(name, placements=True)) for name in self.export.graph_files}

    # Running.

    @overload
    def run(
        self,
        inputs: str | bytes | os.PathLike[str] | list[int] | Pair | Mapping[str, Any] | Array,
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
        with self._opened.stoppable(check_seconds("timeout", timeout)):
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
        size = check_count("batch_size", batch_size) or fixed_batch(self, runner) or runner.batch_size
        runner.batch_size = size
        return self._answering.answer(runner, answers, size)

    def stream(
        self, text: str | Sequence[int], *, task: str | None = None, adapter: str | None = None, **options: Any
    ) -> Iterator[str]:
        """Yield the continuation of a prompt, or the target of a source, piece by piece as it is generated."""
        return self.pieces(self.runner(task, **options), text, adapter)

    def pieces(self, runner: Runner[Any], value: Any, adapter: str | None = None) -> Iterator[str]:
        """Like :meth:`stream`, with an existing runner."""
        if not runner.streams:
            raise UsageError(f"{self.task} does not support streaming", self.path)
        return self._answering.pieces(runner, value, adapter)

    def lead(self, runner: Runner[Any], text: str) -> str:
        """Return the text to show before the streamed pieces."""
        with blame_runner(runner, "cannot generate"):
            return str(runner.lead(text))

    def show(self, runner: Runner[Any], answers: Sequence[Answer]) -> Iterator[str]:
        """Yield human-readable lines for answers without errors. Some tasks compare the answers with each other."""
        with blame_runner(runner, "cannot show answers"):
            lines = iter(runner.show(answers))
        yield from self._answering.steps(runner, "cannot show answers", lines)

    def runner(self, task: str | None = None, **options: Any) -> Runner[Any]:
        """Create the runner of a task with the given options."""
        return self.runner_with(task, options)

    def runner_with(self, task: str | None, options: Mapping[str, Any]) -> Runner[Any]:
        """Like :meth:`runner`, with options of any names, which another program has chosen."""
        self._opened.check_open()
        name = task or self.task
        plugin, cls = runner_class(name, self.stored.spec.task)
        if self.chat is not None and not cls.chats:
            raise UsageError(f"the task {name} does not read chats", self.path, argument("chat", text="leave out {}"))
        with plugins.blame(plugin, f"cannot prepare the task {name}", fault=ArtifactError):
            where = f"task {name}"
            checked = {key: cls.options.check_field(key, value, where) for key, value in options.items()}
            runner = cls(self, cls.options.from_dict({**cls.defaults(self, checked), **checked}, where))
        runner.plugin = plugin
        return runner

    def options(self, task: str | None = None) -> type[Settings]:
        """Return the options class of a task."""
        return runner_class(task or self.task, self.stored.spec.task)[1].options

    def execute(self, graph: Graph, feeds: Mapping[str, Array], *, timeout: float | None = None) -> Arrays:
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
            kinds = self.export.evidence.get("grid", {}).get("non_finite", {})
            check_finite(self.graphs, graph, feeds, {name for name, facts in kinds.items() if facts["equal"]})
        if graph.pasts and graph.past_tensors()[0].name not in feeds:
            rows = len(next(iter(feeds.values())))
            feeds = {**feeds, **empty_past(graph, rows, self.dtype)}
        with self._opened.stoppable(check_seconds("timeout", timeout)):
            if self.export.traits.interface == "rows":
                outputs = ServingExecutor(self.sessions, self.dtype)(graph, feeds)
            else:
                outputs = OnnxExecutor(self.sessions, self.dtype, twice=False)(graph, feeds)
        return {name: value.astype(np.float32) if value.dtype == BFLOAT16 else value for name, value in outputs.items()}

    def interrupt(self) -> None:
        """Stop calls of this session that run in other threads. They raise :class:`zoo.StoppedError`.

        Graphs are stopped between operators. Steps of :meth:`stepper` and :meth:`open_rows` are not stopped.
        """
        self._opened.interrupt()

    def check_weights(self) -> None:
        """Raise :class:`ArtifactError` if a file of the open weights has been truncated or altered.

        Reading lost bytes ends the process, and others change the answers.
        Calls of this session check it themselves; steps of :meth:`stepper` and :meth:`open_rows` do not.
        """
        self._opened.check_weights()

    def stepper(self, feeds: Mapping[str, Array] = MappingProxyType({}), *, rows: int | None = None) -> Stepper:
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
        if self.export.traits.interface != "rows":
            problem = f"the variant {self.export.variant or 'that is open'} has no rows of its own"
            raise UsageError(problem, self.path, f"open the variant {SERVING}")
        graph = self.graphs[-1]
        return Rows(self.sessions[graph.name], self.sessions[PREFILL], graph, self.dtype, self.option("max_seq_len"))

    def draft(self, directory: str | os.PathLike[str]) -> Session:
        """Open another exported model, which drafts tokens for this one. It closes with this session."""
        path = check_path("directory", directory).resolve()
        with self._opened.lock:
            self._opened.check_open()
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

    # Lifetime.

    @property
    def sessions(self) -> dict[str, ort.InferenceSession]:
        """ONNX Runtime sessions of this process, by graph name."""
        return self._opened.sessions

    @property
    def free_rows(self) -> list[Rows]:
        """Buffers of an export for serving that are not in use."""
        return self._opened.free_rows

    def close(self) -> None:
        """Release threads and memory. A closed session cannot run."""
        with self._opened.lock:
            self._opened.close()
            for draft in self._drafts.values():
                draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
