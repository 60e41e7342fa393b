"""Qwen3-Next and Qwen3.5: a decoder of linear and full attention, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="qwen3-next",
            tasks=("text-generation",),
            config="zoo_plugins.qwen3_next.config:Qwen3NextConfig",
            model="zoo_plugins.qwen3_next.model:Qwen3Next",
            reference="Yang et al. 2024, Gated Delta Networks; Qwen Team 2025, Qwen3-Next",
        ),
        zoo.Architecture(
            name="qwen3-next-moe",
            tasks=("text-generation",),
            config="zoo_plugins.qwen3_next.config:Qwen3NextMoeConfig",
            model="zoo_plugins.qwen3_next.model:Qwen3Next",
            reference="Qwen Team 2025, Qwen3-Next; Shazeer et al. 2017, the sparsely-gated mixture of experts",
            discontinuous="a token goes to the experts with the largest logits of the router",
        ),
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="qwen3_5_text", architecture="qwen3-next", layout="zoo_plugins.qwen3_next.hub:QWEN3_5"),
        zoo.Importer(name="qwen3_5", architecture="qwen3-next", layout="zoo_plugins.qwen3_next.hub:QWEN3_5_IMAGES"),
        zoo.Importer(name="qwen3_next", architecture="qwen3-next-moe", layout="zoo_plugins.qwen3_next.hub:QWEN3_NEXT"),
    ]
