"""Verified exports in the layout that transformers.js 4 loads: a configuration and a tokenizer, and ONNX graphs.

Unlike the hub's layout, it has no checkpoint beside the graphs. Every precision of the model becomes one graph with its
weights, which transformers.js selects by ``dtype``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.artifact import Export, ModelDirectory, write_json
from zoo.artifact.exports import find_exports
from zoo.artifact.outputs import new_output
from zoo.artifact.weights import load_json
from zoo.checkpoints.exporting import choose_layout
from zoo.errors import UsageError
from zoo.exporters import Progress
from zoo.models import create
from zoo_export.publish.copies import FOLDER, copy_graphs
from zoo_export.publish.graphs import declared_inputs

__all__ = ["Published", "write_transformers_js"]

NAMES = {"": "fp32", "float16": "fp16", "int8": "q8", "int4": "q4"}
"""The value of ``dtype`` that selects a precision."""
_SUFFIXES = {"": "", "float16": "_fp16", "int8": "_quantized", "int4": "_q4"}


@dataclass(frozen=True)
class Published:
    """The model type, files and precisions of a published model."""

    model_type: str
    """The model type in config.json, from which transformers.js chooses its classes."""
    files: list[str]
    dtypes: list[str]
    """Values of ``dtype`` for which there is a graph."""


def write_transformers_js(
    directory: Path,
    target: Path,
    *,
    model_type: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Published:
    """Write every precision of a model for transformers.js.

    transformers.js cannot call the graphs of a quantised decoder, which write to the caller's buffers. Other graphs are
    made for the same weights, and compared with the model. All others are copies.

    Args:
        directory: a model directory with an export, and perhaps quantised ones.
        target: the directory to create.
        model_type: the layout of the configuration; by default the first that can represent it.
        force: replace what this function wrote, if its files are unchanged and none were added.
        progress: called with the number of each comparison and the total.

    Raises:
        ArtifactError: the model is not exported or has been altered.
        ParityError: an export is not verified, or a graph made here is not equal to the model.
        UsageError: the model has several graphs, or reads images that are not RGB; no layout represents its
            configuration; or the target exists.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    if len(stored.spec.graphs) > 1:
        names = ", ".join(graph.name for graph in stored.spec.graphs)
        raise UsageError(f"this layout holds one graph, but the model has {names}", stored.path, "--layout standalone")
    channels = getattr(stored.spec.config, "num_channels", None)
    if channels not in (None, 3):
        problem = f"transformers.js reads images as RGB, but the model has {channels} channel(s)"
        raise UsageError(problem, stored.path, "--layout web")
    found = {"": Export(stored), **{export.variant: export for export in find_exports(stored)}}
    exports = [found[variant] for variant in NAMES if variant in found]
    for export in exports:
        export.check()
        export.check_verified()
    with new_output(target, "publish --layout transformers-js", force=force) as stage:
        model = create.build_on_meta(stored.spec, stored.dtype)
        model_type, _, _ = choose_layout(stored, model, stage, model_type)
        (stage / FOLDER).mkdir()
        files = []
        for export in exports:
            graphs, evidence = declared_inputs(export, "transformers.js", progress)
            copies = dict.fromkeys(graphs, f"model{_SUFFIXES[export.variant]}")
            files += copy_graphs(stored, graphs, export.dtype, stage / FOLDER, copies)
            write_json(stage / export.evidence_file, evidence)
        large = {name.removesuffix("_data"): 1 for name in files if name.endswith("_data")}
        if large:
            settings = {"use_external_data_format": large}
            write_json(stage / "config.json", {**load_json(stage / "config.json"), "transformers.js_config": settings})
        files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return Published(model_type, files, [NAMES[export.variant] for export in exports])
