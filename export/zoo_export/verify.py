"""Verification of existing exports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast

from zoo.artifact import (
    ADAPTERS,
    ATTENTION_INPUTS,
    ATTENTIONS,
    INT8_CACHES,
    LOOP,
    PRECISIONS,
    PROFILES,
    SERVING,
    WEB,
    Export,
    ModelDirectory,
)
from zoo.errors import ParityError, UsageError, argument
from zoo.exporters import Job, Progress
from zoo.plots.plot import Plot
from zoo.probe.inputs import make_feeds
from zoo_export.parity.compare import compare
from zoo_export.parity.evidence import check_evidence, check_graphs, revoking, write_export
from zoo_export.parity.laws import check_laws
from zoo_export.parity.memory import check_memory, longest_input
from zoo_export.parity.modules import ModuleError
from zoo_export.parity.plot import draw_modules
from zoo_export.parity.reference import SEED
from zoo_export.parity.report import Report
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import running, typical_point
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype

__all__ = ["Runtime", "diff_model", "plot_modules", "verify_model", "verify_onnx"]

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
    directory = Path(directory)
    if runtime == "web-wasm" or runtime == "web-webgpu":
        from zoo_export.web.verify import verify_in_browser

        limit = {} if timeout is None else {"timeout": timeout}
        return verify_in_browser(directory, runtime, variant=variant, full_grid=full_grid, progress=progress, **limit)
    if timeout is not None:
        raise UsageError("a time limit is for browsers", argument("runtime", runtime), "leave it out")
    if runtime != "onnxruntime" and variant:
        raise UsageError(f"the variant {variant} runs on onnxruntime only", argument("runtime", runtime))
    if variant in PRECISIONS:
        from zoo_export.precision.certify import verify_stored_variant

        return verify_stored_variant(
            directory, cast(Any, variant), provider=provider, full_grid=full_grid, progress=progress
        )
    if variant in INT8_CACHES:
        from zoo_export.precision.cache import verify_stored_cache

        return verify_stored_cache(directory, variant, provider=provider, full_grid=full_grid, progress=progress)
    if variant == ADAPTERS:
        from zoo_export.adapters.export import verify_adapters

        return verify_adapters(directory, provider=provider, full_grid=full_grid, progress=progress)
    if variant in PROFILES:
        provider = cast(Provider, variant)
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, variant)
    export.check()
    graphs = export.read()
    check_evidence(export, graphs)
    if runtime != "onnxruntime":
        from zoo_export.parity.runtimes import compare_on

        return _passed(compare_on(runtime, stored, graphs, full_grid=full_grid, progress=progress), directory)
    full_grid = full_grid or export.evidence.get("failed_full_grid", False)
    if variant == LOOP:
        from zoo_export.parity.loop import compare_loop

        plain = Export(stored)
        plain.check()
        plain.check_verified()
        with revoking(export, graphs):
            report = _passed(compare_loop(stored, plain.read(), graphs[LOOP], provider=provider), directory)
    else:
        with revoking(export, graphs, full_grid=full_grid):
            laws = check_laws(stored)
            report = compare(
                stored, graphs, declared=export.graphs, provider=provider, full_grid=full_grid, progress=progress
            )
            report.evidence["laws"] = laws
            _passed(report, directory)
    if not export.is_verified():
        options = {key: export.evidence[key] for key in ("options", ATTENTION_INPUTS) if key in export.evidence}
        write_export(export, graphs, report.evidence | options, action="verified")
    return report


def _passed(report: Report, directory: Path) -> Report:
    """Return a report. Raises :class:`ParityError` if it is not one of success."""
    if not report.passed:
        raise ParityError(report.verdict(), directory)
    return report


def verify_onnx(job: Job) -> dict[str, Any]:
    """Repeat the comparison of an ONNX export (the exporter's ``verify``)."""
    return verify_model(job.folder, variant=job.variant, progress=job.progress).evidence


def diff_model(directory: Path, *, variant: str = "", provider: Provider = "cpu") -> dict[str, list[ModuleError]]:
    """Compare each module's output with float64 at one point (two rows, padded, with a past), for each graph.

    The graphs are the exported ones or, if there is no export, newly traced ones. Differences are no errors.

    Raises:
        ArtifactError: a file is altered or missing, or a graph violates the ONNX standard.
        IncomparableError: the comparison would take more memory than there is.
        ParityError: a graph cannot be run at this point, or reads weights that are not those of the model.
        UsageError: the variant cannot be compared by modules, or the provider does not load.
    """
    if variant in (LOOP, ADAPTERS, SERVING, *PRECISIONS, *INT8_CACHES):
        what = f"the variant {variant} cannot be compared by modules"
        raise UsageError(what, argument("variant"), "compare the plain export")
    stored = ModelDirectory.open(directory)
    check_dtype(stored.dtype, provider, directory)
    export = Export(stored, variant)
    if export.exists or variant not in ("", ATTENTIONS, *PROFILES, WEB):
        export.check()
    from zoo_export.trace.make import PORTABLE, Options, make_graphs

    profile = variant if variant in (*PROFILES, WEB) else PORTABLE
    options = Options.from_dict({"attentions": variant == ATTENTIONS, "profile": profile})
    graphs = export.read() if export.exists else make_graphs(stored, options, cached=False)
    check_graphs(export, graphs)
    check_memory(stored, export.graphs)
    subject = OnnxSubject(stored, graphs, provider, export.graphs)
    longest = longest_input(stored.spec.config, subject.graphs)
    point = typical_point(subject.graphs, longest, subject.fixed)
    feeds = make_feeds(subject.graphs, point, SEED, longest, fixed=subject.fixed)
    with running(f"at {point}", directory):
        return {name: subject.module_errors("off", name, feeds, point) for name in graphs}


def plot_modules(directory: str | os.PathLike[str], *, variant: str = "", provider: Provider = "cpu") -> Plot:
    """Plot the error of each module's output against float64, in the graphs and in torch.

    Arguments and errors are those of ``zoo diff``, which compares the modules.

    Raises:
        UsageError: matplotlib is not installed; and all others that ``zoo diff`` reports but for differences.
    """
    found = diff_model(Path(directory), variant=variant, provider=provider)
    name = str(ModelDirectory.open(Path(directory)).description["name"])
    return draw_modules(f"{name} ({variant})" if variant else name, found)
