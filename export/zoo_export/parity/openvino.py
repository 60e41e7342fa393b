"""Comparison of the profile ``openvino`` with a model: graphs compiled by OpenVINO, with the past as their state."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.artifact import OPENVINO
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError, UnreadableError, storage_errors
from zoo.probe.pipeline import Executor
from zoo.storage import scratch_folder
from zoo_export.graph.file import load
from zoo_export.graph.inference import infer_types
from zoo_export.graph.metadata import without_functions
from zoo_export.parity.subject import OnnxSubject
from zoo_runtime.onnx_runtime.providers import Memory
from zoo_runtime.openvino.compiled import CompiledGraph
from zoo_runtime.openvino.executor import OpenVinoExecutor

__all__ = ["OpenVinoSubject", "check_integers", "compile_files", "folder_of_links"]

_INEXACT = {"BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Div", "Mod", "Mul", "Pow"}
"""Operators whose results OpenVINO computes in int32 or float32 where the types are int64."""
_TAKEN = {
    "Abs", "Add", "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "Identity", "Max", "Min", "Neg", "Pad",
    "Reshape", "Slice", "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators whose integer results are as large as what they are computed from, or nearly so."""


def check_integers(model: ir.Model, graph: Graph, where: Path) -> None:
    """Raise :class:`ParityError` for products and quotients of integers that depend on those in an input.

    They may need more bits than OpenVINO has, at ids that no compared input contains. Comparisons yield 0 and 1, and
    sizes are small.
    """
    numbers = {tensor.name for tensor in graph.input_tensors() if tensor.dtype == "int64" and not tensor.is_mask}
    large = {value for value in model.graph.inputs if value.name in numbers}
    types = infer_types(model)
    for node in model.graph:
        read = {"Gather": node.inputs[:1], "Where": node.inputs[1:]}.get(node.op_type, node.inputs)
        kinds = [types[str(value.name)][0] for value in node.outputs if value.name in types]
        if any(np.dtype(kind).kind not in "iu" for kind in kinds) or not large.intersection(read):
            continue
        if node.op_type in _INEXACT:
            problem = f"openvino computes {node.op_type} of integers in {', '.join(sorted(numbers))} in too few bits"
            raise ParityError(f"cannot be verified: {problem}", where, "use another profile")
        if node.op_type in _TAKEN:
            large.update(node.outputs)


@contextmanager
def folder_of_links(files: Iterable[Path]) -> Iterator[Path]:
    """Yield a new folder with these files: OpenVINO reads weights from beside a graph, not through symbolic links."""
    with scratch_folder() as folder:
        with storage_errors(folder):
            for file in files:
                source = file.resolve()
                try:
                    (folder / file.name).hardlink_to(source)
                except OSError:  # on another file system
                    shutil.copyfile(source, folder / file.name)
        yield folder


def compile_files(
    files: Mapping[str, bytes], graphs: Iterable[Graph], folder: Path, where: Path, precision: str | None = None
) -> dict[str, CompiledGraph]:
    """Compile serialised graphs, by name, whose weights are in a folder.

    Args:
        files: the graphs.
        graphs: their declarations.
        folder: where the weights are, and the graphs are written.
        where: the model, for errors.
        precision: see :class:`CompiledGraph`.

    Raises:
        ParityError: OpenVINO cannot convert or compile a graph.
    """
    compiled = {}
    declared = {graph.name: graph for graph in graphs}
    for name, file in files.items():
        path = folder / f"{name}.onnx"
        with storage_errors(folder):
            path.write_bytes(file)
        try:
            compiled[name] = CompiledGraph(path, declared[name], precision=precision)
        except UnreadableError:
            raise
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error.what}", where) from error
    return compiled


class OpenVinoSubject(OnnxSubject):
    """Graphs on OpenVINO, which always optimises them."""

    engine = OPENVINO

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.labels = {level: label for level, label in self.labels.items() if level != "off"}
        for graph in self.graphs:
            check_integers(load(self.files[graph.name]), graph, self.stored.path)

    def open(self) -> dict[str, Executor]:
        return {"all": self._open(self.files, True)}

    def long_runtimes(self, runtimes: Mapping[str, Executor]) -> Mapping[str, Executor]:
        return runtimes

    def graph_facts(self, graph: Graph, runtimes: Mapping[str, Executor]) -> dict[str, Any]:
        executor = runtimes["all"]
        assert isinstance(executor, OpenVinoExecutor)
        operations = executor.compiled[graph.name].operations
        return {"placement": {self.provider: operations}, **without_functions(self.files[graph.name])}

    def _open(
        self,
        files: Mapping[str, bytes],
        optimize: bool,
        memory: Memory = "fast",
        *,
        share: bool = False,
        pool: bool = True,
    ) -> Executor:
        """Compile all graphs on the current weights of the models. OpenVINO has no such options."""
        return self._compile(files)

    def _compile(self, files: Mapping[str, bytes], precision: str | None = None) -> OpenVinoExecutor:
        folder = self._scratch or self._opened.enter_context(folder_of_links(self._weights_files()))
        compiled = compile_files(files, self.graphs, folder, self.stored.path, precision)
        return OpenVinoExecutor(compiled, self.models.yardstick.dtype)

    def _weights_files(self) -> Sequence[Path]:
        """Paths of the files that the graphs read."""
        return sorted({self.stored.path / place.file for place in self.stored.layout.values()})
