"""A self-contained copy of an export, in the layout that model hubs and other runtimes expect: ``onnx/model.onnx``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from zoo.artifact import CARD, CONFIG, TOKENIZER, Export, ModelDirectory
from zoo.artifact.card import model_card
from zoo.artifact.outputs import new_output
from zoo.contract import rows_of
from zoo.errors import ArtifactError, ParityError
from zoo.models.count import parameter_count
from zoo.probe.dtypes import BFLOAT16, numpy_dtype
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import run_pipeline
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.links import external_tensors, place_of, set_place
from zoo_export.graph.static import fixed_sizes
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import Provider, open_session

__all__ = ["FOLDER", "copy_graphs", "write_standalone"]

FOLDER = "onnx"
_LARGEST = 1_900_000_000
"""Maximum bytes of weights inside a graph, below protobuf's limit of 2 GB. Larger weights go to a separate file."""
_ALIGNMENT = 64
_Place = tuple[Path, int, int]
"""A file, and the offset and length of a weight in it, in bytes."""


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
        files += [
            f"{FOLDER}/{file}" for file in copy_graphs(stored, export.read(), export.dtype, stage / FOLDER, copies)
        ]
    return files


def copy_graphs(
    stored: ModelDirectory, graphs: Mapping[str, bytes], dtype: str, folder: Path, names: Mapping[str, str]
) -> list[str]:
    """Write graphs of a model to a folder, and check that the copies compute the same, bit for bit.

    Args:
        stored: the model.
        graphs: its graphs, which read weights of its directory.
        dtype: dtype of their inputs and outputs.
        folder: an existing folder.
        names: the name of each graph's file, without a suffix; it may begin with existing folders.

    Returns the file names. Weights of more than 1.9 GB are in a file next to the graph.
    """
    files = [file for graph, name in names.items() for file in _copy(stored, graphs[graph], folder, name)]
    _compare(stored, graphs, dtype, {graph: folder / f"{name}.onnx" for graph, name in names.items()})
    return files


def _copy(stored: ModelDirectory, graph: bytes, folder: Path, name: str) -> list[str]:
    """Write one graph, with its weights inside or in a separate file. Return the file names."""
    model = parse(graph)
    places = {tensor.name: _place(stored, tensor) for tensor in external_tensors(model)}
    inside = sum(length for _, _, length in set(places.values())) <= _LARGEST
    written: dict[_Place, int] = {}
    with (folder / f"{name}.onnx_data").open("wb") as data:
        for tensor in external_tensors(model):
            place = places[tensor.name]
            if inside:
                del tensor.external_data[:]
                tensor.data_location = onnx.TensorProto.DEFAULT
                tensor.raw_data = _read(place)
                continue
            if place not in written:
                data.write(bytes(-data.tell() % _ALIGNMENT))
                written[place] = data.tell()
                data.write(_read(place))
            set_place(tensor, f"{Path(name).name}.onnx_data", written[place], place[2])
    (folder / f"{name}.onnx").write_bytes(serialize(model))
    if inside:
        (folder / f"{name}.onnx_data").unlink()
        return [f"{name}.onnx"]
    return [f"{name}.onnx", f"{name}.onnx_data"]


def _place(stored: ModelDirectory, tensor: onnx.TensorProto) -> _Place:
    """Return the file, offset and length of a weight."""
    location, offset, length = place_of(tensor)
    if location not in stored.files:
        raise ArtifactError(f"initialiser {tensor.name} points at {location!r}, which is not of the model", stored.path)
    return stored.file(location), offset, length


def _read(place: _Place) -> bytes:
    path, offset, length = place
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _compare(stored: ModelDirectory, graphs: Mapping[str, bytes], dtype: str, copies: Mapping[str, Path]) -> None:
    """Compare the outputs of graphs and copies on one input, on the CPU unless it lacks support for the dtype."""
    provider: Provider = "cuda" if numpy_dtype(dtype) == BFLOAT16 else "cpu"
    declared = stored.spec.graphs
    fixed = fixed_sizes(next(iter(graphs.values())))
    point = Point(fixed.get(rows_of(declared)[0], 2), fixed.get("sequence", 5), 0, "none")
    feeds = make_feeds(declared, point, 0, 64, fixed=fixed)
    originals = {name: open_session(graph, provider=provider, weights=stored.path) for name, graph in graphs.items()}
    copied = {name: open_session(path, provider=provider) for name, path in copies.items()}
    expected, results = (
        run_pipeline(OnnxExecutor(sessions, numpy_dtype(dtype)), declared, feeds, point, split=True)
        for sessions in (originals, copied)
    )
    for graph, outputs in expected.items():
        for name, value in outputs.items():
            if not np.array_equal(value, results[graph][name], equal_nan=True):
                raise ParityError(f"the copy's outputs differ from the export's: {name} of {graph}", stored.path)
