"""MLP-Mixer, and an importer for its checkpoints in timm's layout."""

from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="mixer",
            tasks=("image-classification",),
            config="zoo_mixer.config:MixerConfig",
            model="zoo_mixer.model:Mixer",
            reference="Tolstikhin et al. 2021, MLP-Mixer: An all-MLP Architecture for Vision",
        )
    ]


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]


@zoo.hookimpl
def zoo_importers():
    return [zoo.Importer(name="timm-mixer", architecture="mixer", layout="zoo_mixer.timm:TIMM")]
