"""Batches of ``zoo run``: many files of inputs, run by several workers into a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import plugins
from zoo.cli.options import is_quiet
from zoo.cli.output import echo, message
from zoo.cli.progress import show_progress
from zoo.errors import ArtifactError, UsageError
from zoo.tables import LINES, PARQUET, TABLES
from zoo.version import __version__

if TYPE_CHECKING:
    from zoo_runtime.batch import Plan

__all__ = ["check_batch", "plan_of", "run_batches"]


def check_batch(inputs: str | None, output: str | None, others: Sequence[str]) -> None:
    """Raise :class:`UsageError` for options that a batch lacks, or does not have."""
    if inputs in (None, "-") or output is None:
        raise UsageError("a batch needs files and a folder", "--input, --output", "name both")
    if others:
        raise UsageError("not for a batch", ", ".join(others), "leave it out")
    if Path(output).suffix.lower() in (*LINES, *TABLES, PARQUET) and not Path(output).is_dir():
        raise UsageError("the results of a batch are files in a folder", f"--output {output}", "name a folder")


def run_batches(
    directory: Path,
    inputs: str,
    output: str,
    *,
    engine: str,
    workers: int | None,
    resume: bool,
    session: Mapping[str, Any],
    **options: Any,
) -> None:
    """Run a batch, and report it.

    Raises :class:`ArtifactError` if inputs or whole files have failed.
    """
    from zoo_runtime.batch import run_batch
    from zoo_runtime.batch.urls import is_url, local

    place = output if is_url(output) else str(Path(local(output)).absolute())
    plan = plan_of(directory, place, {**session, "threads": session.get("threads") or 1}, **options)

    def warn(text: str) -> None:
        message("warning", text)

    with show_progress("running files") as show:
        summary = run_batch(plan, inputs, engine=engine, workers=workers, resume=resume, warn=warn, show=show)
    resumed = f", {summary.kept} of them from an earlier run" if summary.kept else ""
    if not is_quiet():
        echo(f"{output}: {summary.rows - summary.failed} results of {_files(summary.shards)}{resumed}", err=True)
    if summary.lost:
        problem = f"{len(summary.lost)} of {_files(summary.shards)} failed"
        raise ArtifactError(problem, inputs, "see the warnings above; --resume runs them again")
    if summary.failed:
        raise ArtifactError(f"{summary.failed} of {summary.rows} inputs failed", directory, "see the warnings above")


def plan_of(directory: Path, output: str, session: Mapping[str, Any], **options: Any) -> Plan:
    """Return the plan of a run, with the digest of its model and absolute paths.

    Args:
        directory: the model directory.
        output: the file or folder of results.
        session: arguments of :func:`zoo_runtime.load_session`.
        options: the other fields of the plan.
    """
    from zoo_runtime.batch import Plan
    from zoo_runtime.batch.plan import plain_selection
    from zoo_runtime.batch.shards import model_digest
    from zoo_runtime.onnx_runtime.ort import ort
    from zoo_runtime.running.choosing import chosen_provider

    session = {name: value for name, value in session.items() if value is not None}
    session["provider"] = chosen_provider(session["provider"], directory)
    if "tokenizer" in session:
        session["tokenizer"] = os.path.abspath(session["tokenizer"])  # noqa: PTH100  (resolve() follows links)
    if "draft" in options["options"]:
        options["options"] = {**options["options"], "draft": str(Path(options["options"]["draft"]).absolute())}
    options["settings"] = [
        f"draft={Path(text[6:]).absolute()}" if text.startswith("draft=") else text for text in options["settings"]
    ]
    place = Path(directory).absolute()
    plan = Plan(
        directory=str(place),
        model="",
        output=output,
        session=session,
        versions=_versions(ort.__version__),
        selection=plain_selection(plugins.active().selection),
        **options,
    )
    return replace(plan, model=model_digest(place, session, plan.task, plan.draft))


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _versions(onnxruntime: str) -> dict[str, str]:
    """Return the versions of packages that compute and write results."""
    versions = {"attention-zoo": __version__, "onnxruntime": onnxruntime}
    with contextlib.suppress(PackageNotFoundError):
        versions["pyarrow"] = version("pyarrow")
    return versions
