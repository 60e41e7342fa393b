"""Grapheme-to-phoneme conversion: an architecture, an importer for g2p-en, and a task."""

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="g2p",
            tasks=("grapheme-to-phoneme",),
            config="zoo_g2p.config:G2PConfig",
            model="zoo_g2p.model:G2P",
            reference="Park and Kim 2019, g2p-en; the cell is that of Cho et al. 2014",
        )
    ]


@zoo.hookimpl
def zoo_importers():
    return [zoo.Importer(name="g2p-en", architecture="g2p", layout="zoo_g2p.checkpoints:G2P_EN")]


@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="grapheme-to-phoneme", run="zoo_g2p.task:Pronounce")]
