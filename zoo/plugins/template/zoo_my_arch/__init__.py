"""my-arch, a plugin for zoo. This module and the configuration must not import torch."""

from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> list[zoo.Architecture]:
    """Declare the architecture. Its classes are referred to by name and imported on first use."""
    return [
        zoo.Architecture(
            name="my-arch", tasks=("text-generation",), reference="Authors and year, title",
            config="zoo_my_arch.config:MyArchConfig", model="zoo_my_arch.model:MyArch",
        )
    ]  # fmt: skip


@zoo.hookimpl
def zoo_presets() -> list[Path]:
    """Return the preset files."""
    return [Path(__file__).with_name("presets.toml")]
