"""The files of maps that ``zoo run --maps`` writes: a class or depth for each pixel of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from zoo.cli.options import is_quiet
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
        folder: is made if it is missing; must be empty unless ``force`` or ``resume``.
        force: whether to replace files of the same names.
        resume: whether to keep files of the same names and contents, and refuse others.
    """

    def __init__(self, folder: Path, *, force: bool, resume: bool) -> None:
        if folder.is_dir() and any(folder.iterdir()) and not (force or resume):
            raise UsageError("is not empty", f"--maps {folder}", "--force replaces files of the same names")
        check_file_target(folder / "map", force=True)
        self._folder = folder
        self._force, self._resume = force, resume
        self._count = 0

    def watch(self, runner: WritesMaps, answers: Iterator[Answer]) -> Iterator[Answer]:
        """Write the map of each answer before it is passed on."""
        for answer in answers:
            if answer.error is None:
                name = f"{answer.number}-{Path(answer.input).stem}" if isinstance(answer.input, str) else answer.number
                target = self._folder / f"{name}{runner.map_suffix}"
                self._write(runner, answer.result, target)
                answer.result = {**answer.result, "file": target.name}
                self._count += 1
            yield answer
        if not is_quiet():
            echo(f"{self._folder}: {self._count} maps written", err=True)

    def _write(self, runner: WritesMaps, result: Mapping[str, Any], target: Path) -> None:
        """Write a map. An interrupted run may have written it, but not yet the result that names it."""
        if self._resume and target.is_file():
            with TemporaryDirectory() as scratch:
                again = Path(scratch) / target.name
                runner.write_map(result, again)
                if cmp(again, target, shallow=False):
                    return
            raise UsageError("is not the map of this input", target, "move it elsewhere, or choose another folder")
        with new_file(target, force=self._force) as path:
            runner.write_map(result, path)
