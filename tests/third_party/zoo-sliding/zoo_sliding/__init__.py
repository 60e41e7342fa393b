"""A decoder with sliding-window attention."""

from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="sliding",
            tasks=("text-generation",),
            config="zoo_sliding.config:SlidingConfig",
            model="zoo_sliding.model:Sliding",
            reference="Beltagy et al. 2020, Longformer, section 3.1",
        )
    ]


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]
