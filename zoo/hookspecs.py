"""The complete plugin contract.

A plugin is a torch-free module named by an entry point of the group ``zoo.plugins``. It declares the version of this
contract that it was written for, and implements any of the hooks below::

    ZOO_API = 1

    @zoo.hookimpl
    def zoo_architectures():
        return [Architecture(name="gpt", tasks=("text-generation",), config="my_package.config:Config",
                             model="my_package.model:Model", reference="Radford et al. 2019")]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pluggy

from zoo.contract import Architecture, Command, Dataset, Engine, Exporter, Importer, Objective, Task, Tracker

__all__ = ["OLDEST_API", "ZOO_API", "hookimpl", "hookspec"]

ZOO_API = 1
"""The version of this contract. New hooks and new optional fields do not change it."""
OLDEST_API = 1
"""The oldest contract version that plugins may declare."""

hookspec = pluggy.HookspecMarker("zoo")
hookimpl = pluggy.HookimplMarker("zoo")
"""Decorator that marks a function of a plugin as the implementation of the hook of that name."""


@hookspec
def zoo_architectures() -> Sequence[Architecture]:  # type: ignore[empty-body]
    """Architectures, by reference."""


@hookspec
def zoo_presets() -> Sequence[Path]:  # type: ignore[empty-body]
    """TOML files of presets, in the format of registry.toml."""


@hookspec
def zoo_importers() -> Sequence[Importer]:  # type: ignore[empty-body]
    """Importers of foreign checkpoint layouts."""


@hookspec
def zoo_exporters() -> Sequence[Exporter]:  # type: ignore[empty-body]
    """Export formats, by reference."""


@hookspec
def zoo_tasks() -> Sequence[Task]:  # type: ignore[empty-body]
    """Tasks for which exported models can be run, by reference."""


@hookspec
def zoo_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Additional commands, by reference."""


@hookspec
def zoo_objectives() -> Sequence[Objective]:  # type: ignore[empty-body]
    """Training objectives, by reference."""


@hookspec
def zoo_datasets() -> Sequence[Dataset]:  # type: ignore[empty-body]
    """Data to train on, by reference."""


@hookspec
def zoo_trackers() -> Sequence[Tracker]:  # type: ignore[empty-body]
    """Trackers of experiments, by reference."""


@hookspec
def zoo_engines() -> Sequence[Engine]:  # type: ignore[empty-body]
    """Ways to run batches on several workers, by reference."""
