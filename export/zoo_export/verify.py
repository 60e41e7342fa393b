"""Verification of existing exports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from zoo.artifact import Export, ModelDirectory
from zoo.errors import ParityError, UsageError, argument
from zoo.exporters import Job, Progress
from zoo_export.comparison import Comparison
from zoo_export.parity.again import compare_again
from zoo_export.parity.evidence import check_evidence, write_export
from zoo_export.parity.report import Report
from zoo_export.parity.runtimes import check_runtime
from zoo_export.variants import recipe_of
from zoo_export.variants.base import Candidate, Recipe
from zoo_runtime.onnx_runtime.providers import Provider

__all__ = ["Runtime", "verify_model", "verify_onnx"]

Runtime = Literal["onnxruntime", "openvino", "reference", "web-wasm", "web-webgpu"]
"""Runtimes that an export can be compared on.

``reference`` is the slow evaluator of the onnx package, and ``web-wasm`` and ``web-webgpu`` are onnxruntime-web in a
browser.
"""


def verify_model(
    directory: str | os.PathLike[str],
    *,
    variant: str = "",
    runtime: Runtime = "onnxruntime",
    provider: Provider = "cpu",
    full_grid: bool = False,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check all digests of an exported model and compare it with PyTorch on this machine.

    Writes the evidence if the export was not verified before, otherwise nothing. If the comparison fails, evidence of
    an earlier success is marked as failed, so that the export counts as unverified until it passes, over the full grid
    if it failed there. Comparisons in a browser have evidence of their own
    (``zoo verify --runtime``); those on OpenVINO and on the evaluator write nothing. ``timeout`` limits each call in a
    browser, in seconds, 600 by default.

    Raises:
        ArtifactError: a file is altered or missing.
        ParityError: the graphs do not match the model on this machine.
        UsageError: the runtime is not installed, or the provider does not load.
    """
    in_browser = runtime == "web-wasm" or runtime == "web-webgpu"
    if timeout is not None and not in_browser:
        raise UsageError("a time limit is for browsers", argument("runtime", runtime), "leave it out")
    stored = ModelDirectory.open(Path(directory), rehash=True)
    export = Export(stored, variant)
    check_runtime(export, runtime)
    export.check()
    graphs = export.read()
    candidate, recipe = _read(export, graphs)
    comparison = Comparison(provider=export.traits.provider or provider, full_grid=full_grid, progress=progress)
    if runtime == "web-wasm" or runtime == "web-webgpu":
        from zoo_export.web.verify import verify_in_browser

        limit = {} if timeout is None else {"timeout": timeout}
        return verify_in_browser(export, candidate, runtime, comparison, **limit)
    if runtime != "onnxruntime":
        from zoo_export.parity.foreign import compare_on

        report = compare_on(runtime, stored, graphs, comparison)
        if not report.passed:
            raise ParityError(report.verdict(), stored.path)
        return report
    return _verify(export, graphs, recipe, candidate, comparison)


def verify_onnx(job: Job) -> dict[str, Any]:
    """Repeat the comparison of an ONNX export (the exporter's ``verify``)."""
    return verify_model(job.folder, variant=job.variant, progress=job.progress).evidence


def _read(export: Export, graphs: Mapping[str, bytes]) -> tuple[Candidate, Recipe[Any]]:
    """Return an export, whose digests and serialised graphs are checked, and the recipe of the variant."""
    check_evidence(export, graphs)
    recipe = recipe_of(export.variant)
    if not export.traits.follows_weights:
        export.check_files()
        outdated = recipe.outdated(export)
        if outdated is not None:
            raise outdated
    return recipe.read(export), recipe


def _verify(
    export: Export, graphs: Mapping[str, bytes], recipe: Recipe[Any], candidate: Candidate, comparison: Comparison
) -> Report:
    """Compare an export again, and record a failure, or a success after a failure."""

    def compare(comparison: Comparison) -> Report:
        return recipe.compare(candidate, comparison)

    def write(evidence: Mapping[str, Any], recorded: bytes | None = None) -> None:
        write_export(export, graphs, evidence, recorded, action="verified")

    report = compare_again(export, export.stored, compare, comparison, write, export.dtype)
    if not export.is_verified():
        kept = {key: export.evidence[key] for key in recipe.kept if key in export.evidence}
        # Files beside the graphs, such as quantised weights, stay part of what the evidence covers.
        made = {*export.graph_files.values(), export.recorded_file}
        others = {name: digest for name, digest in export.digests.items() if name not in made}
        write({**report.evidence, **kept, "files": others}, report.recorded)
    return report
