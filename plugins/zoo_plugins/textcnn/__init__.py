"""TextCNN: a convolutional classifier of texts."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="textcnn",
            tasks=("text-classification",),
            config="zoo_plugins.textcnn.config:TextCNNConfig",
            model="zoo_plugins.textcnn.model:TextCNN",
            reference="Kim 2014, Convolutional Neural Networks for Sentence Classification",
        )
    ]
