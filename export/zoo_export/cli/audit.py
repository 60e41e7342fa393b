"""``zoo audit``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo.cli.completion import complete_directories, complete_tasks
from zoo.cli.options import (
    PATH,
    SectionedCommand,
    force_option,
    is_quiet,
    json_option,
    option,
    output_option,
    quiet_option,
)
from zoo.cli.output import VERDICTS
from zoo.cli.report import columns, emit_json, say
from zoo.errors import ParityError, UsageError
from zoo_export.cli.options import VERIFICATION, grid_option, sleep_when_idle
from zoo_export.cli.results import comparing

if TYPE_CHECKING:
    from zoo_export.audit.report import AuditReport


def _pairs(values: tuple[str, ...]) -> dict[str, str]:
    """Parse THEIRS=OURS."""
    pairs = dict[str, str]()
    for value in values:
        theirs, separator, ours = value.rpartition("=")
        if not (theirs and separator and ours):
            raise UsageError(f"{value!r} is not THEIRS=OURS", "--map", "write the graph's name, =, and the model's")
        if theirs in pairs:
            raise UsageError(f"{theirs} is mapped twice", "--map", "leave out one of the two")
        pairs[theirs] = ours
    return pairs


@click.command(
    "audit",
    cls=SectionedCommand,
    examples=(
        "zoo audit theirs/onnx/model.onnx --against gpt-tiny",
        "zoo audit encoder_model.onnx decoder_model.onnx --against checkpoint -o report",
    ),
    page="howto/audit.md",
)
@click.argument("graphs", type=PATH, nargs=-1, required=True, metavar="GRAPH...")
@click.option(
    "--against",
    shell_complete=complete_directories,
    type=PATH,
    required=True,
    metavar="DIR",
    help="Model directory or checkpoint.",
)
@click.option(
    "--map", "names", multiple=True, metavar="THEIRS=OURS", help="Input or output that a name of a graph stands for."
)
@click.option(
    "--task",
    shell_complete=complete_tasks,
    metavar="TASK",
    help="Task to import the checkpoint for; by default that of its class.",
)
@click.option(
    "--via",
    type=click.Choice(["transformers"]),
    help="Compare with the class of this library, even if zoo has an architecture of its own for the checkpoint.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a value when importing the checkpoint."
)
@grid_option
@output_option("Directory to write audit.json and the page audit.html to.")
@option("--figure", type=PATH, metavar="FILE", section=VERIFICATION, help="Write the report as one page: .html.")
@force_option("Replace an earlier audit or page.")
@json_option
@quiet_option
def command(
    graphs: tuple[Path, ...],
    against: Path,
    names: tuple[str, ...],
    task: str | None,
    via: str | None,
    settings: tuple[str, ...],
    grid: str,
    output: Path | None,
    figure: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Hold ONNX files that another tool made against the model that they claim to be.

    GRAPH is a file, or several that are one model: an encoder and a decoder, or a decoder and one with a past. Status 4
    means that an output is wrong; status 0 that all that could be asked is right, within the limits that are named.
    """
    from zoo_export.audit.page import check_page, write_audit, write_page

    sleep_when_idle()
    pairs = _pairs(names)
    check_page(figure, output, force=force)
    from zoo_export.audit.audit import audit

    with comparing() as progress:
        report = audit(
            graphs,
            against,
            names=pairs,
            task=task,
            via=via,
            settings=settings,
            full_grid=grid == "full",
            progress=progress,
        )
    if output is not None:
        write_audit(report, output, force=force)
    if figure is not None:
        write_page(report, figure, force=force)
    if as_json:
        emit_json("audit", report.to_dict())
    else:
        _say(report)
    if not report.passed:
        raise ParityError(report.verdict(), ", ".join(map(str, graphs)))


def _say(report: AuditReport) -> None:
    if is_quiet():
        return
    for graph in report.graphs:
        say(f"{graph['file']}: {graph['part']}, by {graph['producer']}, opset {graph['opset']}, {graph['precision']}")
    say(f"against {report.model['source']}: {report.model['architecture']} for {report.model['task']}")
    columns([("QUESTION", "ANSWER", "POINTS", "WRONG"),
             *((item.name, item.verdict, item.points, item.wrong) for item in report.questions)],
            right=[2, 3], verdicts=VERDICTS)  # fmt: skip
    say(f"asked: {report.asked()}")
    if (covered := report.covered()) is not None:
        say(covered)
    for fault in report.faults:
        say(f"wrong: {fault}")
    for limit in report.limits:
        say(f"limit: {limit}")
    for note in report.notes:
        say(f"note: {note}")
    if report.passed:
        say(report.verdict())
