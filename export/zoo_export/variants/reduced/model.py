"""Models in another precision: graphs, and a safetensors file for the weights that change.

Unchanged weights are read from the model's own file, so nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir

from zoo.arrays import Array
from zoo.artifact import Export, ModelDirectory, variant_of
from zoo.artifact.weights import StoredTensor, plain_name
from zoo.errors import ArtifactError
from zoo.probe.dtypes import numpy_dtype
from zoo_export.graph.file import dump, load
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import Memory, Provider, check_dtype, open_session

__all__ = [
    "ONNX_DTYPES",
    "PRECISION_KEY",
    "Place",
    "ReducedModel",
    "empty_model",
    "external",
    "open_reduced",
    "pointer",
    "read_pointer",
    "read_reduced",
    "weights_of_graph",
]

Place = tuple[str, int]
"""A file and an offset."""
PRECISION_KEY = "zoo.precision"
"""Graph metadata: the precision of the weights."""
ONNX_DTYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "I64": ir.DataType.INT64, "I32": ir.DataType.INT32,
    "U8": ir.DataType.UINT8, "I8": ir.DataType.INT8, "BOOL": ir.DataType.BOOL, "F64": ir.DataType.DOUBLE,
}  # fmt: skip


@dataclass(frozen=True)
class ReducedModel:
    """A model's graphs in another precision, and the additional weights file."""

    variant: str
    """The name of the variant."""
    directory: Path
    """Current directory of the file. Graphs refer to it as if it were beside the model's own file."""
    file: str | None
    """Name of the additional weights file, if there is one."""
    graphs: Mapping[str, ir.Model]
    """Graphs by declared name."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Weights of two or more dimensions that stay float32, each with the reason."""

    @property
    def precision(self) -> str:
        """The precision of the weights, or of the arithmetic."""
        return variant_of(self.variant).precision or self.variant

    @property
    def dtype(self) -> str:
        """The dtype of floating-point inputs and outputs."""
        return variant_of(self.variant).dtype or "float32"

    @property
    def path(self) -> Path:
        """Path of the additional weights file. There must be one."""
        assert self.file is not None
        return self.directory / self.file

    def weights_files(self, stored: ModelDirectory) -> list[Path]:
        """Return the paths of all weights files, of which ``stored`` has those of the original."""
        own = [] if self.file is None else [self.path]
        return [*sorted({stored.path / place.file for place in stored.layout.values()}), *own]

    def files(self) -> dict[str, bytes]:
        """Serialise the graphs, by declared name."""
        return {name: dump(model) for name, model in self.graphs.items()}

    def parse(self, data: bytes, stored: ModelDirectory) -> ir.Model:
        """Parse a graph of this precision, and resolve the locations of its weights."""
        return self.resolve(load(data), stored)

    def resolve(self, model: ir.Model, stored: ModelDirectory) -> ir.Model:
        """Resolve the locations of the weights of a graph, in place."""
        for tensor in map(pointer, model.graph.initializers.values()):
            if tensor is not None:
                tensor.base_dir = self.directory if str(tensor.location) == self.file else stored.path
        return model

    def footprint(self) -> int:
        """Return the number of bytes of all weights that the graphs read, counting each once."""
        places = {
            (str(tensor.location), tensor.offset): tensor.length
            for model in self.graphs.values()
            for tensor in map(pointer, model.graph.initializers.values())
            if tensor is not None
        }
        return sum(length or 0 for length in places.values())


def empty_model(variant: str, folder: Path) -> ReducedModel:
    """Return a model without graphs, whose weights are, or will be, in a folder."""
    return ReducedModel(variant, folder, variant_of(variant).weights_file, {})


def read_reduced(stored: ModelDirectory, variant: str) -> ReducedModel:
    """Read a model in another precision from the directory of its original.

    Raises:
        ArtifactError: its graphs or weights are not listed in the manifest.
    """
    export = Export(stored, variant)
    export.check()
    empty = empty_model(variant, stored.path)
    if empty.file is not None:
        stored.file(empty.file)  # raises if it is not listed
    return replace(empty, graphs={name: empty.parse(data, stored) for name, data in export.read().items()})


def open_reduced(
    reduced: ReducedModel,
    *,
    provider: Provider = "cpu",
    optimize: bool = True,
    values: Mapping[Place, Array] | None = None,
    memory: Memory = "fast",
    pool: bool = True,
    placements: bool = False,
    twice: bool = True,
) -> OnnxExecutor:
    """Open sessions for all graphs of a model, whose files need not be in its directory yet.

    Args:
        reduced: the model to run.
        provider: the execution provider.
        optimize: whether to run ONNX Runtime's graph optimisations.
        values: values that override stored weights, by location. ONNX Runtime copies them.
        memory: ``mapped`` if it shall not keep another copy, repacked for its kernels.
        pool: keep memory for the results of operators between runs.
        placements: record which provider runs each node.
        twice: see :class:`OnnxExecutor`.

    Raises:
        UsageError: the provider does not load, or does not support the precision.
        ArtifactError: a graph cannot be loaded, or its weights cannot be read.
    """
    check_dtype(reduced.dtype, provider, reduced.directory)
    sessions = {}
    for name, model in reduced.graphs.items():
        sessions[name] = open_session(
            dump(model),
            provider=provider,
            optimize=optimize,
            replace=weights_of_graph(reduced, model, values or {}),
            spin=False,
            memory=memory,
            pool=pool,
            placements=placements,
        )
    return OnnxExecutor(sessions, numpy_dtype(reduced.dtype), twice=twice)


def weights_of_graph(reduced: ReducedModel, model: ir.Model, values: Mapping[Place, Array]) -> dict[str, Array]:
    """Return the weights that a graph reads, by the names of its initialisers.

    Args:
        reduced: the model in another precision.
        model: one of its graphs.
        values: values that override stored weights, by location.

    Raises :class:`ArtifactError` if the weights cannot be read.
    """
    weights: dict[str, Array] = {}
    for key, value in model.graph.initializers.items():
        tensor = pointer(value)
        if tensor is not None and value.uses():
            override = values.get((str(tensor.location), tensor.offset or 0))
            try:
                weights[key] = read_pointer(tensor) if override is None else override
            except (OSError, ValueError) as error:
                raise ArtifactError(f"the data of initialiser {key} cannot be read ({error})", reduced.path) from error
    return weights


def read_pointer(tensor: ir.ExternalTensor) -> Array:
    """Map a tensor into memory.

    With a base directory, onnx-ir rejects files that have several hard links, as in a backup or a store of equal files.
    The manifest already ensures that the file is the model's own.
    """
    if not plain_name(str(tensor.location)) or Path(tensor.path).is_symlink():
        raise ValueError(f"{tensor.location} is not a file in the model directory")
    return ir.ExternalTensor(
        tensor.path, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or ""
    ).numpy()


def pointer(value: ir.Value) -> ir.ExternalTensor | None:
    """Return the place of an initialiser in a file, or None if the graph contains it."""
    return value.const_value if isinstance(value.const_value, ir.ExternalTensor) else None


def external(name: str, place: StoredTensor, directory: Path) -> ir.ExternalTensor:
    """Return a tensor that lies at a place in a file of a directory."""
    return ir.ExternalTensor(
        place.file, place.offset, place.length, ONNX_DTYPES[place.dtype],
        shape=ir.Shape(place.shape), name=name, base_dir=directory,
    )  # fmt: skip
