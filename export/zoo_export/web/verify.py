"""Verification of exports in a browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

from zoo.artifact import ATTENTIONS, HALVES, PRECISIONS, WEB, Export, ModelDirectory, Record, write_json
from zoo.errors import EXPORT_AGAIN, ArtifactError, IncomparableError, ParityError, UsageError, argument
from zoo.exporters import Progress
from zoo_export.parity.compare import compare, judge
from zoo_export.parity.evidence import check_evidence
from zoo_export.parity.laws import check_laws
from zoo_export.parity.report import Report
from zoo_export.parity.sweep import Sweep
from zoo_export.precision.parity import as_model
from zoo_export.precision.quantize import read_variant
from zoo_export.web.browser import TIMEOUT, Browser, open_browser
from zoo_export.web.install import WebRuntime
from zoo_export.web.subjects import WebQuantizedSubject, WebSubject
from zoo_runtime.onnx_runtime.providers import check_dtype

__all__ = ["verify_in_browser", "web_record"]

_VARIANTS = ("", "cpu", WEB, ATTENTIONS, *PRECISIONS)


def web_record(stored: ModelDirectory, runtime: WebRuntime, variant: str = "") -> Record:
    """Return the record of the comparisons of an export in a browser: evidence.RUNTIME[.VARIANT].json."""
    return Record(stored, variant, f"evidence.{runtime}")


def verify_in_browser(
    directory: Path,
    runtime: WebRuntime,
    *,
    variant: str = "",
    full_grid: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Report:
    """Check all digests of an exported model, and compare it with PyTorch in a headless browser.

    The rule, the grid and the conditions are those of ONNX Runtime. Writes the evidence of a runtime if it has none for
    these files and this version, and marks earlier evidence as failed if the comparison fails.

    Raises:
        ArtifactError: a file is altered or missing.
        IncomparableError: a call in the browser takes longer than ``timeout`` seconds.
        ParityError: the graphs do not match the model in this browser.
        UsageError: the variant cannot run there; or the browser, its driver or onnxruntime-web is not installed.
    """
    if variant not in _VARIANTS:
        raise UsageError(f"the variant {variant} runs on onnxruntime only", argument("runtime", runtime))
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, variant)
    export.check()
    check_dtype(export.dtype, "cpu", directory)
    check_evidence(export, export.read())
    record = web_record(stored, runtime, variant)
    earlier = record.evidence if record.exists else {}
    with open_browser(runtime, timeout) as browser:
        try:
            report = _compare(export, browser, full_grid or earlier.get("failed_full_grid", False), progress)
            if not report.passed:
                report.subject = f"the export on {browser.provider}"
                raise ParityError(report.verdict(), directory)
        except IncomparableError:
            raise
        except ParityError as error:
            raise (record.revoked(error, failed_full_grid=full_grid) if record.exists else error) from error
    report.evidence["provider_sha256"] = browser.package.digest()
    facts = {key: report.evidence.get(key) for key in ("provider", "provider_sha256", "browser", "device")}
    if not record.exists or not record.is_verified() or facts != {key: earlier.get(key) for key in facts}:
        files = {name: stored.files[name]["sha256"] for name in _files(export)}
        with stored.adding(action="verified") as stage:
            write_json(stage / record.evidence_file, {**report.evidence, "files": files})
    return report


def _files(export: Export) -> list[str]:
    """The graphs of an export, and the file of its own weights."""
    weights = [f"model.{export.variant}.safetensors"] if export.variant in PRECISIONS else []
    return sorted([*export.graph_files.values(), *weights])


def _compare(export: Export, browser: Browser, full_grid: bool, progress: Progress | None) -> Report:
    stored = export.stored
    make_subject = partial(WebSubject, browser=browser)
    options: dict[str, Any] = {"full_grid": full_grid, "progress": progress}
    laws = check_laws(stored)
    if export.variant in PRECISIONS:
        variant = read_variant(stored, cast(Any, export.variant))
        export.check_files()
        if export.change() is not None:
            raise ArtifactError(f"{export.variant} was made from other weights", stored.path, EXPORT_AGAIN)
        if export.variant in HALVES:
            report = compare(as_model(stored, variant), variant.files(), make_subject=make_subject, **options)
            report.evidence |= {"config": stored.config_digest(), "weights": stored.weight_digests()}
        else:
            report = judge(Sweep(WebQuantizedSubject(stored, variant, browser)), **options)
    else:
        report = compare(stored, export.read(), declared=export.graphs, make_subject=make_subject, **options)
    report.evidence |= {"laws": laws, **({"device": browser.device} if browser.device else {})}
    return report
