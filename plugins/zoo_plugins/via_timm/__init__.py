"""Models of timm: the classes of the library itself, by the names of its models."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="via-timm",
            tasks=("image-classification", "image-feature-extraction"),
            config="zoo_plugins.via_timm.config:ViaTimmConfig",
            model="zoo_plugins.via_timm.model:ViaTimm",
            reference="Wightman 2019, PyTorch Image Models",
            library="timm",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="via-timm", architecture="via-timm", layout="zoo_plugins.via_timm.hub:LAYOUT")]
