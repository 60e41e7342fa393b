"""Options that all formats of ``zoo export`` share, and export to the formats of other exporters.

Imports neither torch nor onnx.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from zoo.artifact import ModelDirectory
from zoo.exporters import export_to
from zoo_export.cli.options import model_directory
from zoo_export.cli.results import comparing, say_record

__all__ = ["Target", "export_format"]


@dataclass(frozen=True)
class Target:
    """Source and destination of an export, and the form of its result."""

    model: str
    output: Path | None
    settings: tuple[str, ...]
    force: bool
    as_json: bool

    def directory(self) -> AbstractContextManager[tuple[Path, Path]]:
        """Return the directory to export in, and the name that it has at the end."""
        return model_directory(self.model, output=self.output, settings=self.settings, force=self.force)


def export_format(target: Target, format_name: str, options: object) -> None:
    """Export to the format of another exporter."""
    with target.directory() as (place, directory), comparing() as progress:
        record = export_to(place, format_name, options=options, force=target.force, progress=progress)
    record = replace(record, stored=ModelDirectory.open(directory, weights=False))
    say_record(record, format_name, "export", target.as_json)
