"""LFM2: a decoder of short convolutions and full attention, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="lfm2",
            tasks=("text-generation",),
            config="zoo_plugins.lfm2.config:Lfm2Config",
            model="zoo_plugins.lfm2.model:Lfm2",
            reference="Liquid AI 2025, LFM2 Technical Report",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="lfm2", architecture="lfm2", layout="zoo_plugins.lfm2.hub:LFM2")]
