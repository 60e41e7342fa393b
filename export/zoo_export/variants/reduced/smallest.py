"""The choice of the smallest precision within a bound."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo.artifact import Export, ModelDirectory, precisions, variant_of
from zoo.errors import ParityError, UsageError, nearest
from zoo_export.certificate import Sample, check_max_kl, sample
from zoo_export.comparison import Comparison
from zoo_export.parity.report import Report
from zoo_export.variants import recipe_of
from zoo_export.variants.base import Recipe
from zoo_export.variants.reduced.recipe import BOUNDS, Reduced, ReducedCandidate, certify

__all__ = ["NoPrecisionError", "SmallestPrecision", "precision_recipe"]


class NoPrecisionError(ParityError):
    """No precision smaller than float32 is within its bounds."""


def precision_recipe(variant: str, *, max_kl: float | None = None, text: Path | None = None) -> Reduced:
    """Return the recipe of a variant in another precision. The arguments are those of :class:`Reduced`.

    Raises :class:`UsageError` for an unknown precision.
    """
    if variant_of(variant).precision is None:
        raise UsageError(f"unknown precision {variant!r}", None, nearest(variant, precisions()))
    recipe = recipe_of(variant, max_kl=max_kl, text=text)
    assert isinstance(recipe, Reduced)
    return recipe


class SmallestPrecision(Recipe[ReducedCandidate]):
    """The precision with the fewest bytes whose mean divergence is at most ``max_kl``, and which is verified.

    Args:
        max_kl: maximum mean divergence from float32, in nats.
        text: text to measure on; the built-in sample by default.
        candidates: variants with weights of their own to try; those that the model or the provider does not support
            are skipped.
    """

    variant_is_known = False

    def __init__(self, max_kl: float, *, text: Path | None = None, candidates: Iterable[str] = tuple(BOUNDS)) -> None:
        super().__init__("")
        self.max_kl = max_kl
        self.text = text
        self.recipes = [precision_recipe(variant, max_kl=max_kl, text=text) for variant in candidates]
        self.tried: list[dict[str, Any]] = []
        """The evidence for each precision that was tried."""
        self._report: Report | None = None
        self._sample: Sample | None = None
        self._comparison = Comparison()

    def check(self, stored: ModelDirectory, comparison: Comparison) -> None:
        check_max_kl(stored, self.max_kl)
        self._sample = sample(stored, self.text)
        self._comparison = comparison

    def make(self, stored: ModelDirectory, folder: Path) -> ReducedCandidate:
        """Make every precision, and keep the files of the smallest that is within the bound and verified.

        Raises :class:`NoPrecisionError` if there is none.
        """
        tokens = self._sample or sample(stored, self.text)
        provider = self._comparison.provider
        self.tried = tried = []
        candidates: list[tuple[Reduced, ReducedCandidate]] = []
        for recipe in self.recipes:
            try:
                recipe.check_model(stored, provider)
                candidates.append((recipe, recipe.make(stored, folder)))
            except UsageError as error:
                tried.append({"precision": recipe.precision, "passed": False, "why": str(error)})
        chosen: ReducedCandidate | None = None
        for recipe, candidate in sorted(candidates, key=lambda pair: pair[1].reduced.footprint()):
            if chosen is None:
                certificate = certify(stored, candidate.reduced, tokens, max_kl=self.max_kl, provider=provider)
                report = recipe.compare(candidate, self._comparison) if certificate.passed else None
                passed = report is not None and report.passed
                tried.append({**certificate.evidence, "passed": passed})
                if passed:
                    self._report = report
                    chosen = recipe.candidate(stored, candidate.reduced, {"certificate": tried[-1], "tried": tried})
                    continue
            candidate.reduced.path.unlink()
        if chosen is None:
            raise NoPrecisionError("no smaller precision is within the bounds", stored.path)
        return chosen

    def read(self, export: Export) -> ReducedCandidate:
        raise UsageError("which precision is the smallest is decided when it is made", export.stored.path)

    def compare(self, candidate: ReducedCandidate, comparison: Comparison) -> Report:
        """Return the comparison by which the precision was chosen."""
        assert self._report is not None
        return self._report
