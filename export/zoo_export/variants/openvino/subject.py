"""Parity of the smaller precisions on OpenVINO.

Packed weights are exact numbers, which OpenVINO expands to float32: the graphs as exported are compared with the module
in float64 on the dequantised weights, with PyTorch in float32 as the yardstick, as any export in float32 is.

Graphs that are computed in bfloat16 are compared twice with the module in float64: in float32, which finds wiring
errors however small, and in bfloat16, with PyTorch in bfloat16 as the yardstick.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zoo.artifact import OPENVINO, ModelDirectory
from zoo.errors import storage_errors
from zoo.probe.dtypes import epsilon
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Executor
from zoo_export.coverage.outcomes import Conditions
from zoo_export.parity.modules import ModuleError
from zoo_export.parity.openvino import OpenVinoSubject, folder_of_links
from zoo_export.parity.subject import PERTURBED, REFERENCE
from zoo_export.variants.quantized.packing import packings
from zoo_export.variants.quantized.subject import dequantized_model, perturb_others
from zoo_export.variants.reduced.model import ReducedModel
from zoo_runtime.openvino.compiled import properties_for

__all__ = ["Bfloat16Subject", "PackedSubject"]

ALL, EXACT = "all", "exact"
_BFLOAT16 = "bfloat16"


class PackedSubject(OpenVinoSubject):
    """Graphs with packed weights on OpenVINO, judged by the module on the same weights."""

    def __init__(self, stored: ModelDirectory, reduced: ReducedModel) -> None:
        self.reduced = reduced
        self._packed = packings(reduced.path)
        load = partial(dequantized_model, stored, reduced)
        super().__init__(stored, reduced.files(), OPENVINO, stored.spec.graphs, load=load)
        self.labels = {ALL: self.labels[ALL], PERTURBED: "with perturbed biases and norms"}

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        """Put noise on weights that are not packed: a graph may ignore initial biases, which are 0."""
        perturb_others(self.models, self._packed)
        self._scratch = self._opened.enter_context(folder_of_links([self.reduced.path]))
        with storage_errors(self._scratch):
            self._write_weights(self._scratch)
        yield {PERTURBED: self._open(self.files, True)}

    def conditions(self) -> Sequence[Conditions]:
        """None: the graphs decide what those in float32 decide, where their coverage is measured."""
        return ()

    def facts(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "precision": self.reduced.precision,
            "properties": properties_for(self.reduced.precision),
            "reference": f"{REFERENCE}, with the weights that are stored quantised",
            "yardstick": "torch in float32",
        }

    def _weights_files(self) -> Sequence[Path]:
        return self.reduced.weights_files(self.stored)

    def _write_weights(self, folder: Path) -> None:
        """Write the model's files with the models' current weights, except where packed ones are read instead."""
        weights = self.models.state()
        for file in {place.file for place in self.stored.layout.values()}:
            shutil.copyfile(self.stored.path / file, folder / file)
        for name, place in self.stored.layout.items():
            if name not in self._packed:
                with (folder / place.file).open("r+b") as opened:
                    opened.seek(place.offset)
                    opened.write(weights[name].tobytes())

    def _recall(self, level: str) -> None:
        """Keep the weights: graphs that are opened later read the models' current ones, too."""


class Bfloat16Subject(OpenVinoSubject):
    """Graphs on OpenVINO in bfloat16, and in float32 as a check of their wiring."""

    coarse = frozenset({ALL})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.labels = {**self.labels, EXACT: "in float32", ALL: "in bfloat16"}
        self._half = TorchExecutor(self._load().bfloat16())

    def open(self) -> dict[str, Executor]:
        return {EXACT: self._compile(self.files), ALL: self._compile(self.files, _BFLOAT16)}

    def epsilon(self, level: str) -> float:
        return epsilon(_BFLOAT16) if level == ALL else super().epsilon(level)

    def yardstick(self, level: str) -> TorchExecutor:
        return self._half if level == ALL else super().yardstick(level)

    def module_errors(self, level: str, name: str, feeds: Feeds, point: Point) -> list[ModuleError]:
        """Return no errors in bfloat16, where every module differs by rounding."""
        return [] if level == ALL else super().module_errors(level, name, feeds, point)

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "precision": _BFLOAT16,
            "properties": properties_for(_BFLOAT16),
            "yardstick": {level: f"torch in {_BFLOAT16 if level == ALL else 'float32'}" for level in self.labels},
        }
