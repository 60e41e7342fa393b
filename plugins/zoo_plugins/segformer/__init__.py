"""SegFormer: a hierarchical Transformer for images and classes of their pixels, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="segformer",
            tasks=("image-classification", "semantic-segmentation", "image-feature-extraction"),
            config="zoo_plugins.segformer.config:SegFormerConfig",
            model="zoo_plugins.segformer.model:SegFormer",
            reference="Xie et al. 2021, SegFormer: Simple and Efficient Design for Semantic Segmentation",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="segformer", architecture="segformer", layout="zoo_plugins.segformer.hub:SEGFORMER")]
