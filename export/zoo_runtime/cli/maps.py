"""The files of maps that ``zoo run --maps`` writes: a class or depth for each pixel of an image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.output import echo
from zoo.errors import UsageError
from zoo.storage import check_file_target, new_file

if TYPE_CHECKING:
    from zoo_runtime import Answer
    from zoo_runtime.running.runner import WritesMaps

__all__ = ["AnswerMaps"]


class AnswerMaps:
    """Writes the map of each answer to a folder, and its name to the result, as ``file``.

    Args:
        folder: is made if it is missing; must be empty unless ``force``.
        force: whether to replace files of the same names.
    """

    def __init__(self, folder: Path, *, force: bool) -> None:
        if folder.is_dir() and any(folder.iterdir()) and not force:
            raise UsageError("is not empty", f"--maps {folder}", "--force replaces files of the same names")
        check_file_target(folder / "map", force=True)
        self._folder = folder
        self._force = force
        self._count = 0

    def watch(self, runner: WritesMaps, answers: Iterator[Answer]) -> Iterator[Answer]:
        """Write the map of each answer before it is passed on."""
        for answer in answers:
            if answer.error is None:
                name = f"{answer.number}-{Path(answer.input).stem}" if isinstance(answer.input, str) else answer.number
                target = self._folder / f"{name}{runner.map_suffix}"
                with new_file(target, force=self._force) as path:
                    runner.write_map(answer.result, path)
                answer.result = {**answer.result, "file": target.name}
                self._count += 1
            yield answer
        echo(f"{self._folder}: {self._count} maps written", err=True)
