"""The encoder-decoder Transformer of "Attention Is All You Need", and importers for BART and its kin."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="transformer",
            tasks=("text2text-generation", "text-classification", "sentence-embedding", "vector-feature-extraction"),
            config="zoo_plugins.transformer.config:TransformerConfig",
            model="zoo_plugins.transformer.model:Transformer",
            reference="Vaswani et al. 2017, Attention Is All You Need",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    layouts = {
        "bart": "hub:BART",
        "blenderbot": "hub:BLENDERBOT",
        "m2m_100": "hub:M2M100",
        "marian": "hub:MARIAN",
        "mbart": "hub:MBART",
        "pegasus": "hub:PEGASUS",
        "nn.Transformer": "torch_module:TORCH",
    }
    return [
        zoo.Importer(name=name, architecture="transformer", layout=f"zoo_plugins.transformer.{layout}")
        for name, layout in layouts.items()
    ]
