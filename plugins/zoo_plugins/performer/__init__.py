"""Performer: BERT with random-feature attention."""

from collections.abc import Sequence

import zoo
from zoo_plugins.bert import TASKS

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="performer",
            tasks=TASKS,
            config="zoo_plugins.performer.config:PerformerConfig",
            model="zoo_plugins.bert.model:BERT",
            reference="Choromanski et al. 2021, Rethinking Attention with Performers",
        )
    ]
