"""GPT-NeoX and its relatives: causal decoders with layer norms and parallel sub-layers, and their importers."""

from collections.abc import Sequence

import zoo
from zoo_plugins.gpt.tasks import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="neox",
            tasks=TASKS,
            config="zoo_plugins.neox.config:NeoXConfig",
            model="zoo_plugins.neox.model:NeoX",
            reference="Black et al. 2022, GPT-NeoX-20B: An Open-Source Autoregressive Language Model",
        )
    ]
