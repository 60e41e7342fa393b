"""Whisper: an encoder of sound and a decoder of text, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="whisper",
            tasks=("speech-recognition",),
            config="zoo_plugins.whisper.config:WhisperConfig",
            model="zoo_plugins.whisper.model:Whisper",
            reference="Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="whisper", architecture="whisper", layout="zoo_plugins.whisper.hub:WHISPER")]
