"""Plugin with the built-in objectives and data sets."""

from __future__ import annotations

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_objectives() -> Sequence[zoo.Objective]:
    home = "zoo.training.objectives"
    return [
        zoo.Objective(name="causal-lm", criterion=f"{home}.causal:CausalLM", tasks=("text-generation",)),
        zoo.Objective(
            name="sequence-to-sequence",
            criterion=f"{home}.seq2seq:SequenceToSequence",
            tasks=("text2text-generation",),
            columns=("text", "target"),
            options="zoo.training.options:SequenceToSequenceOptions",
        ),
        zoo.Objective(
            name="text-classification",
            criterion=f"{home}.classification:TextClassification",
            tasks=("text-classification",),
            columns=("text", "label"),
            optional=("pair",),
        ),
    ]


@zoo.hookimpl
def zoo_datasets() -> Sequence[zoo.Dataset]:
    return [
        zoo.Dataset(
            name="copy-task",
            rows="zoo.training.datasets.copy_task:rows",
            description="Random sequences to copy (Graves et al. 2014, section 4.1), over the letters a to z",
        )
    ]
