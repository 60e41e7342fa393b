"""Models in float16 or bfloat16: traced in that dtype, with weights of their own, and compared like any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import safe_open

from zoo.arrays import Array
from zoo.artifact import ModelDirectory, entry_of
from zoo.artifact.weights import DTYPES, read_header
from zoo.errors import UsageError
from zoo.models import persist
from zoo.probe.dtypes import numpy_dtype
from zoo.probe.module import TorchExecutor
from zoo_export.comparison import Comparison
from zoo_export.parity.compare import MakeSubject, compare
from zoo_export.parity.report import Report
from zoo_export.parity.subject import OnnxSubject
from zoo_export.trace.make import Options, link_models
from zoo_export.variants.reduced.model import PRECISION_KEY, ReducedModel, empty_model
from zoo_export.variants.reduced.recipe import Reduced, ReducedCandidate
from zoo_export.variants.reduced.tensors import read_tensor, write_tensors

__all__ = ["Half", "as_model", "compare_half"]


class Half(Reduced):
    """The model in float16 or bfloat16."""

    def reduce(self, stored: ModelDirectory, folder: Path) -> ReducedModel:
        return _to_half(stored, empty_model(self.variant, folder))

    def executor(self, stored: ModelDirectory, reduced: ReducedModel) -> TorchExecutor:
        return TorchExecutor(persist.load_directory(as_model(stored, reduced)))

    def weights(self, reduced: ReducedModel) -> Iterator[tuple[str, Array]]:
        with safe_open(reduced.path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  (not a mapping)
                tensor = reader.get_tensor(name)
                if tensor.is_floating_point():
                    yield name, tensor.float().numpy()

    def compare(self, candidate: ReducedCandidate, comparison: Comparison) -> Report:
        return compare_half(candidate, comparison)


def compare_half(
    candidate: ReducedCandidate, comparison: Comparison, make_subject: MakeSubject = OnnxSubject
) -> Report:
    """Compare a model in half precision with the module in that dtype. ``make_subject`` opens the graphs."""
    stored = candidate.stored
    model = as_model(stored, candidate.reduced)
    declared = stored.spec.graphs  # traced without windows
    report = compare(model, candidate.files, comparison, declared=declared, make_subject=make_subject)
    report.evidence |= {
        "config": stored.config_digest(),
        "weights": stored.weight_digests(),
        "companions": stored.companion_digests(),
    }
    return report


def as_model(stored: ModelDirectory, reduced: ReducedModel) -> ModelDirectory:
    """Return a model in another dtype as a model directory of its own."""
    entry = entry_of(reduced.path)
    description = {**stored.description, "dtype": reduced.precision}
    model = ModelDirectory(reduced.directory, {reduced.path.name: entry}, description)
    vars(model)["layout"] = read_header(reduced.path)
    return model


def _to_half(stored: ModelDirectory, empty: ReducedModel) -> ReducedModel:
    """Write the weights in half precision, and trace the graphs in that dtype."""
    dtype = empty.precision
    layout = {
        name: (DTYPES[dtype] if place.dtype == "F32" else place.dtype, place.shape)
        for name, place in stored.layout.items()
    }
    with safe_open(stored.path / next(iter(stored.layout.values())).file, framework="numpy") as reader:
        metadata = reader.metadata() or {}

    def halves() -> Iterator[tuple[str, Array]]:
        for name, place in stored.layout.items():
            tensor = read_tensor(stored.path, name, place)
            if place.dtype == "F32":
                with np.errstate(over="ignore"):
                    half = tensor.astype(numpy_dtype(dtype))
                if not np.array_equal(np.isfinite(half), np.isfinite(tensor)):
                    reached = np.abs(tensor).max()
                    raise UsageError(f"{name} reaches {reached:.3g}, too large for {empty.precision}", stored.path)
                tensor = half
            yield name, tensor

    write_tensors(empty.path, layout, metadata, halves())
    places = read_header(empty.path)
    linked = link_models(stored.spec, dtype, places, Options(windows=False))
    graphs = {name: empty.resolve(model, stored) for name, model in linked.items()}
    for model in graphs.values():
        model.metadata_props[PRECISION_KEY] = empty.precision
    return replace(empty, graphs=graphs)
