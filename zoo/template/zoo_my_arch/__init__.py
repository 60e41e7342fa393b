"""my-arch as a plugin of zoo. This module and the configuration describe models, so they never import torch."""

from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> list[zoo.Architecture]:
    """The classes are named, not imported: that happens when a model is made."""
    return [
        zoo.Architecture(
            name="my-arch", tasks=("text-generation",), reference="Authors and year, title",
            config="zoo_my_arch.config:MyArchConfig", model="zoo_my_arch.model:MyArch",
        )
    ]  # fmt: skip


@zoo.hookimpl
def zoo_presets() -> list[Path]:
    """Sizes that have a name."""
    return [Path(__file__).with_name("presets.toml")]
