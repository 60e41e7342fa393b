"""The variants with keys and values in int8, and their certified error.

The graphs are those of the portable export or of the profile ``cpu``, or those of a verified export with quantised
weights, rewritten by :mod:`zoo_export.variants.int8_cache.graph`. They are compared by
:mod:`zoo_export.variants.int8_cache.subject`. How far the rounding moves the model is measured on the text of
:mod:`zoo_export.certificate`, against the module in float64, whose keys and values are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.artifact import PORTABLE, Export, ModelDirectory, variant_of
from zoo.contract import Graph, KeyValues
from zoo.errors import UsageError
from zoo.models import persist
from zoo.probe.inputs import Feeds, empty_past
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays
from zoo_export.certificate import Bound, Certificate, Sample, check_max_kl, measure, sample
from zoo_export.comparison import Comparison
from zoo_export.graph.file import dump, load
from zoo_export.parity.compare import judge
from zoo_export.parity.memory import check_memory
from zoo_export.parity.report import Report
from zoo_export.parity.sweep import Sweep
from zoo_export.trace.make import Options, make_graphs
from zoo_export.variants.base import Candidate, Recipe
from zoo_export.variants.int8_cache.graph import PROBE, probe, store_in_int8
from zoo_export.variants.int8_cache.subject import CacheSubject, QuantizedCacheSubject
from zoo_export.variants.reduced.model import ReducedModel, open_reduced, read_reduced
from zoo_export.variants.reduced.recipe import BOUNDS
from zoo_runtime.generation.memory import past_bytes
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import check_dtype, open_session

__all__ = ["CACHE_BOUND", "Int8Cache"]

CACHE_BOUND = Bound(kl=0.005, cosine=0.999)
"""Error bounds of keys and values in int8 with float32 weights. With quantised weights, those of the weights apply."""
TOKENS = (512, 2000)
"""Numbers of tokens for which the evidence has the bytes of the past."""


@dataclass(frozen=True, kw_only=True)
class CacheCandidate(Candidate):
    """Graphs with keys and values in int8, and the graphs that they are made from."""

    models: Mapping[str, ir.Model]
    plain: Mapping[str, bytes]
    """The serialised graphs before they were rewritten."""
    reduced: ReducedModel | None
    """The model with quantised weights, if the graphs have them."""

    def with_probes(self) -> dict[str, ir.Model]:
        """Return the graphs, and those of :func:`zoo_export.variants.int8_cache.graph.probe`."""
        probes = {}
        for graph in self.stored.spec.graphs:
            if graph.pasts:
                probes[graph.name + PROBE] = self.models[graph.name].clone()
                probe(probes[graph.name + PROBE], graph)
        return {**self.models, **probes}

    def quantized(self, models: Mapping[str, ir.Model]) -> ReducedModel:
        """Return the model with quantised weights and other graphs, whose weights lie in the model's directory."""
        assert self.reduced is not None
        graphs = {name: self.reduced.parse(dump(model), self.stored) for name, model in models.items()}
        return replace(self.reduced, graphs=graphs)


class Int8Cache(Recipe[CacheCandidate]):
    """A model whose keys and values are stored in int8.

    Args:
        variant: the name of the variant.
        max_kl: maximum mean divergence from the model in float64, in nats.
        text: text to measure on; the built-in sample by default.
    """

    kept = ("certificate",)

    def __init__(self, variant: str, *, max_kl: float | None = None, text: Path | None = None) -> None:
        super().__init__(variant)
        self.base = variant_of(variant_of(variant).base or "")
        self.max_kl = max_kl
        self.text = text
        self._sample: Sample | None = None

    def check(self, stored: ModelDirectory, comparison: Comparison) -> None:
        if stored.dtype != "float32":
            raise UsageError(f"a cache in int8 needs a float32 model, this one is {stored.dtype}", stored.path)
        graphs = [graph for graph in stored.spec.graphs if graph.pasts]
        if not graphs:
            raise UsageError("the model has no past to store in int8", stored.path)
        for graph in graphs:
            if sum(isinstance(past, KeyValues) for past in graph.pasts) != 1:
                raise UsageError(f"graph {graph.name} has no past of keys and values to store in int8", stored.path)
        check_dtype("float32", comparison.provider, stored.path)
        check_max_kl(stored, self.max_kl)
        self._sample = sample(stored, self.text)

    def make(self, stored: ModelDirectory, folder: Path) -> CacheCandidate:
        """Rewrite the graphs of the base.

        Raises:
            UsageError: the past cannot be stored in int8.
            ArtifactError: the variant has quantised weights, which have to be exported first.
        """
        reduced, plain = self._base_graphs(stored)
        models = {name: load(graph) for name, graph in plain.items()}
        for graph in stored.spec.graphs:
            if graph.pasts:
                store_in_int8(models[graph.name], graph, stored.path)
                models[graph.name].metadata_props["zoo.cache"] = "int8"
        return self._candidate(stored, folder, models, plain, reduced)

    def read(self, export: Export) -> CacheCandidate:
        reduced, plain = self._base_graphs(export.stored)
        models = {name: load(graph) for name, graph in export.read().items()}
        return self._candidate(export.stored, export.stored.path, models, plain, reduced)

    def _base_graphs(self, stored: ModelDirectory) -> tuple[ReducedModel | None, dict[str, bytes]]:
        """Return the verified model with quantised weights that the graphs are made from, if any, and its graphs."""
        if self.base.precision:
            weights = Export(stored, self.base.name)
            weights.check()
            weights.check_verified()
            reduced = read_reduced(stored, self.base.name)
            return reduced, reduced.files()
        options = {"functions": False, "windows": False, "profile": self.base.name or PORTABLE}
        return None, make_graphs(stored, Options.from_dict(options))

    def _candidate(
        self,
        stored: ModelDirectory,
        folder: Path,
        models: Mapping[str, ir.Model],
        plain: Mapping[str, bytes],
        reduced: ReducedModel | None,
    ) -> CacheCandidate:
        # The evidence is tied to the weights that the graphs read, although another variant owns their file.
        tied = {} if reduced is None else {reduced.path.name: stored.files[reduced.path.name]["sha256"]}
        return CacheCandidate(
            stored=stored,
            variant=self.variant,
            folder=folder,
            files={name: dump(model) for name, model in models.items()},
            facts={"files": tied} if tied else {},
            models=models,
            plain=plain,
            reduced=reduced,
        )

    def compare(self, candidate: CacheCandidate, comparison: Comparison) -> Report:
        check_memory(candidate.stored)
        models = candidate.with_probes()
        subject: CacheSubject | QuantizedCacheSubject
        if candidate.reduced is not None:
            subject = QuantizedCacheSubject(candidate.stored, candidate.quantized(models), comparison.provider)
        else:
            files = {name: dump(model) for name, model in models.items()}
            subject = CacheSubject(candidate.stored, files, candidate.plain, comparison.provider)
        # The tasks take floats where these graphs have integers.
        return judge(Sweep(subject, comparison.longest), comparison, run_tasks=False)

    def certificate(self, candidate: CacheCandidate, comparison: Comparison) -> Certificate:
        """Measure the divergence from the module in float64."""
        stored = candidate.stored
        tokens = self._sample or sample(stored, self.text)
        reference = TorchExecutor(persist.load_directory(stored).double())
        bound = BOUNDS[self.base.name] if self.base.precision else CACHE_BOUND
        runtime = _open_from_empty(candidate, comparison)
        certificate = measure(stored.spec.graphs, tokens, reference, runtime, bound.at(self.max_kl))
        graph = next(graph for graph in stored.spec.graphs if graph.pasts)
        facts = {
            "cache": "int8",
            "weights": self.base.name if self.base.precision else "float32",
            "reference": "the module in float64",
            "past_bytes": {
                str(count): {
                    name: past_bytes(item, np.dtype(np.float32), count)
                    for name, item in (("int8", graph.with_int8_cache()), ("float32", graph))
                }
                for count in TOKENS
            },
            "sample": tokens.to_dict(),
        }
        return Certificate({**facts, **certificate.evidence}, certificate.failures)


def _open_from_empty(candidate: CacheCandidate, comparison: Comparison) -> OnnxExecutor:
    """Open the graphs on the stored weights."""
    if candidate.reduced is not None:
        opened = open_reduced(candidate.quantized(candidate.models), provider=comparison.provider)
        return _FromEmpty(opened.sessions, opened.dtype)
    sessions = {
        name: open_session(file, weights=candidate.stored.path, provider=comparison.provider, spin=False)
        for name, file in candidate.files.items()
    }
    return _FromEmpty(sessions, np.dtype(np.float32))


class _FromEmpty(OnnxExecutor):
    """Runs graphs that store int8 on texts without a past, as if they stored floats."""

    def __init__(self, sessions: Any, dtype: Any) -> None:
        super().__init__(sessions, dtype, twice=False)

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        stored = graph.with_int8_cache() if graph.pasts else graph
        rows = len(next(iter(feeds.values())))
        return super().__call__(stored, {**feeds, **empty_past(stored, rows, self.dtype)})
