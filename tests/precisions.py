"""Models in another precision, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.artifact import ModelDirectory
from zoo_export.comparison import Comparison
from zoo_export.export import export_variant
from zoo_export.parity.report import Report
from zoo_export.variants import recipe_of
from zoo_export.variants.reduced.model import ReducedModel
from zoo_export.variants.reduced.smallest import precision_recipe


def make_reduced(stored: ModelDirectory, precision: str, folder: Path) -> ReducedModel:
    """Make a model's graphs in a precision, and write their weights to a folder."""
    recipe = precision_recipe(precision)
    recipe.check_model(stored)
    return recipe.reduce(stored, folder)


def compare_reduced(stored: ModelDirectory, reduced: ReducedModel) -> Report:
    """Compare a model in another precision with the module that has the same weights."""
    recipe = precision_recipe(reduced.precision)
    return recipe.compare(recipe.candidate(stored, reduced), Comparison())


def quantize(
    folder: Path, variant: str, *, comparison: Comparison = Comparison(), force: bool = False, **arguments: Any
) -> Report:
    """Add a precision, or keys and values in int8, to a model directory."""
    return export_variant(folder, recipe_of(variant, **arguments), comparison, force=force)[1]
