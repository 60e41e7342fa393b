"""The encoder-decoder Transformer of "Attention Is All You Need", and importers for BART, mBART and Marian."""

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
    layouts = {"bart": "BART", "mbart": "MBART", "m2m_100": "M2M100", "marian": "MARIAN", "nn.Transformer": "TORCH"}
    return [
        zoo.Importer(name=name, architecture="transformer", layout=f"zoo_plugins.transformer.hub:{layout}")
        for name, layout in layouts.items()
    ]
