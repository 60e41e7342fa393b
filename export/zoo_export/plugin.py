"""ONNX as a plugin: an exporter like any other's."""

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
