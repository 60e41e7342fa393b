"""Plugin with the ONNX exporter and its commands."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_exporters() -> Sequence[zoo.Exporter]:
    return [
        zoo.Exporter(
            name="onnx",
            export="zoo_export.export:export_onnx",
            verify="zoo_export.verify:verify_onnx",
            options="zoo_export.export:Request",
            evidence="parity",
            checks="zoo_export.conformance:CHECKS",
        )
    ]


@zoo.hookimpl
def zoo_commands() -> Sequence[zoo.Command]:
    commands = {
        "export": ("Export", "Export a model to ONNX or another format, verified against PyTorch."),
        "quantize": ("Export", "Write a smaller precision of a model, and measure the loss."),
        "publish": ("Export", "Write a model in a layout that other tools read."),
        "relink": ("Export", "Make an export use new weights without re-exporting."),
        "evaluate": ("Check", "Score a model and its exports on labelled data."),
        "verify": ("Check", "Verify an existing export again."),
        "report": ("Check", "Write the evidence for exports as a page."),
        "diff": ("Check", "Compare an export with its model, module by module."),
        "audit": ("Check", "Hold ONNX files of another tool against their model."),
        "bench": ("Check", "Measure the speed of an exported model, compared with PyTorch."),
    }
    return [
        zoo.Command(name=name, help=help, command=f"zoo_export.cli.{name}:command", section=section)
        for name, (section, help) in commands.items()
    ]
