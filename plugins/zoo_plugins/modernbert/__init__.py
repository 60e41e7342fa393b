"""ModernBERT: an encoder with rotary positions and alternating attention, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1
TASKS = (
    "feature-extraction",
    "sentence-embedding",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
)


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="modernbert",
            tasks=TASKS,
            config="zoo_plugins.modernbert.config:ModernBERTConfig",
            model="zoo_plugins.modernbert.model:ModernBERT",
            reference="Warner et al. 2024, Smarter, Better, Faster, Longer",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="modernbert", architecture="modernbert", layout="zoo_plugins.modernbert.hub:MODERNBERT")]
