"""CLIP and SigLIP: encoders of images and texts into one space, and importers for their checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="clip",
            tasks=("zero-shot-image-classification",),
            config="zoo_plugins.clip.config:CLIPConfig",
            model="zoo_plugins.clip.model:CLIP",
            reference="Radford et al. 2021, CLIP; Zhai et al. 2023, SigLIP",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="clip", architecture="clip", layout="zoo_plugins.clip.hub:CLIP"),
        zoo.Importer(name="siglip", architecture="clip", layout="zoo_plugins.clip.hub:SIGLIP"),
    ]
