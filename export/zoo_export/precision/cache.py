"""Exports with keys and values in int8, and their certified error.

The graphs are those of the portable export or of the profile ``cpu``, or those of a verified export with quantised
weights, rewritten by :mod:`zoo_export.graph.int8_cache`. They are compared by :mod:`zoo_export.precision.cache_parity`.
How far the rounding moves the model is measured on the text of :mod:`zoo_export.precision.certify`, against the module
in float64, whose keys and values are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.artifact import INT8_CACHES, PROFILES, Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import EXPORT_AGAIN, ArtifactError, ParityError, UsageError
from zoo.exporters import Progress
from zoo.models import persist
from zoo.probe.inputs import Feeds, empty_past
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.int8_cache import PROBE, probe, store_in_int8
from zoo_export.parity.again import compare_again
from zoo_export.parity.compare import judge
from zoo_export.parity.evidence import check_evidence, stage_export
from zoo_export.parity.laws import check_laws
from zoo_export.parity.memory import check_memory
from zoo_export.parity.report import Report
from zoo_export.parity.sweep import Sweep
from zoo_export.precision.cache_parity import CacheSubject, QuantizedCacheSubject
from zoo_export.precision.certify import BOUNDS, Bound, Sample, check_max_kl, measure, sample
from zoo_export.precision.quantize import Variant, open_variant, read_variant
from zoo_export.trace.cache import repeat_if_stale
from zoo_export.trace.make import PORTABLE, Options, make_graphs
from zoo_runtime.generation.memory import past_bytes
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype, open_session

__all__ = ["CACHE_BOUND", "export_cache", "verify_stored_cache"]

CACHE_BOUND = Bound(kl=0.005, cosine=0.999)
"""Error bounds of keys and values in int8 with float32 weights. With quantised weights, those of the weights apply."""
TOKENS = (512, 2000)
"""Numbers of tokens for which the evidence has the bytes of the past."""


def export_cache(
    directory: Path,
    variant: str,
    *,
    max_kl: float | None = None,
    text: Path | None = None,
    force: bool = False,
    provider: Provider = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Add graphs with keys and values in int8 to a model directory, if they are verified and within their bounds.

    Args:
        directory: a float32 model.
        variant: one of :data:`zoo.artifact.INT8_CACHES`.
        max_kl: maximum mean divergence from the model in float64, in nats.
        text: text to measure on; the built-in sample by default.
        force: replace an earlier export of this variant.
        provider: the execution provider.
        full_grid: compare at all points of the grid.
        progress: called with the number of each comparison and the total.

    Returns:
        The evidence, as written to parity.VARIANT.json.

    Raises:
        UsageError: invalid arguments, the past cannot be stored in int8, or the export already exists.
        ArtifactError: the variant has quantised weights, and these are not exported.
        ParityError: the graphs are wrong, or their error exceeds its bounds. Nothing is written.
    """
    stored = ModelDirectory.open(directory)
    export = Export(stored, variant)
    if stored.dtype != "float32":
        raise UsageError(f"a cache in int8 needs a float32 model, this one is {stored.dtype}", directory)
    if export.exists and not force:
        raise UsageError(f"already exported as {variant}", directory, EXPORT_AGAIN)
    check_dtype("float32", provider, directory)
    check_max_kl(stored, max_kl)
    tokens = sample(stored, text)

    def add() -> Report:
        laws = check_laws(stored)
        made = _Made(stored, variant)
        certificate, failures = made.certify(tokens, max_kl, provider)
        if failures:
            raise ParityError(f"{variant} is too far from the model: {failures[0]}", directory)
        report = made.compare(provider, full_grid, progress)
        if not report.passed:
            raise ParityError(report.verdict(), directory, "nothing was written")
        report.evidence |= {"certificate": certificate, "laws": laws}
        with stored.adding() as stage:
            stage_export(export, stage, made.files, report.evidence)
        return report

    return repeat_if_stale(add)


class _Made:
    """The graphs of a variant, and what they are made from.

    Args:
        stored: the model.
        variant: the name of the variant.
        files: its serialised graphs, if they exist already.
    """

    def __init__(self, stored: ModelDirectory, variant: str, files: Mapping[str, bytes] | None = None) -> None:
        self.stored, self.base = stored, INT8_CACHES[variant]
        if self.base in BOUNDS:
            weights = Export(stored, self.base)
            weights.check()
            weights.check_verified()
            self.variant: Variant | None = read_variant(stored, self.base)
            self.plain = self.variant.files()
        else:
            self.variant = None
            profile = self.base if self.base in PROFILES else PORTABLE
            options = Options.from_dict({"functions": False, "windows": False, "profile": profile})
            self.plain = make_graphs(stored, options)
        self.models: dict[str, ir.Model] = {}
        for graph in stored.spec.graphs:
            model = ir.from_proto(parse((files or self.plain)[graph.name]))
            if graph.pasts and files is None:
                store_in_int8(model, graph, stored.path)
                model.metadata_props["zoo.cache"] = "int8"
            self.models[graph.name] = model
        if files is None and not any(graph.pasts for graph in stored.spec.graphs):
            raise UsageError("the model has no past to store in int8", stored.path)
        self.files = {name: serialize(ir.to_proto(model)) for name, model in self.models.items()}

    def _with_probes(self) -> dict[str, ir.Model]:
        probes = {}
        for graph in self.stored.spec.graphs:
            if graph.pasts:
                probes[graph.name + PROBE] = self.models[graph.name].clone()
                probe(probes[graph.name + PROBE], graph)
        return self.models | probes

    def _resolved(self, variant: Variant, models: Mapping[str, ir.Model]) -> Variant:
        """Return a variant with other graphs, whose weights lie in the model's directory."""
        graphs = {name: variant.parse(serialize(ir.to_proto(model)), self.stored) for name, model in models.items()}
        return replace(variant, graphs=graphs)

    def compare(self, provider: Provider, full_grid: bool, progress: Progress | None) -> Report:
        """Compare the graphs with the module."""
        check_memory(self.stored)
        models = self._with_probes()
        if self.variant is None:
            files = {name: serialize(ir.to_proto(model)) for name, model in models.items()}
            sweep = Sweep(CacheSubject(self.stored, files, self.plain, provider))
        else:
            sweep = Sweep(QuantizedCacheSubject(self.stored, self._resolved(self.variant, models), provider))
        report = judge(sweep, full_grid=full_grid, progress=progress, run_tasks=False)
        if self.variant is not None:  # tie the evidence to these weights
            file = self.variant.file
            report.evidence["files"] = {file: self.stored.files[file]["sha256"]}
        return report

    def certify(self, tokens: Sample, max_kl: float | None, provider: Provider) -> tuple[dict[str, Any], list[str]]:
        """Measure the divergence from the module in float64.

        Returns:
            The evidence, and one line for each bound that is exceeded.
        """
        if self.variant is not None:
            opened = open_variant(self._resolved(self.variant, self.models), provider=provider)
            runtime = _FromEmpty(opened.sessions, opened.dtype)
        else:
            sessions = {
                name: open_session(file, weights=self.stored.path, provider=provider, spin=False)
                for name, file in self.files.items()
            }
            runtime = _FromEmpty(sessions, np.dtype(np.float32))
        reference = TorchExecutor(persist.load_directory(self.stored).double())
        bound = BOUNDS.get(self.base, CACHE_BOUND)  # type: ignore[call-overload]
        bound = bound if max_kl is None else replace(bound, kl=max_kl)
        found, failures = measure(self.stored.spec.graphs, tokens, reference, runtime, bound)
        graph = next(graph for graph in self.stored.spec.graphs if graph.pasts)
        sizes = {
            str(count): {
                name: past_bytes(item, np.dtype(np.float32), count)
                for name, item in (("int8", graph.with_int8_cache()), ("float32", graph))
            }
            for count in TOKENS
        }
        evidence = {
            "cache": "int8",
            "weights": self.base if self.variant is not None else "float32",
            "reference": "the module in float64",
            "past_bytes": sizes,
            "sample": tokens.to_dict(),
            **found,
        }
        return evidence, failures


class _FromEmpty(OnnxExecutor):
    """Runs graphs that store int8 on texts without a past, as if they stored floats."""

    def __init__(self, sessions: Any, dtype: Any) -> None:
        super().__init__(sessions, dtype, twice=False)

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        stored = graph.with_int8_cache() if graph.pasts else graph
        rows = len(next(iter(feeds.values())))
        return super().__call__(stored, {**feeds, **empty_past(stored, rows, self.dtype)})


def verify_stored_cache(
    directory: Path,
    variant: str,
    *,
    provider: Provider = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check all digests of an export with keys and values in int8, and compare its graphs again on this machine.

    Raises:
        ArtifactError: a file is altered or missing, or the weights have changed.
        ParityError: the graphs do not match the model on this machine.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, variant)
    export.check()
    graphs = export.read()
    check_evidence(export, graphs)
    export.check_files()
    if export.change() is not None:
        raise ArtifactError(f"{variant} was made from other weights", directory, EXPORT_AGAIN)

    def compare(full: bool) -> Report:
        return _Made(stored, variant, graphs).compare(provider, full, progress)

    return compare_again(export, graphs, compare, full_grid=full_grid)
