"""LLaVA: a decoder that reads a text with an image, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="llava",
            tasks=("image-text-to-text",),
            config="zoo_plugins.llava.config:LlavaConfig",
            model="zoo_plugins.llava.model:Llava",
            reference="Liu et al. 2023, Visual Instruction Tuning; Liu et al. 2024, Improved Baselines",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="llava", architecture="llava", layout="zoo_plugins.llava.hub:LLAVA")]
