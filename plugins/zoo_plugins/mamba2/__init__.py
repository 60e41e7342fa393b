"""Mamba-2: a state-space decoder, whose past has a fixed size, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="mamba2",
            tasks=("text-generation",),
            config="zoo_plugins.mamba2.config:Mamba2Config",
            model="zoo_plugins.mamba2.model:Mamba2",
            reference="Dao and Gu 2024, Transformers are SSMs",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="mamba2", architecture="mamba2", layout="zoo_plugins.mamba2.hub:MAMBA2")]
