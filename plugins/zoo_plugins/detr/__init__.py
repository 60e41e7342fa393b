"""DETR and Table Transformer: detectors with an encoder-decoder Transformer, and importers for their checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="detr",
            tasks=("object-detection",),
            config="zoo_plugins.detr.config:DETRConfig",
            model="zoo_plugins.detr.model:DETR",
            reference="Carion et al. 2020, End-to-End Object Detection with Transformers",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="detr", architecture="detr", layout="zoo_plugins.detr.hub:DETR"),
        zoo.Importer(name="table-transformer", architecture="detr", layout="zoo_plugins.detr.hub:TABLE_TRANSFORMER"),
    ]
