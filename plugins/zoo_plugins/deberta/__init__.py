"""DeBERTa: an encoder with disentangled attention, and an importer for checkpoints of DeBERTa-v2 and DeBERTaV3."""

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
            name="deberta",
            tasks=TASKS,
            config="zoo_plugins.deberta.config:DeBERTaConfig",
            model="zoo_plugins.deberta.model:DeBERTa",
            reference="He et al. 2023, DeBERTaV3: Improving DeBERTa using ELECTRA-Style Pre-Training",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="deberta-v2", architecture="deberta", layout="zoo_plugins.deberta.hub:DEBERTA_V2")]
