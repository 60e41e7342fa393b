"""ResNet: convolutional networks with residual connections, and an importer for their checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="resnet",
            tasks=("image-classification", "image-feature-extraction"),
            config="zoo_plugins.resnet.config:ResNetConfig",
            model="zoo_plugins.resnet.model:ResNet",
            reference="He et al. 2016, Deep Residual Learning for Image Recognition",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="resnet", architecture="resnet", layout="zoo_plugins.resnet.hub:RESNET")]
