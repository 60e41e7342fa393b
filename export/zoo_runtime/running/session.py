"""Sessions: exported models that run, from Python or by ``zoo run``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from zoo.arrays import Array
from zoo.artifact import OPENVINO, TOKENIZER, Export, ModelDirectory
from zoo.config import Settings
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.plugins import ZooWarning
from zoo.probe.pipeline import Arrays, Executor
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo_runtime.arguments import check_adapters, check_count, check_path, check_seconds
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.placement import placement
from zoo_runtime.onnx_runtime.providers import Memory, Provider
from zoo_runtime.running.answering import Answering, fixed_batch
from zoo_runtime.running.choosing import check_export, create_runner, find_export, runner_class
from zoo_runtime.running.inputs import Answer, Pair, is_single, numbered, result_of
from zoo_runtime.running.opened import OpenExport
from zoo_runtime.running.opening import input_limits, open_rows, open_stepper
from zoo_runtime.running.provider_warnings import warn_of_provider
from zoo_runtime.running.runner import Runner
from zoo_runtime.serving.rows import Rows

if TYPE_CHECKING:
    from zoo.tokenizers.chat import ChatTemplate
    from zoo.tokenizers.tokenizer import Tokenizer
    from zoo_runtime.openvino.compiled import CompiledGraph

__all__ = ["Session"]


class Session:
    """An exported model, open on a provider. Created by :func:`load_session`.

    A session is thread-safe, and :meth:`interrupt` stops what other threads run. In a forked process it reopens its
    graphs; those of OpenVINO raise :class:`zoo.UsageError` there. As a context manager, a session closes at the end of
    the block; a closed session raises :class:`zoo.UsageError`.
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
        _ = self.compiled if provider == OPENVINO else self.sessions

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
        return self._opened.dtype

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, which does not truncate, or None if inputs are token ids."""
        if self._tokenizer_file is None and TOKENIZER not in self.stored.files:
            return None
        from zoo.tokenizers.loading import model_tokenizer

        inputs = TextInputs(self.graphs, self.config, self.path)
        return model_tokenizer(self.stored, inputs, self._tokenizer_file, special_tokens=self.special_tokens)

    def option(self, name: str) -> Any:
        """Return a field of the configuration, or None if the architecture has no such field."""
        return getattr(self.config, name, None)

    @cached_property
    def input_limits(self) -> Mapping[str, int]:
        """Sizes of an export for serving that limit the tokens of an input, by dimension; empty for other exports."""
        return input_limits(self)

    def warn(self, message: str) -> None:
        """Issue a warning once per session."""
        if message not in self._warnings:
            self._warnings.add(message)
            warnings.warn(message, ZooWarning, stacklevel=2)

    def placement(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of nodes that each execution provider runs, by graph; of operations on OpenVINO."""
        self._opened.check_open()
        if self.provider == OPENVINO:
            return {name: {OPENVINO: compiled.operations} for name, compiled in self.compiled.items()}
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
        single = is_single(inputs, chats=self.chat is not None)
        listed = [inputs] if single else inputs
        check_adapters(adapter, len(listed))
        with self._opened.stoppable(check_seconds("timeout", timeout)):
            answers = self.map(listed, task=task, batch_size=batch_size, adapter=adapter, **options)
            results = [result_of(answer) for answer in answers]
        return results[0] if single else results

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
        answer comes once a window is read. Sounds are read a batch at a time. An input that fails has its ``error`` set
        and does not affect the others.
        """
        return self.answer(self.runner(task, **options), numbered(inputs, adapter), batch_size)

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
        return self._answering.lead(runner, text)

    def show(self, runner: Runner[Any], answers: Sequence[Answer]) -> Iterator[str]:
        """Yield human-readable lines for answers without errors. Some tasks compare the answers with each other."""
        return self._answering.show(runner, answers)

    def runner(self, task: str | None = None, **options: Any) -> Runner[Any]:
        """Create the runner of a task with the given options."""
        return self.runner_with(task, options)

    def runner_with(self, task: str | None, options: Mapping[str, Any]) -> Runner[Any]:
        """Like :meth:`runner`, with options of any names, which another program has chosen."""
        self._opened.check_open()
        return create_runner(self, task or self.task, options)

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
        return self._opened.execute(graph, feeds, timeout)

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
                place of running them; and inputs of the decoder that do not change between steps. Numbers of blocks
                (:func:`zoo.block_ids`) are those of the tokens of the first step, by default 0. Others are ignored, so
                these may be the whole batch that :meth:`zoo_runtime.TextRunner.feed` returns.
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
        return open_rows(self)

    def draft(self, directory: str | os.PathLike[str]) -> Session:
        """Open another exported model, which drafts tokens for this one. It closes with this session."""
        path = check_path("directory", directory).resolve()
        with self._opened.lock:
            self._opened.check_open()
            if path not in self._drafts:
                stored = ModelDirectory.open(path)
                export = find_export(stored, provider=self.provider)
                check_export(export, self.provider)
                draft = Session(
                    stored,
                    export,
                    self.provider,
                    self.threads,
                    self.memory,
                    self.provider_options,
                    None,
                    special_tokens=self.special_tokens,
                    truncate=text_limit(stored, None),
                )
                warn_of_provider(draft)
                self._drafts[path] = draft
            return self._drafts[path]

    def executor(self) -> Executor:
        """Return what runs declared graphs as they are, for one thread. It checks nothing."""
        return self._opened.executor()

    # Lifetime.

    @property
    def sessions(self) -> dict[str, ort.InferenceSession]:
        """ONNX Runtime sessions of this process, by graph name; none on OpenVINO."""
        return self._opened.sessions

    @property
    def compiled(self) -> dict[str, CompiledGraph]:
        """OpenVINO's graphs of this process, by name; none on ONNX Runtime."""
        return self._opened.compiled

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
