"""A self-contained copy of an export, with the graphs as they are declared."""

from __future__ import annotations

import shutil
from pathlib import Path

from zoo.artifact import CARD, CONFIG, TOKENIZER, Export, ModelDirectory
from zoo.artifact.card import model_card
from zoo.artifact.outputs import new_output
from zoo.models.count import parameter_count
from zoo_export.publish.copies import FOLDER, copy_graphs
from zoo_export.publish.evidence import write_evidence

__all__ = ["write_standalone"]


def write_standalone(directory: Path, target: Path, *, force: bool = False) -> list[str]:
    """Copy a verified export and its weights to a self-contained directory.

    A single graph is written to ``onnx/model.onnx``, several to ``onnx/NAME_model.onnx``. Weights of more than 1.9 GB
    are written to ``NAME.onnx_data`` next to the graph. The outputs of the copy are checked to be bit-identical to the
    export's.

    With ``force``, an earlier copy is replaced, unless files were added to it or changed.

    Returns the files, relative to ``target``.

    Raises:
        ArtifactError: the model is not exported or has been altered.
        ParityError: the export is not verified.
        UsageError: ``target`` exists.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored)
    export.check()
    export.check_verified()
    files = []
    with new_output(target, "publish --layout standalone", force=force) as stage:
        (stage / FOLDER).mkdir()
        for name in (CONFIG, TOKENIZER, CARD):
            if name in stored.files:
                shutil.copyfile(stored.path / name, stage / name)
                files.append(name)
        # Regenerated, because cards of earlier versions may contain local paths.
        (stage / CARD).write_text(
            model_card(stored.spec, stored.dtype, stored.origin, parameter_count(stored.spec), export.evidence),
            encoding="utf-8",
        )
        copies = {name: f"{name}_model" if name != "model" else name for name in export.graph_files}
        written = copy_graphs(stored, export.read(), export.dtype, stage / FOLDER, copies)
        graphs = [f"{FOLDER}/{file}" for file in written]
        write_evidence(stage, export.evidence_file, export.evidence, graphs)
    return [*files, export.evidence_file, *graphs]
