"""Reporting of comparisons by the exporter's commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import plugins
from zoo.artifact import (
    PREFILL,
    Measured,
    Record,
    abridged,
    coverage_summary,
    export_file,
    measured_outputs,
    variant_of,
    worst_of,
)
from zoo.cli.output import VERDICTS, message
from zoo.cli.progress import show_progress
from zoo.cli.report import emit_json, say

if TYPE_CHECKING:
    from zoo.exporters import Progress
    from zoo_export.parity.report import Report

__all__ = ["comparing", "measuring", "say_record", "say_report", "summary"]


@contextmanager
def comparing() -> Iterator[Progress | None]:
    """Show a progress bar of comparisons. The callback takes a comparison's number, from 1, before it starts."""
    with show_progress("comparing") as show:
        yield None if show is None else lambda number, total: show(number - 1, total)


@contextmanager
def measuring() -> Iterator[dict[str, Any]]:
    """Show a progress bar of measurements, which names the current one. Yields arguments of the benchmarks."""
    with show_progress("", detailed=True) as bar:
        if bar is None:
            yield {}
            return
        bar.describe("measuring")
        yield {"progress": lambda number, total: bar(number - 1, total), "describe": bar.describe}


def summary(report: Report, variant: str = "") -> dict[str, Any]:
    """Summarise a comparison for a command's JSON: its size and the worst output."""
    interface = variant_of(variant).interface
    if interface == "loop":
        parts = report.evidence["comparisons"].values()
        return {
            "verified": report.passed,
            "provider": report.evidence["provider"],
            "files": ["generate.onnx"],
            "tokens": sum(level["tokens"] for part in parts for level in part["levels"].values()),
        }
    outputs = measured_outputs(report.evidence)
    worst = _worst(report)
    names = [*report.evidence["graphs"], *([PREFILL] if interface == "rows" else [])]
    return {
        "verified": report.passed,
        "provider": report.evidence["provider"],
        "points": len(report.evidence["grid"]["points"]),
        "left_out": report.evidence["grid"]["left_out"],
        "unseen": [line for part in report.evidence["grid"].get("coverage", {}).values() for line in part["unseen"]],
        "magnitudes": report.evidence["grid"].get("magnitudes", []),
        "non_finite": report.evidence["grid"].get("non_finite", {}),
        "not_perturbed": report.evidence.get("not_perturbed", []),
        "files": [export_file(name, variant, "onnx") for name in names],
        "outputs": len(outputs),
        "worst": {
            "graph": worst.graph,
            "output": worst.output,
            "optimisations": worst.level,
            "in_float32": worst.in_float32,
            **worst.errors,
        },
    }


def _worst(report: Report) -> Measured:
    """Return the output that is nearest to its limit."""
    worst = worst_of(measured_outputs(report.evidence))
    assert worst is not None  # every graph has outputs
    return worst


def say_report(report: Report, directory: Path, variant: str = "") -> None:
    """Print the summary of a comparison in two lines."""
    facts = summary(report, variant)
    if variant_of(variant).interface == "loop":
        say(
            f"{directory}: generate.onnx verified on {facts['provider']} at {facts['tokens']} tokens", verdicts=VERDICTS
        )
        return
    worst = _worst(report)
    where = f"{worst.name}, {worst.how}" if worst.how else worst.name
    left = f" ({facts['left_out']} of the full grid left out)" if facts["left_out"] else ""
    say(
        f"{directory}: {', '.join(facts['files'])} verified on {facts['provider']} at {facts['points']} points{left}",
        verdicts=VERDICTS,
    )
    say(f"worst output {where}: error {worst.errors['max_abs_error']:.1e}, limit {worst.errors['limit']:.1e}")
    if facts["magnitudes"]:
        say(_magnitudes(facts["magnitudes"]))
    for name, comparison in facts["non_finite"].items():
        if not comparison["equal"]:
            say(f"inputs with {name} are refused: {comparison['reason']}")
    if tensors := facts["not_perturbed"]:
        say(f"tensors compared with their stored values only: {abridged(tensors)}")
    covered = coverage_summary(report.evidence)
    if covered is not None:
        say(covered)


def _magnitudes(magnitudes: Sequence[Mapping[str, Any]]) -> str:
    """Return which floating-point inputs were compared, and which were left out at some level."""
    names = {False: ["mean 0, deviation 1"], True: []}
    for item in magnitudes:
        names[bool(item["left_out"])].append(f"mean {item['mean']:g}, deviation {item['deviation']:g}")
    rest = f"; left out, because PyTorch itself is inaccurate: {'; '.join(names[True])}" if names[True] else ""
    return f"floating-point inputs compared: {'; '.join(names[False])}{rest}"


def say_record(record: Record, format_name: str, command: str, as_json: bool) -> None:
    """Print the files that another format's exporter wrote or verified, and warn if they are not verified."""
    directory, files, verified = record.stored.path, ", ".join(record.files), record.evidence["verified"]
    by, _ = plugins.active().exporter(format_name)
    if not verified:
        problem = f"{files} NOT VERIFIED: {by} does not compare its files with the model"
        message("warning", f"{directory}: {problem}")
    if as_json:
        facts = {"format": format_name, "files": record.files, "verified": verified, "evidence": record.evidence}
        emit_json(command, {"directory": str(directory), **facts})
    elif verified:
        say(f"{directory}: {files} verified by {by}", verdicts=VERDICTS)
