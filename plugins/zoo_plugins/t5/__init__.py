"""T5 and mT5: an encoder-decoder with relative positions, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="t5",
            tasks=("text2text-generation", "feature-extraction", "sentence-embedding", "text-classification"),
            config="zoo_plugins.t5.config:T5Config",
            model="zoo_plugins.t5.model:T5",
            reference="Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text "
            "Transformer",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="t5", architecture="t5", layout="zoo_plugins.t5.hub:T5"),
        zoo.Importer(name="mt5", architecture="t5", layout="zoo_plugins.t5.hub:MT5"),
    ]
