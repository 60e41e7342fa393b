"""Linformer: BERT with low-rank attention."""

from collections.abc import Sequence

import zoo
from zoo_plugins.bert import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="linformer",
            tasks=TASKS,
            config="zoo_plugins.linformer.config:LinformerConfig",
            model="zoo_plugins.bert.model:BERT",
            reference="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity",
        )
    ]
