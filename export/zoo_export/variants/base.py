"""The interface of variants: how the graphs of one are made, read, compared and measured.

The steps around that, from the laws of the model to the files that are written, are the same for every variant:
:mod:`zoo_export.export` and :mod:`zoo_export.verify` have them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from zoo.artifact import Export, ModelDirectory, variant_of
from zoo.errors import ArtifactError
from zoo_export.comparison import Comparison

if TYPE_CHECKING:
    from zoo_export.certificate import Certificate
    from zoo_export.parity.report import Report

__all__ = ["Candidate", "Recipe"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The graphs of a variant that are to be verified: new ones, or those of a model directory."""

    stored: ModelDirectory
    """The model."""
    variant: str
    """The name of the variant."""
    folder: Path
    """Where the files of this variant alone lie: the stage, or the model directory."""
    files: Mapping[str, bytes]
    """The serialised graphs by name."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the evidence that do not come from the comparison."""


C = TypeVar("C", bound=Candidate)


class Recipe(ABC, Generic[C]):
    """How one variant of an export is made, compared and measured.

    Args:
        variant: the name of the variant, as in :data:`zoo.artifact.VARIANTS`.
    """

    variant_is_known = True
    """Whether the name of the variant is known before it is made."""
    kept: tuple[str, ...] = ()
    """Entries of the evidence that a later comparison keeps."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def check(self, stored: ModelDirectory, comparison: Comparison) -> None:
        """Raise an error if the model, or this machine, cannot have this variant. Nothing has been computed yet."""

    def replaced(self, export: Export) -> list[str]:
        """Return the files of an earlier export that are removed: those that a new one may write under other names."""
        return []

    @contextmanager
    def begin(self, stored: ModelDirectory, folder: Path) -> Iterator[Callable[[], C]]:
        """Yield a function that is :meth:`make`. Its work may start at once, while the laws are checked."""
        yield partial(self.make, stored, folder)

    @abstractmethod
    def make(self, stored: ModelDirectory, folder: Path) -> C:
        """Make the graphs, and write the files that they need beside the model's own to ``folder``."""

    @abstractmethod
    def read(self, export: Export) -> C:
        """Return the graphs of an export, whose digests have been checked."""

    @abstractmethod
    def compare(self, candidate: C, comparison: Comparison) -> Report:
        """Compare the graphs with the model.

        Raises :class:`ParityError` if the comparison cannot be made, and :class:`UsageError` if the provider does not
        load.
        """

    def certificate(self, candidate: C, comparison: Comparison) -> Certificate | None:
        """Measure how far the variant moves the results of the model; None if it moves them by rounding alone."""
        return None

    def outdated(self, export: Export) -> ArtifactError | None:
        """Return an error if the export is of other weights than the model has now, and cannot follow them."""
        if variant_of(export.variant).follows_weights or export.change() is None:
            return None
        again = f"{export.traits.command(export.stored.path)} --force"
        return ArtifactError(f"{export.variant} was made from other weights", export.stored.path, again)
