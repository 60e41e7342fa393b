"""The variants ``int8`` and ``int4``: weights quantised in blocks, and operators that read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.probe.module import TorchExecutor
from zoo_export.comparison import Comparison
from zoo_export.parity.compare import judge
from zoo_export.parity.report import Report
from zoo_export.parity.sweep import Sweep
from zoo_export.variants.quantized.make import quantize
from zoo_export.variants.quantized.packing import packings, read_dequantized
from zoo_export.variants.quantized.subject import EmulatedExecutor, QuantizedSubject, dequantized_model
from zoo_export.variants.reduced.model import ReducedModel
from zoo_export.variants.reduced.recipe import Reduced, ReducedCandidate

__all__ = ["Quantized"]


class Quantized(Reduced):
    """The model with quantised weights."""

    def reduce(self, stored: ModelDirectory, folder: Path) -> ReducedModel:
        return quantize(stored, self.variant, folder)

    def executor(self, stored: ModelDirectory, reduced: ReducedModel) -> TorchExecutor:
        return EmulatedExecutor(dequantized_model(stored, reduced), packings(reduced.path))

    def weights(self, reduced: ReducedModel) -> Iterator[tuple[str, Array]]:
        yield from read_dequantized(reduced.path)

    def compare(self, candidate: ReducedCandidate, comparison: Comparison) -> Report:
        subject = QuantizedSubject(candidate.stored, candidate.reduced, comparison.provider)
        return judge(Sweep(subject, comparison.longest), comparison)
