"""metrics.jsonl: a record of every step that is logged or evaluated. Importing this module imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError
from zoo.plugins.plain import read_plain
from zoo.training.loop import Step
from zoo.training.progress import Evaluation

__all__ = ["METRICS", "read_metrics", "read_row", "row_of", "step_of", "write_metrics"]

METRICS = "metrics.jsonl"


def row_of(step: Step, evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the record of a step."""
    row = {"step": step.number, **{key: value for key, value in asdict(step).items() if key != "number"}}
    if evaluation is not None:
        row["evaluation"] = {key: value for key, value in asdict(evaluation).items() if value != {}}
    return row


def step_of(row: Mapping[str, Any]) -> Step:
    """Return the step of a record. Raises ``ValueError`` for other data."""
    values = {"number" if key == "step" else key: value for key, value in row.items() if key != "evaluation"}
    return read_plain(Step, values, "a record")


def read_row(line: bytes) -> dict[str, Any]:
    """Return a record from its line. Raises ``ValueError`` for a line that :func:`write_metrics` does not write."""
    row: dict[str, Any] = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("a record is not an object")
    step_of(row)
    if "evaluation" in row:
        read_plain(Evaluation, row["evaluation"], "the evaluation of a record")
    return row


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the records in a file. Raises :class:`ArtifactError` if it is malformed."""
    try:
        return [read_row(line) for line in file.read_bytes().splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"not the metrics of a training run ({error})", file) from error


def write_metrics(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write records, one a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
