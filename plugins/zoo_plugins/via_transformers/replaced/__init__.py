"""Replacements for functions and methods of transformers, with the same values, which can be traced for all inputs."""

from zoo_plugins.via_transformers.replaced.functions import without_branches
from zoo_plugins.via_transformers.replaced.globals import Replacement, replaced
from zoo_plugins.via_transformers.replaced.images import whole_images
from zoo_plugins.via_transformers.replaced.methods import Lengths, replace_methods
from zoo_plugins.via_transformers.replaced.positions import count_positions, given_positions
from zoo_plugins.via_transformers.replaced.rotations import use_real_rotations
from zoo_plugins.via_transformers.replaced.tiles import call_with_tiles, use_whole_tiles

__all__ = [
    "Lengths",
    "Replacement",
    "call_with_tiles",
    "count_positions",
    "given_positions",
    "replace_methods",
    "replaced",
    "use_real_rotations",
    "use_whole_tiles",
    "whole_images",
    "without_branches",
]
