"""An open model, as its tasks see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from zoo.arrays import Array
from zoo.config import Settings
from zoo.contract import Graph

if TYPE_CHECKING:
    from zoo.artifact import Export, ModelDirectory
    from zoo.probe.pipeline import Arrays, Executor
    from zoo.tokenizers.chat import ChatTemplate
    from zoo.tokenizers.tokenizer import Tokenizer
    from zoo_runtime.generation.stepper import Stepper
    from zoo_runtime.onnx_runtime.ort import ort
    from zoo_runtime.openvino.compiled import CompiledGraph
    from zoo_runtime.serving.rows import Rows

__all__ = ["Context", "Internals", "internals"]


class Context(Protocol):
    """The open model that a task works with, a :class:`zoo_runtime.Session`.

    A session has more members; tasks use these.
    """

    @property
    def path(self) -> Path:
        """The model directory, which errors name."""
        ...

    @property
    def stored(self) -> ModelDirectory:
        """The model's files and description."""
        ...

    @property
    def config(self) -> Settings:
        """The architecture's configuration."""
        ...

    def option(self, name: str) -> Any:
        """Return a field of the configuration, or None if the architecture has no such field."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, which does not truncate, or None if inputs are token ids."""
        ...

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The declared graphs in execution order."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of floating-point inputs and of caches."""
        ...

    def execute(self, graph: Graph, feeds: Mapping[str, Array]) -> Arrays:
        """Run one graph on arrays."""
        ...

    def stepper(self, feeds: Mapping[str, Array] = ..., *, rows: int | None = None) -> Stepper:
        """Open the decoder, to be run token by token."""
        ...


class Internals(Context, Protocol):
    """The members of a session that only the base classes and the generation tasks of this package use."""

    @property
    def export(self) -> Export:
        """The open export."""
        ...

    @property
    def provider(self) -> str:
        """Where the graphs run: ``cpu`` or ``cuda``, or ``openvino``."""
        ...

    @property
    def sessions(self) -> Mapping[str, ort.InferenceSession]:
        """ONNX Runtime sessions by graph name; none on OpenVINO."""
        ...

    @property
    def compiled(self) -> Mapping[str, CompiledGraph]:
        """OpenVINO's graphs by name."""
        ...

    def executor(self) -> Executor:
        """Return what runs declared graphs as they are, for one thread."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters, if the graphs have some."""
        ...

    @property
    def truncate(self) -> int | None:
        """Number of tokens to which texts are truncated; None if longer ones are refused."""
        ...

    @property
    def input_limits(self) -> Mapping[str, int]:
        """Sizes of an export for serving that limit the tokens of an input, by dimension; empty for other exports."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """The template of chats, if inputs are chats."""
        ...

    @property
    def free_rows(self) -> list[Rows]:
        """Buffers of an export for serving that are not in use."""
        ...

    def open_rows(self) -> Rows:
        """Allocate the buffers of an export for serving."""
        ...

    def draft(self, directory: str) -> Context:
        """Open another exported model, which drafts tokens for this one."""
        ...

    def warn(self, message: str) -> None:
        """Issue a warning once per session."""
        ...


def internals(session: Context) -> Internals:
    """Return a session with all members that this package uses: every context is a session."""
    return cast("Internals", session)
