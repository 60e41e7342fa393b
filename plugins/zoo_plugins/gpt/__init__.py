"""GPT-1, GPT-2, GPT-3, GPT-Neo and OPT: a causal decoder, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo
from zoo_plugins.gpt.tasks import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="gpt",
            tasks=TASKS,
            config="zoo_plugins.gpt.config:GPTConfig",
            model="zoo_plugins.gpt.model:GPT",
            reference="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="openai-gpt", architecture="gpt", layout="zoo_plugins.gpt.hub:GPT1"),
        zoo.Importer(name="gpt2", architecture="gpt", layout="zoo_plugins.gpt.hub:GPT2"),
        zoo.Importer(name="gpt_neo", architecture="gpt", layout="zoo_plugins.gpt.hub:GPT_NEO"),
        zoo.Importer(name="opt", architecture="gpt", layout="zoo_plugins.gpt.hub_opt:OPT"),
    ]
