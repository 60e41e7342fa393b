"""ESM: a pre-norm encoder of proteins, and an importer for its checkpoints."""

from collections.abc import Sequence

import zoo

ZOO_API = 1
TASKS = ("feature-extraction", "sentence-embedding", "fill-mask", "text-classification", "token-classification")


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="esm",
            tasks=TASKS,
            config="zoo_plugins.esm.config:ESMConfig",
            model="zoo_plugins.esm.model:ESM",
            reference="Lin et al. 2023, Evolutionary-scale prediction of atomic-level protein structure",
        )
    ]


@zoo.hookimpl
def zoo_importers() -> Sequence[zoo.Importer]:
    return [zoo.Importer(name="esm", architecture="esm", layout="zoo_plugins.esm.hub:ESM")]
