"""BERT: a bidirectional encoder, its heads, and the importer of its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="bert",
            tasks=(
                "feature-extraction",
                "sentence-embedding",
                "fill-mask",
                "pretraining",
                "text-classification",
            ),
            config="zoo_plugins.bert.config:BERTConfig",
            model="zoo_plugins.bert.model:BERT",
            reference="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="bert", architecture="bert", layout="zoo_plugins.bert.hub:BERT")]
