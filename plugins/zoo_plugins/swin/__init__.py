"""Swin and Swin V2: Transformers of images with attention in windows, and importers for their checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="swin",
            tasks=("image-classification", "image-feature-extraction"),
            config="zoo_plugins.swin.config:SwinConfig",
            model="zoo_plugins.swin.model:Swin",
            reference="Liu et al. 2021, Swin Transformer; Liu et al. 2022, Swin Transformer V2",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="swin", architecture="swin", layout="zoo_plugins.swin.hub:SWIN"),
        zoo.Importer(name="swinv2", architecture="swin", layout="zoo_plugins.swin.hub:SWIN_V2"),
    ]
