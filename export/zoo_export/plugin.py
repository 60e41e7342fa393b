"""ONNX as a plugin: an exporter and tasks like any other's."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_exporters() -> Sequence[zoo.Exporter]:
    return [
        zoo.Exporter(
            name="onnx",
            export="zoo_export.exporter:export_onnx",
            verify="zoo_export.exporter:verify_onnx",
            evidence="parity",
        )
    ]


@zoo.hookimpl
def zoo_tasks() -> Sequence[zoo.Task]:
    home, encoders = "zoo_export.runtime", ("feature-extraction", "sentence-embedding")
    texts = (
        *encoders, "fill-mask", "pretraining", "question-answering", "replaced-token-detection", "text-classification",
        "text-generation", "text2text-generation", "token-classification",
    )  # fmt: skip
    images = ("image-classification", "image-feature-extraction")
    masked = ("fill-mask", "pretraining")
    return [
        zoo.Task(name="attentions", run=f"{home}.weights:Attentions", serves=texts),
        zoo.Task(name="augment", run=f"{home}.augment:Augment", serves=masked),
        zoo.Task(name="feature-extraction", run=f"{home}.tasks:Features", serves=encoders),
        zoo.Task(name="fill-mask", run=f"{home}.tasks:FillMask", serves=masked),
        zoo.Task(name="image-attentions", run=f"{home}.weights:ImageAttentions", serves=images),
        zoo.Task(name="image-classification", run=f"{home}.images:ImageClassification"),
        zoo.Task(name="image-feature-extraction", run=f"{home}.images:ImageFeatures"),
        zoo.Task(name="next-sentence", run=f"{home}.tasks:NextSentence", serves=("pretraining",)),
        zoo.Task(name="pretraining", run=f"{home}.tasks:FillMask"),
        zoo.Task(name="replaced-token-detection", run=f"{home}.tasks:ReplacedTokens"),
        zoo.Task(name="sentence-embedding", run=f"{home}.tasks:Embed", serves=encoders),
        zoo.Task(name="text-classification", run=f"{home}.tasks:TextClassification"),
        zoo.Task(name="text-generation", run=f"{home}.generating:Continue"),
        zoo.Task(name="text2text-generation", run=f"{home}.generating:Translate"),
        zoo.Task(name="token-classification", run=f"{home}.tasks:TokenClassification"),
    ]
