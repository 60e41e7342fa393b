"""Perceiver IO: a Transformer over latents that cross-attend to the input and are decoded by queries."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="perceiver",
            tasks=("fill-mask", "text-classification"),
            config="zoo_plugins.perceiver.config:PerceiverConfig",
            model="zoo_plugins.perceiver.model:Perceiver",
            reference="Jaegle et al. 2022, Perceiver IO: A General Architecture for Structured Inputs & Outputs",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="perceiver", architecture="perceiver", layout="zoo_plugins.perceiver.hub:PERCEIVER")]
