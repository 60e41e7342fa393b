"""ViT, DeiT and DINOv2 to 3: Transformer encoders of image patches, and importers for their checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="vit",
            tasks=("image-classification", "image-feature-extraction"),
            config="zoo_plugins.vit.config:ViTConfig",
            model="zoo_plugins.vit.model:ViT",
            reference="Dosovitskiy et al. 2021, An Image is Worth 16x16 Words; Touvron et al. 2021, DeiT",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="vit", architecture="vit", layout="zoo_plugins.vit.hub:VIT"),
        zoo.Importer(name="deit", architecture="vit", layout="zoo_plugins.vit.hub:DEIT"),
        zoo.Importer(name="dinov2", architecture="vit", layout="zoo_plugins.vit.dinov2:DINOV2"),
        zoo.Importer(
            name="dinov2_with_registers", architecture="vit", layout="zoo_plugins.vit.dinov2:DINOV2_WITH_REGISTERS"
        ),
        zoo.Importer(name="dinov3_vit", architecture="vit", layout="zoo_plugins.vit.dinov3:DINOV3"),
        zoo.Importer(name="timm", architecture="vit", layout="zoo_plugins.vit.timm:TIMM"),
    ]
