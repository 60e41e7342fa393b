"""Verification of exports in a browser."""

from __future__ import annotations

from functools import partial
from typing import Any

from zoo.artifact import Export, ModelDirectory, Record, write_json
from zoo_export.comparison import Comparison
from zoo_export.parity.again import compare_again
from zoo_export.parity.compare import compare, judge
from zoo_export.parity.report import Report
from zoo_export.parity.sweep import Sweep
from zoo_export.variants.base import Candidate
from zoo_export.variants.halves import compare_half
from zoo_export.variants.reduced.recipe import ReducedCandidate
from zoo_export.web.browser import TIMEOUT, Browser, open_browser
from zoo_export.web.install import WebRuntime
from zoo_export.web.subjects import WebQuantizedSubject, WebSubject
from zoo_runtime.onnx_runtime.providers import check_dtype

__all__ = ["verify_in_browser", "web_record"]


def web_record(stored: ModelDirectory, runtime: WebRuntime, variant: str = "") -> Record:
    """Return the record of the comparisons of an export in a browser: evidence.RUNTIME[.VARIANT].json."""
    return Record(stored, variant, f"evidence.{runtime}")


def verify_in_browser(
    export: Export,
    candidate: Candidate,
    runtime: WebRuntime,
    comparison: Comparison,
    *,
    timeout: float = TIMEOUT,
) -> Report:
    """Compare an exported model with PyTorch in a headless browser.

    The rule, the grid and the conditions are those of ONNX Runtime. Writes the evidence of a runtime if it has none for
    these files and this version, and marks earlier evidence as failed if the comparison fails.

    Args:
        export: the export, whose digests have been checked.
        candidate: its graphs.
        runtime: the kind of browser.
        comparison: how they are compared.
        timeout: limit for a call in the browser, in seconds.

    Raises:
        IncomparableError: a call in the browser takes longer than ``timeout`` seconds.
        ParityError: the graphs do not match the model in this browser.
        UsageError: the browser, its driver or onnxruntime-web is not installed, or does not support the dtype.
    """
    stored = export.stored
    check_dtype(export.dtype, "cpu", stored.path)
    record = web_record(stored, runtime, export.variant)
    with open_browser(runtime, timeout) as browser:
        compare = partial(_compare, export, candidate, browser)
        report = compare_again(record, stored, compare, comparison, dtype=export.dtype)
    report.evidence["provider_sha256"] = browser.package.digest()
    earlier = record.evidence if record.exists else {}
    facts = {key: report.evidence.get(key) for key in ("provider", "provider_sha256", "browser", "device")}
    if not record.exists or not record.is_verified() or facts != {key: earlier.get(key) for key in facts}:
        files = {name: stored.files[name]["sha256"] for name in _files(export)}
        with stored.adding(action="verified") as stage:
            write_json(stage / record.evidence_file, {**report.evidence, "files": files})
    return report


def _files(export: Export) -> list[str]:
    """The graphs of an export, and the file of its own weights."""
    weights = export.traits.weights_file
    return sorted([*export.graph_files.values(), *([weights] if weights else [])])


def _compare(export: Export, candidate: Candidate, browser: Browser, comparison: Comparison) -> Report:
    make_subject: Any = partial(WebSubject, browser=browser)
    stored = export.stored
    if not isinstance(candidate, ReducedCandidate):
        report = compare(stored, candidate.files, comparison, declared=export.graphs, make_subject=make_subject)
    elif export.traits.dtype is None:
        report = judge(Sweep(WebQuantizedSubject(stored, candidate.reduced, browser)), comparison)
    else:
        report = compare_half(candidate, comparison, make_subject)
    report.subject = f"the export on {browser.provider}"
    report.evidence |= {"device": browser.device} if browser.device else {}
    return report
