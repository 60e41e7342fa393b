"""Granite 4: a decoder of state-space layers and attention, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="granite-hybrid",
            tasks=("text-generation",),
            config="zoo_plugins.granite_hybrid.config:GraniteHybridConfig",
            model="zoo_plugins.granite_hybrid.model:GraniteHybrid",
            reference="Dao and Gu 2024, Transformers are SSMs; IBM 2025, Granite 4.0",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    layout = "zoo_plugins.granite_hybrid.hub:GRANITE_HYBRID"
    return [zoo.Importer(name="granitemoehybrid", architecture="granite-hybrid", layout=layout)]
