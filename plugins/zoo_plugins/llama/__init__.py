"""Llama and its relatives: a causal decoder with rotary positions, and importers for its checkpoints."""

from collections.abc import Sequence

import zoo
from zoo_plugins.gpt.tasks import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="llama",
            tasks=TASKS,
            config="zoo_plugins.llama.config:LlamaConfig",
            model="zoo_plugins.llama.model:Llama",
            reference="Touvron et al. 2023, LLaMA: Open and Efficient Foundation Language Models",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="llama", architecture="llama", layout="zoo_plugins.llama.hub:LLAMA"),
        zoo.Importer(name="mistral", architecture="llama", layout="zoo_plugins.llama.hub:MISTRAL"),
        zoo.Importer(name="qwen2", architecture="llama", layout="zoo_plugins.llama.hub:QWEN2"),
        zoo.Importer(name="qwen3", architecture="llama", layout="zoo_plugins.llama.hub:QWEN3"),
        zoo.Importer(name="gemma", architecture="llama", layout="zoo_plugins.llama.hub_gemma:GEMMA"),
        zoo.Importer(name="gemma2", architecture="llama", layout="zoo_plugins.llama.hub_gemma:GEMMA2"),
        zoo.Importer(name="gemma3_text", architecture="llama", layout="zoo_plugins.llama.hub_gemma:GEMMA3"),
        zoo.Importer(name="phi3", architecture="llama", layout="zoo_plugins.llama.hub_phi:PHI3"),
        zoo.Importer(name="smollm3", architecture="llama", layout="zoo_plugins.llama.hub_phi:SMOLLM3"),
        zoo.Importer(name="granite", architecture="llama", layout="zoo_plugins.llama.hub_granite:GRANITE"),
        zoo.Importer(name="olmo2", architecture="llama", layout="zoo_plugins.llama.hub_olmo:OLMO2"),
        zoo.Importer(name="olmo3", architecture="llama", layout="zoo_plugins.llama.hub_olmo:OLMO3"),
        zoo.Importer(name="exaone4", architecture="llama", layout="zoo_plugins.llama.hub_olmo:EXAONE4"),
        zoo.Importer(name="glm", architecture="llama", layout="zoo_plugins.llama.hub_glm:GLM"),
        zoo.Importer(name="glm4", architecture="llama", layout="zoo_plugins.llama.hub_glm:GLM4"),
        zoo.Importer(name="ernie4_5", architecture="llama", layout="zoo_plugins.llama.hub_glm:ERNIE4_5"),
        zoo.Importer(name="helium", architecture="llama", layout="zoo_plugins.llama.hub_glm:HELIUM"),
        zoo.Importer(name="seed_oss", architecture="llama", layout="zoo_plugins.llama.hub:SEED_OSS"),
        zoo.Importer(name="ministral", architecture="llama", layout="zoo_plugins.llama.hub:MINISTRAL"),
        zoo.Importer(name="cwm", architecture="llama", layout="zoo_plugins.llama.hub:CWM"),
        zoo.Importer(name="vaultgemma", architecture="llama", layout="zoo_plugins.llama.hub_gemma:VAULTGEMMA"),
    ]
