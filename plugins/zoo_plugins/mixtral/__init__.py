"""Mixtral, OLMoE, Qwen3-MoE and gpt-oss: Llama with mixtures of experts, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo
from zoo_plugins.gpt.tasks import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="mixtral",
            tasks=TASKS,
            config="zoo_plugins.mixtral.config:MixtralConfig",
            model="zoo_plugins.mixtral.model:Mixtral",
            reference="Jiang et al. 2024, Mixtral of Experts",
            discontinuous="a token goes to the experts with the largest logits of the router",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="mixtral", architecture="mixtral", layout="zoo_plugins.mixtral.hub:MIXTRAL"),
        zoo.Importer(name="olmoe", architecture="mixtral", layout="zoo_plugins.mixtral.hub:OLMOE"),
        zoo.Importer(name="qwen3_moe", architecture="mixtral", layout="zoo_plugins.mixtral.hub:QWEN3_MOE"),
        zoo.Importer(name="gpt_oss", architecture="mixtral", layout="zoo_plugins.mixtral.hub_gpt_oss:GPT_OSS"),
    ]
