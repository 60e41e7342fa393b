"""A self-contained copy of an export, in the layout that model hubs and other runtimes expect: ``onnx/model.onnx``."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx

from zoo.artifact import CARD, CONFIG, TOKENIZER, Export, ModelDirectory
from zoo.artifact.card import model_card
from zoo.artifact.outputs import new_output
from zoo.artifact.weights import StoredTensor
from zoo.contract import rows_of
from zoo.errors import ArtifactError, ParityError
from zoo.models.count import parameter_count
from zoo.probe.dtypes import BFLOAT16, numpy_dtype
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import run_pipeline
from zoo_export.graph.file import external_tensors, parse, serialize
from zoo_export.graph.static import fixed_sizes
from zoo_runtime.executor import OnnxExecutor
from zoo_runtime.providers import Provider, open_session

__all__ = ["write_standalone"]

FOLDER = "onnx"
_LARGEST = 1_900_000_000
"""Maximum bytes of weights inside a graph, below protobuf's limit of 2 GB. Larger weights go to a separate file."""
_ALIGNMENT = 64


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
        for name in (CONFIG, TOKENIZER, CARD, export.evidence_file):
            if name in stored.files:
                shutil.copyfile(stored.path / name, stage / name)
                files.append(name)
        # Regenerated, because cards of earlier versions may contain local paths.
        (stage / CARD).write_text(
            model_card(stored.spec, stored.dtype, stored.origin, parameter_count(stored.spec), export.evidence),
            encoding="utf-8",
        )
        copies = {name: f"{name}_model" if name != "model" else name for name in export.graph_files}
        for name, graph in export.read().items():
            files += [f"{FOLDER}/{file}" for file in _write(stored, graph, stage / FOLDER, copies[name])]
        _compare(export, {name: stage / FOLDER / f"{copy}.onnx" for name, copy in copies.items()})
    return files


def _write(stored: ModelDirectory, graph: bytes, folder: Path, name: str) -> list[str]:
    """Write one graph, with its weights inside or in a separate file. Return the file names."""
    model = parse(graph)
    places = {(tensor.file, tensor.offset): tensor for tensor in stored.layout.values()}
    wanted: dict[str, StoredTensor] = {}
    for tensor in external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        place = places.get((entries.get("location", ""), int(entries.get("offset", 0))))
        if place is None:
            raise ArtifactError(f"initialiser {tensor.name} points at no tensor", stored.path)
        wanted[tensor.name] = place
    inside = sum(place.length for place in set(wanted.values())) <= _LARGEST
    written: dict[StoredTensor, int] = {}
    with (folder / f"{name}.onnx_data").open("wb") as data:
        for tensor in external_tensors(model):
            place = wanted[tensor.name]
            if inside:
                del tensor.external_data[:]
                tensor.data_location = onnx.TensorProto.DEFAULT
                tensor.raw_data = place.read(stored.path)
                continue
            if place not in written:
                data.write(bytes(-data.tell() % _ALIGNMENT))
                written[place] = data.tell()
                data.write(place.read(stored.path))
            for entry in tensor.external_data:
                entry.value = {
                    "location": f"{name}.onnx_data", "offset": str(written[place]), "length": str(place.length),
                }[entry.key]  # fmt: skip
    (folder / f"{name}.onnx").write_bytes(serialize(model))
    if inside:
        (folder / f"{name}.onnx_data").unlink()
        return [f"{name}.onnx"]
    return [f"{name}.onnx", f"{name}.onnx_data"]


def _compare(export: Export, copies: dict[str, Path]) -> None:
    """Compare the outputs of the export and its copy on one input, on the CPU unless it lacks support for the dtype."""
    stored, dtype = export.stored, numpy_dtype(export.dtype)
    provider: Provider = "cuda" if dtype == BFLOAT16 else "cpu"
    graphs = stored.spec.graphs
    fixed = fixed_sizes(next(iter(export.read().values())))
    point = Point(fixed.get(rows_of(graphs)[0], 2), fixed.get("sequence", 5), 0, "none")
    feeds = make_feeds(graphs, point, 0, 64, fixed=fixed)
    originals = {name: stored.path / file for name, file in export.graph_files.items()}
    wanted, found = (
        run_pipeline(
            OnnxExecutor({name: open_session(path, provider=provider) for name, path in paths.items()}, dtype),
            graphs,
            feeds,
            point,
            split=True,
        )
        for paths in (originals, copies)
    )
    for graph, outputs in wanted.items():
        for name, value in outputs.items():
            if not np.array_equal(value, found[graph][name], equal_nan=True):
                raise ParityError(f"the copy's outputs differ from the export's: {name} of {graph}", stored.path)
