"""The variants ``openvino-bfloat16``, ``openvino-int8`` and ``openvino-int4``.

Their graphs are those of the profile ``openvino``, whose past OpenVINO keeps as state. With int8 and int4, Linears and
Embeddings read packed weights, as on ONNX Runtime. OpenVINO keeps these packed in memory, and expands each block to
float32 when it is multiplied; activations, keys and values stay float32. With bfloat16, the graphs read the model's own
weights, and OpenVINO computes in bfloat16, and keeps keys and values in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from zoo.arrays import Array
from zoo.artifact import OPENVINO, ModelDirectory
from zoo.models import persist
from zoo.probe.dtypes import BFLOAT16
from zoo.probe.module import TorchExecutor
from zoo_export.comparison import Comparison
from zoo_export.parity.compare import compare, judge
from zoo_export.parity.report import Report
from zoo_export.parity.sweep import Sweep
from zoo_export.trace.make import Options, link_models
from zoo_export.variants.openvino.subject import Bfloat16Subject, PackedSubject
from zoo_export.variants.quantized.recipe import Quantized
from zoo_export.variants.quantized.subject import dequantized_model
from zoo_export.variants.reduced.model import PRECISION_KEY, ReducedModel, empty_model, pointer, read_pointer
from zoo_export.variants.reduced.recipe import Reduced, ReducedCandidate
from zoo_runtime.onnx_runtime.providers import Provider
from zoo_runtime.openvino.compiled import check_arithmetic

__all__ = ["Bfloat16OnOpenVino", "QuantizedOnOpenVino"]


class QuantizedOnOpenVino(Quantized):
    """The model with quantised weights, on OpenVINO."""

    def check_model(self, stored: ModelDirectory, provider: Provider | None = None) -> None:
        super().check_model(stored, OPENVINO)
        check_arithmetic(self.precision)

    def executor(self, stored: ModelDirectory, reduced: ReducedModel) -> TorchExecutor:
        return TorchExecutor(dequantized_model(stored, reduced))

    def compare(self, candidate: ReducedCandidate, comparison: Comparison) -> Report:
        subject = PackedSubject(candidate.stored, candidate.reduced)
        return judge(Sweep(subject, comparison.longest), comparison)


class Bfloat16OnOpenVino(Reduced):
    """The model's own weights, on OpenVINO, which computes in bfloat16."""

    def check_model(self, stored: ModelDirectory, provider: Provider | None = None) -> None:
        super().check_model(stored, OPENVINO)
        check_arithmetic(self.precision)

    def reduce(self, stored: ModelDirectory, folder: Path) -> ReducedModel:
        empty = empty_model(self.variant, folder)
        linked = link_models(stored.spec, stored.dtype, stored.layout, Options(profile=OPENVINO))
        graphs = {name: empty.resolve(model, stored) for name, model in linked.items()}
        for model in graphs.values():
            model.metadata_props[PRECISION_KEY] = empty.precision
        return replace(empty, graphs=graphs)

    def executor(self, stored: ModelDirectory, reduced: ReducedModel) -> TorchExecutor:
        return TorchExecutor(persist.load_directory(stored).bfloat16())

    def weights(self, reduced: ReducedModel) -> Iterator[tuple[str, Array]]:
        pointers = {
            name: tensor
            for model in reduced.graphs.values()
            for name, value in model.graph.initializers.items()
            if (tensor := pointer(value)) is not None and tensor.dtype == ir.DataType.FLOAT
        }
        for name, tensor in pointers.items():
            yield name, read_pointer(tensor).astype(BFLOAT16).astype(np.float32)

    def compare(self, candidate: ReducedCandidate, comparison: Comparison) -> Report:
        stored = candidate.stored
        return compare(
            stored,
            candidate.files,
            replace(comparison, provider=OPENVINO),
            declared=stored.spec.graphs,
            make_subject=Bfloat16Subject,
        )
