"""The variant ``generate``: one graph with the whole decoding loop, made from the graphs of the plain export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zoo.artifact import LOOP, Export, ModelDirectory
from zoo.errors import UsageError
from zoo_export.comparison import Comparison
from zoo_export.graph.file import dump, load
from zoo_export.graph.static import fixed_sizes
from zoo_export.parity.report import Report
from zoo_export.variants.base import Candidate, Recipe
from zoo_export.variants.loop.comparison import compare_loop
from zoo_export.variants.loop.graph import make_loop
from zoo_runtime.generation.loop import plan_loop

__all__ = ["Loop", "LoopCandidate"]


@dataclass(frozen=True, kw_only=True)
class LoopCandidate(Candidate):
    """A graph with the decoding loop that is to be verified."""

    plain: Mapping[str, bytes]
    """The serialised graphs that it is made from."""


class Loop(Recipe[LoopCandidate]):
    """A graph that generates a text in one call."""

    def check(self, stored: ModelDirectory, comparison: Comparison) -> None:
        plan_loop(stored.spec)
        _verified_graphs(stored)

    def make(self, stored: ModelDirectory, folder: Path) -> LoopCandidate:
        graphs = _verified_graphs(stored)
        if any(map(fixed_sizes, graphs.values())):
            problem = "generate.onnx needs an export without fixed dimensions"
            raise UsageError(problem, stored.path, "export it without --fix")
        loop = make_loop(stored.spec, {name: load(graph) for name, graph in graphs.items()})
        return LoopCandidate(
            stored=stored,
            variant=self.variant,
            folder=folder,
            files={LOOP: dump(loop)},
            plain=graphs,
        )

    def read(self, export: Export) -> LoopCandidate:
        return LoopCandidate(
            stored=export.stored,
            variant=self.variant,
            folder=export.stored.path,
            files=export.read(),
            plain=_verified_graphs(export.stored),
        )

    def compare(self, candidate: LoopCandidate, comparison: Comparison) -> Report:
        return compare_loop(candidate.stored, candidate.plain, candidate.files[LOOP], provider=comparison.provider)


def _verified_graphs(stored: ModelDirectory) -> dict[str, bytes]:
    """Return the graphs of the plain export. Raises :class:`ParityError` unless they are verified."""
    plain = Export(stored)
    plain.check()
    plain.check_verified()
    return plain.read()
