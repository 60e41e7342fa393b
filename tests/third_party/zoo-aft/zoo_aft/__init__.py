"""The Attention Free Transformer as a decoder."""

from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="aft",
            tasks=("text-generation",),
            config="zoo_aft.config:AFTConfig",
            model="zoo_aft.model:AFT",
            reference="Zhai et al. 2021, An Attention Free Transformer",
        )
    ]


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]
