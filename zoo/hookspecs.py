"""The whole plugin contract.

A plugin is a torch-free module named by an entry point of the group ``zoo.plugins``. It states the contract it was
written for and implements any of the hooks below::

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

from zoo.contract import Architecture, Command, Exporter, Importer, Task

__all__ = ["OLDEST_API", "ZOO_API", "hookimpl", "hookspec"]

ZOO_API = 1
"""The version of this contract. Hooks and optional fields are added without a new one."""
OLDEST_API = 1
"""The oldest one that plugins may be written for."""

hookspec = pluggy.HookspecMarker("zoo")
hookimpl = pluggy.HookimplMarker("zoo")


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
    """Formats that models are exported to, by reference."""


@hookspec
def zoo_tasks() -> Sequence[Task]:  # type: ignore[empty-body]
    """What exported models can be run for, by reference."""


@hookspec
def zoo_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Commands beside zoo's own, by reference."""
