"""The variant ``adapters``: graphs in which each row of a batch has its own low-rank adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zoo.artifact import ADAPTERS, Export, ModelDirectory
from zoo.artifact.weights import read_header
from zoo.errors import ArtifactError
from zoo_export.comparison import Comparison
from zoo_export.parity.report import Report
from zoo_export.variants.adapters.graph import make_adapted, stacks_of
from zoo_export.variants.adapters.lora_file import file_name, write_lora_file
from zoo_export.variants.adapters.stack import FILE, Adapter, read_adapters, read_stacked, write_stacks
from zoo_export.variants.adapters.subject import AdaptedGraphs, compare_adapters
from zoo_export.variants.base import Recipe

__all__ = ["WithAdapters"]


class WithAdapters(Recipe[AdaptedGraphs]):
    """A model with low-rank adapters.

    Args:
        variant: the name of the variant.
        adapters: directories that ``zoo train --lora`` or the PEFT library wrote, by the names they get.
        lora_files: also write each adapter as a file of ONNX Runtime's ``LoraAdapter``, to be loaded at run time.
    """

    def __init__(
        self, variant: str = ADAPTERS, *, adapters: Mapping[str, Path] | None = None, lora_files: bool = False
    ) -> None:
        super().__init__(variant)
        self.directories = adapters or {}
        self.lora_files = lora_files
        self._adapters: list[Adapter] = []

    def check(self, stored: ModelDirectory, comparison: Comparison) -> None:
        self._adapters = read_adapters(stored, self.directories)

    def replaced(self, export: Export) -> list[str]:
        """Return all files: those of LoRA adapters are called after the adapters."""
        return export.files

    def make(self, stored: ModelDirectory, folder: Path) -> AdaptedGraphs:
        adapters = self._adapters or read_adapters(stored, self.directories)
        write_stacks(folder, adapters, tuple(stored.layout))
        graphs = AdaptedGraphs(
            stored=stored,
            variant=self.variant,
            folder=folder,
            files=make_adapted(stored, read_header(folder / FILE)),
            adapters=adapters,
            lora_files=self.lora_files,
        )
        if self.lora_files:
            _write_lora_files(graphs)
        return graphs

    def read(self, export: Export) -> AdaptedGraphs:
        files = export.read()
        names = list(export.evidence["adapters"])
        written = {file_name(graph, name) for graph in files for name in names}
        directory = export.stored.path
        return AdaptedGraphs(
            stored=export.stored,
            variant=self.variant,
            folder=export.stored.file(FILE).parent,
            files=files,
            adapters=read_stacked(directory, names),
            lora_files=any(name in written for name in export.files),
        )

    def compare(self, candidate: AdaptedGraphs, comparison: Comparison) -> Report:
        return compare_adapters(candidate, comparison)

    def outdated(self, export: Export) -> ArtifactError | None:
        change = export.change()
        if change is None:
            return None
        problem = f"the adapters belong to another model ({change})"
        return ArtifactError(problem, export.stored.path, "train them again")


def _write_lora_files(graphs: AdaptedGraphs) -> None:
    stacked = (graphs.folder / FILE).read_bytes()
    for name, data in graphs.files.items():
        stacks = stacks_of(data, stacked)
        for adapter in graphs.adapters if stacks else ():
            write_lora_file(graphs.folder / file_name(name, adapter.name), adapter, stacks)
