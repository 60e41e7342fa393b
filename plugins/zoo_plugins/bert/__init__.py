"""The BERT family: a bidirectional encoder, its heads, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1
TASKS = (
    "feature-extraction",
    "sentence-embedding",
    "fill-mask",
    "pretraining",
    "text-classification",
    "token-classification",
    "question-answering",
    "replaced-token-detection",
)
"""Tasks of an encoder with BERT's heads."""


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="bert",
            tasks=TASKS,
            config="zoo_plugins.bert.config:BERTConfig",
            model="zoo_plugins.bert.model:BERT",
            reference="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    kinds = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert", "electra")
    layouts = {kind: f"zoo_plugins.bert.hub:{kind.replace('-', '_').upper()}" for kind in kinds}
    layouts["mpnet"] = "zoo_plugins.bert.hub_mpnet:MPNET"
    layouts["nomic_bert"] = "zoo_plugins.bert.hub_nomic:NOMIC_BERT"
    layouts["roformer"] = "zoo_plugins.bert.hub_roformer:ROFORMER"
    return [zoo.Importer(name=kind, architecture="bert", layout=layout) for kind, layout in layouts.items()]
