"""Atomic changes to a directory: a crash leaves the old state or the new one, never a mixture.

A new directory is staged beside its target and renamed once. An existing directory is replaced only if it holds nothing
but files that zoo wrote. Additions to an existing directory are staged inside it; renaming the stage to ``.zoo-commit``
commits them, and the next process to open the directory finishes interrupted moves, if the committed files are the ones
that their manifest lists. Writers lock the directory that they change. A stage is locked while its writer lives and
contains a marker, so that abandoned stages are recognised and removed, and folders of the same name are not.
"""

from zoo.storage.changes import add_to_directory, new_directory, new_file
from zoo.storage.recovery import recover, settled
from zoo.storage.stages import scratch_folder, sweep
from zoo.storage.targets import Owned, check_file_target, check_target, is_same_file

__all__ = [
    "Owned",
    "add_to_directory",
    "check_file_target",
    "check_target",
    "is_same_file",
    "new_directory",
    "new_file",
    "recover",
    "scratch_folder",
    "settled",
    "sweep",
]
