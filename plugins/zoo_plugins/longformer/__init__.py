"""Longformer: BERT with sliding-window attention and global tokens."""

from collections.abc import Sequence

import zoo
from zoo_plugins.bert import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="longformer",
            tasks=TASKS,
            config="zoo_plugins.longformer.config:LongformerConfig",
            model="zoo_plugins.bert.model:BERT",
            reference="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="longformer", architecture="longformer", layout="zoo_plugins.longformer.hub:LONGFORMER")]
