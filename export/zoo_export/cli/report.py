"""``zoo report``."""

from __future__ import annotations

from pathlib import Path

import click

from zoo.cli.completion import complete_directories
from zoo.cli.options import (
    PATH,
    SectionedCommand,
    force_option,
    json_option,
    option,
    output_option,
    quiet_option,
    signed_by_option,
)
from zoo.cli.report import bytes_text, emit_json, say
from zoo.errors import UsageError
from zoo.storage import check_file_target, new_file
from zoo_export.cli.options import VERIFICATION


@click.command(
    "report",
    cls=SectionedCommand,
    examples=("zoo report gpt-tiny -o report.html", "zoo report gpt-tiny -o report.html --check --force"),
    page="howto/report.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH, default=Path())
@option(
    "--check",
    is_flag=True,
    section=VERIFICATION,
    help="Also repeat the recorded comparison of each export on ONNX Runtime, as zoo verify --recorded does.",
)
@signed_by_option
@output_option("The page to write.", metavar="FILE.html")
@force_option("Replace an existing page.")
@json_option
@quiet_option
def command(
    directory: Path, check: bool, signed_by: Path | None, output: Path | None, force: bool, as_json: bool
) -> None:
    """Write the evidence for the exports in DIRECTORY as one HTML page, for readers who did not run them.

    Nothing is compared again, except with --check. The page is also written if a file is altered, or an export not
    verified: its first lines say so, and the status is 3 or 4.
    """
    from zoo_export.report.page import page_of, verdict_of
    from zoo_export.report.reading import read_directory

    if output is None:
        raise UsageError("no file for the page", "zoo report", "name one with -o FILE.html")
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError("the report is a page", output, "use the suffix .html")
    check_file_target(output, force=force)
    found = read_directory(directory, signed_by=signed_by, check=check)
    text = page_of(found)
    with new_file(output, force=force) as stage:
        stage.write_text(text, encoding="utf-8")
    failure = found.failure()
    if as_json:
        exports = [
            {"evidence": item.record.evidence_file, "files": item.files, "verified": item.doubt is None,
             "reason": item.doubt, "repeated": item.replayed}
            for item in found.exports
        ]  # fmt: skip
        facts = {"page": str(output), "bytes": output.stat().st_size, "verified": failure is None, "exports": exports}
        emit_json("report", {"directory": str(directory), **facts, "defects": dict(found.defects)})
    else:
        say(f"{output}: {verdict_of(found)}, {bytes_text(output.stat().st_size)}")
    if failure is not None:
        raise failure
