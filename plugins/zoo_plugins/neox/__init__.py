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


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="gpt_neox", architecture="neox", layout="zoo_plugins.neox.hub:GPT_NEOX"),
        zoo.Importer(name="phi", architecture="neox", layout="zoo_plugins.neox.hub:PHI"),
        zoo.Importer(name="stablelm", architecture="neox", layout="zoo_plugins.neox.hub:STABLELM"),
        zoo.Importer(name="starcoder2", architecture="neox", layout="zoo_plugins.neox.hub:STARCODER2"),
        zoo.Importer(name="gptj", architecture="neox", layout="zoo_plugins.neox.hub_gptj:GPTJ"),
        zoo.Importer(name="falcon", architecture="neox", layout="zoo_plugins.neox.hub_falcon:FALCON"),
        zoo.Importer(name="codegen", architecture="neox", layout="zoo_plugins.neox.hub_gptj:CODEGEN"),
        zoo.Importer(name="nemotron", architecture="neox", layout="zoo_plugins.neox.hub_nemotron:NEMOTRON"),
        zoo.Importer(name="persimmon", architecture="neox", layout="zoo_plugins.neox.hub_nemotron:PERSIMMON"),
        zoo.Importer(name="bloom", architecture="neox", layout="zoo_plugins.neox.hub_alibi:BLOOM"),
        zoo.Importer(name="mpt", architecture="neox", layout="zoo_plugins.neox.hub_alibi:MPT"),
        zoo.Importer(name="cohere", architecture="neox", layout="zoo_plugins.neox.hub_cohere:COHERE"),
        zoo.Importer(name="cohere2", architecture="neox", layout="zoo_plugins.neox.hub_cohere:COHERE2"),
    ]
