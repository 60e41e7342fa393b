"""ConvNeXt and ConvNeXt V2: convolutional networks that resemble Transformers, and importers for their checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="convnext",
            tasks=("image-classification", "image-feature-extraction"),
            config="zoo_plugins.convnext.config:ConvNeXtConfig",
            model="zoo_plugins.convnext.model:ConvNeXt",
            reference="Liu et al. 2022, A ConvNet for the 2020s; Woo et al. 2023, ConvNeXt V2",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="convnext", architecture="convnext", layout="zoo_plugins.convnext.hub:CONVNEXT"),
        zoo.Importer(name="convnextv2", architecture="convnext", layout="zoo_plugins.convnext.hub:CONVNEXT_V2"),
    ]
