"""DeepSeek-V2 and V3: a decoder of latent attention and many small experts, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo
from zoo_plugins.gpt.tasks import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="deepseek",
            tasks=TASKS,
            config="zoo_plugins.deepseek.config:DeepseekConfig",
            model="zoo_plugins.deepseek.model:Deepseek",
            reference="DeepSeek-AI 2024, DeepSeek-V2; DeepSeek-AI 2024, DeepSeek-V3 Technical Report",
            discontinuous="a token goes to the experts with the best scores of the router, in the best groups",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="deepseek_v2", architecture="deepseek", layout="zoo_plugins.deepseek.hub:DEEPSEEK_V2"),
        zoo.Importer(name="deepseek_v3", architecture="deepseek", layout="zoo_plugins.deepseek.hub:DEEPSEEK_V3"),
    ]
