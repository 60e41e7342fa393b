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
    home, encoders = "zoo_export.runtime.tasks", ("feature-extraction", "sentence-embedding")
    return [
        zoo.Task(name="feature-extraction", run=f"{home}:Features", serves=encoders),
        zoo.Task(name="fill-mask", run=f"{home}:FillMask", serves=("fill-mask", "pretraining")),
        zoo.Task(name="image-classification", run=f"{home}:ImageClassification"),
        zoo.Task(name="pretraining", run=f"{home}:FillMask"),
        zoo.Task(name="sentence-embedding", run=f"{home}:Embed", serves=encoders),
        zoo.Task(name="text-classification", run=f"{home}:TextClassification"),
        zoo.Task(name="text-generation", run=f"{home}:Continue"),
        zoo.Task(name="text2text-generation", run=f"{home}:Translate"),
    ]
