"""Graphs that are traced from the model and read its weights: the plain export, and most of its profiles.

This module imports no PyTorch: a process that has not imported it yet can trace in another process meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.artifact import ATTENTION_INPUTS, OPENVINO, Export, ModelDirectory
from zoo.contract import Graph
from zoo_export.comparison import Comparison
from zoo_export.trace.make import Options, attention_facts, graphs_of, make_graphs, tracing_apart
from zoo_export.variants.base import Candidate, Recipe

if TYPE_CHECKING:
    from zoo_export.parity.report import Report
    from zoo_export.parity.subject import OnnxSubject

__all__ = ["Traced", "TracedCandidate"]


@dataclass(frozen=True, kw_only=True)
class TracedCandidate(Candidate):
    """Traced graphs that are to be verified."""

    declared: tuple[Graph, ...]
    """The graphs with the inputs and outputs that they are called with."""


class Traced(Recipe[TracedCandidate]):
    """Graphs traced from the model.

    Args:
        variant: the name of the variant.
        options: how the graphs are written; by default as the variant requires.
    """

    kept = ("options", ATTENTION_INPUTS)

    def __init__(self, variant: str, options: Options | None = None) -> None:
        super().__init__(variant)
        self.options = options or Options.of_variant(variant)

    @contextmanager
    def begin(self, stored: ModelDirectory, folder: Path) -> Iterator[Callable[[], TracedCandidate]]:
        with tracing_apart(stored, self.options) as traced:
            yield lambda: self._candidate(stored, folder, traced())

    def make(self, stored: ModelDirectory, folder: Path) -> TracedCandidate:
        return self._candidate(stored, folder, make_graphs(stored, self.options))

    def _candidate(self, stored: ModelDirectory, folder: Path, files: dict[str, bytes]) -> TracedCandidate:
        return TracedCandidate(
            stored=stored,
            variant=self.variant,
            folder=folder,
            files=files,
            facts={"options": self.options.facts(), **attention_facts(stored.spec, stored.dtype, self.options)},
            declared=graphs_of(stored.spec, stored.dtype, self.options),
        )

    def read(self, export: Export) -> TracedCandidate:
        return TracedCandidate(
            stored=export.stored,
            variant=self.variant,
            folder=export.stored.path,
            files=export.read(),
            declared=export.graphs,
        )

    def subject_class(self) -> type[OnnxSubject]:
        """Return the class that opens the graphs."""
        if self.variant == OPENVINO:
            from zoo_export.parity.openvino import OpenVinoSubject

            return OpenVinoSubject
        from zoo_export.parity.subject import OnnxSubject

        return OnnxSubject

    def compare(self, candidate: TracedCandidate, comparison: Comparison) -> Report:
        from zoo_export.parity.compare import compare

        return compare(
            candidate.stored,
            candidate.files,
            comparison,
            declared=candidate.declared,
            make_subject=self.subject_class(),
        )
