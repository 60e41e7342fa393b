"""Self-contained copies of verified graphs, in a form that the tools of ONNX Runtime and others process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from zoo.artifact import ModelDirectory
from zoo.contract import rows_of
from zoo.errors import ArtifactError, ParityError
from zoo.probe.dtypes import BFLOAT16, numpy_dtype
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import Executor, run_pipeline
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.links import external_tensors, place_of, set_place
from zoo_export.graph.plain import forget_types
from zoo_export.graph.static import fixed_sizes
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Provider, open_session

__all__ = ["FOLDER", "compare_with", "copy_graphs", "open_copies", "provider_of", "write_graph"]

FOLDER = "onnx"
_LARGEST = 1_900_000_000
"""Maximum bytes of weights inside a graph, below protobuf's limit of 2 GB. Larger weights go to a separate file."""
_ALIGNMENT = 64
_Place = tuple[Path, int, int]
"""A file, and the offset and length of a weight in it, in bytes."""


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
    files = []
    for graph, name in names.items():
        model = parse(graphs[graph])
        forget_types(model.graph)
        files += write_graph(stored, model, folder, name)
    copies = open_copies({graph: folder / f"{name}.onnx" for graph, name in names.items()}, dtype)
    compare_with(stored, graphs, dtype, OnnxExecutor(copies, numpy_dtype(dtype)))
    return files


def write_graph(stored: ModelDirectory, model: onnx.ModelProto, folder: Path, name: str) -> list[str]:
    """Write one graph, with its weights inside or in a separate file. Return the file names.

    Args:
        stored: the model.
        model: the graph, which reads weights of the model's directory. It is changed.
        folder: an existing folder.
        name: the name of the file without a suffix.
    """
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


def open_copies(paths: Mapping[str, Path], dtype: str) -> dict[str, ort.InferenceSession]:
    """Open graphs by name, on the provider on which they are compared."""
    return {name: open_session(path, provider=provider_of(dtype)) for name, path in paths.items()}


def provider_of(dtype: str) -> Provider:
    """Return the provider on which copies are compared: the CPU unless it lacks support for the dtype."""
    return "cuda" if numpy_dtype(dtype) == BFLOAT16 else "cpu"


def compare_with(stored: ModelDirectory, graphs: Mapping[str, bytes], dtype: str, copied: Executor) -> None:
    """Compare the outputs of graphs on one input with those of their copies, bit for bit.

    Raises :class:`ParityError` if they differ.
    """
    declared = stored.spec.graphs
    fixed = fixed_sizes(next(iter(graphs.values())))
    point = Point(fixed.get(rows_of(declared)[0], 2), fixed.get("sequence", 5), 0, "none")
    feeds = make_feeds(declared, point, 0, 64, fixed=fixed)
    sessions = {
        name: open_session(graph, provider=provider_of(dtype), weights=stored.path) for name, graph in graphs.items()
    }
    expected, results = (
        run_pipeline(executor, declared, feeds, point, split=True)
        for executor in (OnnxExecutor(sessions, numpy_dtype(dtype)), copied)
    )
    for graph, outputs in expected.items():
        for name, value in outputs.items():
            if not np.array_equal(value, results[graph][name], equal_nan=True):
                raise ParityError(f"the copy's outputs differ from the export's: {name} of {graph}", stored.path)
