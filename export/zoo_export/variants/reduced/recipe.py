"""Variants in another precision: what they have in common, whichever way their weights are stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.arrays import Array
from zoo.artifact import OPENVINO, Export, ModelDirectory, variant_of
from zoo.errors import UsageError
from zoo.models import persist
from zoo.probe.dtypes import numpy_dtype
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Executor
from zoo_export.certificate import Bound, Certificate, Sample, check_max_kl, measure, sample
from zoo_export.comparison import Comparison
from zoo_export.parity.openvino import compile_files, folder_of_links
from zoo_export.variants.base import Candidate, Recipe
from zoo_export.variants.reduced.model import ReducedModel, open_reduced, read_reduced
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype
from zoo_runtime.openvino.executor import OpenVinoExecutor

__all__ = ["BOUNDS", "Reduced", "ReducedCandidate", "certify", "open_model"]

BOUNDS: dict[str, Bound] = {
    "float16": Bound(kl=0.001, cosine=0.9999),
    "bfloat16": Bound(kl=0.01, cosine=0.999),
    "int8": Bound(kl=0.02, cosine=0.98),
    "int4": Bound(kl=0.2, cosine=0.95),
}
"""Default error bounds, by precision."""


@dataclass(frozen=True, kw_only=True)
class ReducedCandidate(Candidate):
    """A model in another precision that is to be verified."""

    reduced: ReducedModel


class Reduced(Recipe[ReducedCandidate]):
    """A variant with the model's weights in another precision, and a certificate of what that costs.

    Args:
        variant: the name of the variant.
        max_kl: maximum mean divergence from float32, in nats, instead of the bound of the precision.
        text: text to measure on; the built-in sample by default.
    """

    kept = ("certificate", "tried")

    def __init__(self, variant: str, *, max_kl: float | None = None, text: Path | None = None) -> None:
        super().__init__(variant)
        self.precision = variant_of(variant).precision or variant
        self.max_kl = max_kl
        self.text = text
        self._sample: Sample | None = None

    def check(self, stored: ModelDirectory, comparison: Comparison) -> None:
        self.check_model(stored, comparison.provider)
        check_max_kl(stored, self.max_kl)
        self._sample = sample(stored, self.text)

    def check_model(self, stored: ModelDirectory, provider: Provider | None = None) -> None:
        """Raise :class:`UsageError` if the model is not float32, or the provider does not run this precision."""
        if provider is not None:
            check_dtype(variant_of(self.variant).dtype or "float32", provider, stored.path)
        if stored.dtype != "float32":
            raise UsageError(f"{self.precision} needs a float32 model, this one is {stored.dtype}", stored.path)

    @abstractmethod
    def reduce(self, stored: ModelDirectory, folder: Path) -> ReducedModel:
        """Create the graphs of a float32 model in this precision, and write their weights to a folder.

        Raises:
            UsageError: the model does not support the precision.
            PluginError: the model cannot be traced.
        """

    @abstractmethod
    def executor(self, stored: ModelDirectory, reduced: ReducedModel) -> TorchExecutor:
        """Return the module of PyTorch that computes in this precision, as its graphs do."""

    @abstractmethod
    def weights(self, reduced: ReducedModel) -> Iterator[tuple[str, Array]]:
        """Yield the names and values of the weights that are stored in this precision, as floating-point numbers."""

    def make(self, stored: ModelDirectory, folder: Path) -> ReducedCandidate:
        return self.candidate(stored, self.reduce(stored, folder), facts={"tried": []})

    def read(self, export: Export) -> ReducedCandidate:
        return self.candidate(export.stored, read_reduced(export.stored, self.variant))

    def candidate(
        self, stored: ModelDirectory, reduced: ReducedModel, facts: dict[str, Any] | None = None
    ) -> ReducedCandidate:
        """Return a model in this precision as one that is to be verified."""
        return ReducedCandidate(
            stored=stored,
            variant=self.variant,
            folder=reduced.directory,
            files=reduced.files(),
            facts=facts or {},
            reduced=reduced,
        )

    def certificate(self, candidate: ReducedCandidate, comparison: Comparison) -> Certificate:
        tokens = self._sample or sample(candidate.stored, self.text)
        return certify(candidate.stored, candidate.reduced, tokens, max_kl=self.max_kl, provider=comparison.provider)


def open_model(stored: ModelDirectory, reduced: ReducedModel, provider: Provider = "cpu") -> Executor:
    """Open a model in another precision where its variant runs: on OpenVINO, or on an execution provider.

    Logits are computed once: that a graph keeps the last ones, if asked to, is for the comparison.
    """
    if variant_of(reduced.variant).provider == OPENVINO:
        with folder_of_links(reduced.weights_files(stored)) as folder:
            compiled = compile_files(reduced.files(), stored.spec.graphs, folder, stored.path, reduced.precision)
        return OpenVinoExecutor(compiled, numpy_dtype(reduced.dtype))
    return open_reduced(reduced, provider=provider, twice=False)


def certify(
    stored: ModelDirectory,
    reduced: ReducedModel,
    tokens: Sample,
    *,
    max_kl: float | None = None,
    provider: Provider = "cpu",
) -> Certificate:
    """Measure the divergence of a model in another precision from the float32 module.

    Args:
        stored: the float32 model.
        reduced: the same model in another precision.
        tokens: inputs to compare on, see :func:`zoo_export.certificate.sample`.
        max_kl: maximum mean divergence, overriding the precision's default bound.
        provider: execution provider for the graphs, unless they are for OpenVINO.

    Raises:
        UsageError: ``max_kl`` is given, but the model has no logits; or OpenVINO is not installed, or this processor
            does not compute in the precision.
    """
    check_max_kl(stored, max_kl)
    runtime = open_model(stored, reduced, provider)
    reference = TorchExecutor(persist.load_directory(stored))
    certificate = measure(stored.spec.graphs, tokens, reference, runtime, BOUNDS[reduced.precision].at(max_kl))
    facts = {
        "precision": reduced.precision,
        "reference": "the module in float32, by torch",
        "bytes": reduced.footprint(),
        "float32_bytes": sum(tensor.length for tensor in stored.layout.values()),
        "kept_float32": dict(reduced.kept),
        "sample": tokens.to_dict(),
    }
    return Certificate({**facts, **certificate.evidence}, certificate.failures, reference="float32")
