"""GPT-2 and GPT-3 shapes: a causal decoder."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="gpt",
            tasks=("text-generation",),
            config="zoo_plugins.gpt.config:GPTConfig",
            model="zoo_plugins.gpt.model:GPT",
            reference="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
        )
    ]
