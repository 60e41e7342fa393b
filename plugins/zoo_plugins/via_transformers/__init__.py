"""Models of transformers: the classes of the library itself, for checkpoints that no other layout reads."""

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
    "multiple-choice",
    "text-generation",
    "text2text-generation",
    "image-to-text",
    "image-text-to-text",
    "image-classification",
    "image-feature-extraction",
    "object-detection",
    "semantic-segmentation",
    "depth-estimation",
    "zero-shot-image-classification",
    "ctc-speech-recognition",
    "audio-classification",
)
"""Tasks whose classes are known."""


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="via-transformers",
            tasks=TASKS,
            config="zoo_plugins.via_transformers.config:ViaTransformersConfig",
            model="zoo_plugins.via_transformers.model:ViaTransformers",
            reference="Wolf et al. 2020, Transformers: State-of-the-Art Natural Language Processing",
            expected_failures={"global-state": "transformers imports libraries that add warning filters"},
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(
            name="transformers",
            architecture="via-transformers",
            layout="zoo_plugins.via_transformers.hub:LAYOUT",
            reads="zoo_plugins.via_transformers.known:is_known",
        )
    ]
