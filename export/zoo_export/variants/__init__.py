"""The variants of an export, each with a recipe of its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_export.variants.base import Recipe

__all__ = ["RECIPES", "recipe_of"]

_TRACED = "zoo_export.variants.traced:Traced"
_HALF = "zoo_export.variants.halves:Half"
_QUANTIZED = "zoo_export.variants.quantized.recipe:Quantized"
_ON_OPENVINO = "zoo_export.variants.openvino.recipe:QuantizedOnOpenVino"
_INT8_CACHE = "zoo_export.variants.int8_cache.recipe:Int8Cache"

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "": _TRACED,
        "attentions": _TRACED,
        "cpu": _TRACED,
        "cuda": _TRACED,
        "web": _TRACED,
        "serving": "zoo_export.variants.serving.recipe:Serving",
        "generate": "zoo_export.variants.loop.recipe:Loop",
        "adapters": "zoo_export.variants.adapters.recipe:WithAdapters",
        "float16": _HALF,
        "bfloat16": _HALF,
        "int8": _QUANTIZED,
        "int4": _QUANTIZED,
        "openvino-bfloat16": "zoo_export.variants.openvino.recipe:Bfloat16OnOpenVino",
        "openvino-int8": _ON_OPENVINO,
        "openvino-int4": _ON_OPENVINO,
        "int8-cache": _INT8_CACHE,
        "cpu-int8-cache": _INT8_CACHE,
        "int8-int8-cache": _INT8_CACHE,
        "int4-int8-cache": _INT8_CACHE,
    }
)
"""The class of each recipe, by the name of the variant. Most of them import PyTorch, so they are imported when used."""


def recipe_of(variant: str, **arguments: Any) -> Recipe[Any]:
    """Return the recipe of a variant. The arguments are those of its class; none are needed to verify an export.

    A variant that this version does not make is read as the plain export is.
    """
    module, _, name = RECIPES.get(variant, _TRACED).partition(":")
    recipe: Recipe[Any] = getattr(import_module(module), name)(variant, **arguments)
    return recipe
