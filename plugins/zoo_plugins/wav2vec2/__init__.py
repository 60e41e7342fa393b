"""wav2vec 2.0 and HuBERT: encoders of sound for speech recognition and classification, and their importers."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="wav2vec2",
            tasks=("ctc-speech-recognition", "audio-classification"),
            config="zoo_plugins.wav2vec2.config:Wav2Vec2Config",
            model="zoo_plugins.wav2vec2.model:Wav2Vec2",
            reference="Baevski et al. 2020, wav2vec 2.0: A Framework for Self-Supervised Learning of Speech",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [
        zoo.Importer(name="wav2vec2", architecture="wav2vec2", layout="zoo_plugins.wav2vec2.hub:WAV2VEC2"),
        zoo.Importer(name="hubert", architecture="wav2vec2", layout="zoo_plugins.wav2vec2.hub:HUBERT"),
    ]
