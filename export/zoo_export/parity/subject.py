"""Subjects of a comparison: graphs opened in several ways, and the PyTorch models that they must match."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.artifact import ModelDirectory
from zoo.contract import Graph, standard_fields
from zoo.errors import ArtifactError, ParityError, UnreadableError, storage_errors
from zoo.models import persist
from zoo.probe.inputs import Feeds, Point
from zoo.probe.module import TorchExecutor, add_noise, declared_tensors, weights_of
from zoo.probe.pipeline import Executor
from zoo.storage import scratch_folder
from zoo_export.coverage.outcomes import Conditions
from zoo_export.graph.links import arrays_of, pointers, referenced_tensors
from zoo_export.graph.metadata import without_functions
from zoo_export.graph.static import fixed_sizes
from zoo_export.parity.ahead import Sessions
from zoo_export.parity.modules import ModuleError, module_errors
from zoo_export.parity.reference import SEED, Models
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.placement import placement
from zoo_runtime.onnx_runtime.providers import Memory, Provider, open_session
from zoo_runtime.serving.executor import ServingExecutor

__all__ = ["FAINT", "LEVELS", "LEVEL_LABELS", "PERTURBED", "PERTURBED_LABELS", "REFERENCE", "OnnxSubject", "Subject",
           "Weights", "onnx_facts", "open_perturbed"]  # fmt: skip

Weights = Mapping[str, "np.ndarray[Any, Any]"]

REFERENCE = "the module in float64"
LEVELS = {"off": False, "all": True}
"""Optimisation levels of ONNX Runtime at which graphs are compared."""
LEVEL_LABELS = {"off": "optimisations off", "all": "optimisations on"}
PERTURBED, FAINT = "perturbed", "faint"
"""Levels with noise on every weight: a graph must equal the model for any weights of the same layout."""
PERTURBED_LABELS = {PERTURBED: "with perturbed weights", FAINT: "with faint weights"}
_LABELS = {**LEVEL_LABELS, **PERTURBED_LABELS}
_FAINT = 1 / 8
"""Factor on all weights that makes activations small enough for the epsilon of a norm to matter."""

_REPACKED = 2e9
"""Bytes of weights up to which ONNX Runtime repacks them for its kernels, in memory. Larger ones stay in their file."""


class Subject(ABC):
    """Graphs of a model under comparison.

    A level is one way to run them: with or without optimisations, on the stored weights or on perturbed ones.

    Args:
        stored: the model that was exported.
        graphs: the declared graphs that are compared.
        models: the model by which they are judged.
        labels: a phrase for error messages for each level.
    """

    coarse: frozenset[str] = frozenset()
    """Levels at which the graphs differ from PyTorch by more than rounding."""
    recorded: str | None = None
    """The level that a replay of the comparison can repeat, if a sample of it is kept."""
    engine = "onnxruntime"
    """The distribution of the runtime, whose version is recorded."""

    def __init__(
        self, stored: ModelDirectory, graphs: Sequence[Graph], models: Models, labels: Mapping[str, str]
    ) -> None:
        self.stored, self.graphs, self.models, self.labels = stored, tuple(graphs), models, labels
        self.fixed: Mapping[str, int] = {}
        """Sizes of the dimensions that have only one, by name."""

    @abstractmethod
    def open(self) -> Mapping[str, Executor]:
        """Open the graphs on the stored weights. Returns an executor for each level without perturbation."""

    def long_runtimes(self, runtimes: Mapping[str, Executor]) -> Mapping[str, Executor]:
        """Return the executors, by level, for inputs that take long, given those of :meth:`open`."""
        return runtimes

    @abstractmethod
    def open_perturbed(self) -> Iterator[Mapping[str, Executor]]:
        """Perturb the models' weights and open the graphs on the same, one or more times.

        Each item maps the levels that run on the models' current weights to executors.
        """

    def close(self) -> None:  # noqa: B027  (most have none)
        """Remove temporary files. The graphs cannot be opened afterwards."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Evidence about the subject as a whole."""

    def compares(self, point: Point) -> bool:
        """Return whether the graphs are defined at a point of the grid."""
        return True

    def conditions(self) -> Sequence[Conditions]:
        """Return the conditions of the graphs whose outcomes the compared points should cover."""
        return ()

    def epsilon(self, level: str) -> float:
        """The rounding unit of the dtype in which a level computes."""
        return self.models.epsilon

    def yardstick(self, level: str) -> TorchExecutor:
        """The torch model whose error bounds this level."""
        return self.models.yardstick

    def nudged(self, bits: int = 1) -> Iterator[TorchExecutor]:
        """Yield torch models that differ by rounding alone: their errors extend the allowed error."""
        return self.models.nudged(bits)

    def moved(self) -> Iterator[Executor]:
        """Yield the graphs with other constants of the same rounding: what they change extends the allowed error."""
        return iter(())

    def graph_facts(self, graph: Graph, runtimes: Mapping[str, Executor]) -> dict[str, Any]:
        """Evidence about one graph, apart from its errors."""
        return {}

    def module_errors(self, level: str, name: str, feeds: Feeds, point: Point) -> list[ModuleError] | None:
        """Compare the output of each module of a graph, or return None if it cannot be told at this level."""
        return None


class OnnxSubject(Subject):
    """ONNX graphs, at each optimisation level.

    Args:
        stored: the model that was exported.
        files: its serialised graphs, by name.
        provider: the execution provider to run them on.
        declared: the declared graphs, by default those of a portable export.
        in_float32: compare graphs that were widened to float32 (:func:`zoo_export.graph.widen.widen`) with the model
            in float32, on perturbed weights alone.
        moved: the same graphs with constants elsewhere within the rounding to half precision.
        load: returns a new instance of the model, by default the one that is stored.
    """

    recorded: str | None = "all"
    _can_close = True
    """Whether executors hold no sessions but those that they are given."""

    def __init__(
        self,
        stored: ModelDirectory,
        files: Mapping[str, bytes],
        provider: Provider,
        declared: Sequence[Graph] | None = None,
        *,
        in_float32: bool = False,
        moved: Sequence[Mapping[str, bytes]] = (),
        load: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.files, self.provider, self._moved = files, provider, moved
        self._in_float32 = in_float32
        self._shares = load is None and not in_float32 and provider == "cpu"
        """Whether the models have the weights that sessions read."""
        self._load = load = load or partial(persist.load_directory, stored)
        labels = {level: f"{label}, in float32" for level, label in PERTURBED_LABELS.items()} if in_float32 else _LABELS
        models = Models(lambda: load().float()) if in_float32 else Models(load)
        super().__init__(stored, declared or stored.spec.windowed_graphs, models, labels)
        self.fixed = fixed_sizes(next(iter(files.values())))
        size = sum(place.length for place in stored.layout.values())
        self._repacked: Memory = "fast" if size <= _REPACKED else "mapped"
        self._scratch: Path | None = None
        """Folder of the models' current weights, once they are perturbed."""
        self._opened = ExitStack()
        self._weights_now = ""
        """Level whose weights the models have, if perturbed."""

    @property
    def capacity(self) -> int | None:
        """The largest number of tokens that the graphs have room for; None if it is that of the model."""
        return None

    def open(self) -> dict[str, Executor]:
        return {
            level: self._open(self.files, optimize, memory=self._repacked if optimize else "mapped")
            for level, optimize in ({} if self._in_float32 else LEVELS).items()
        }

    def long_runtimes(self, runtimes: Mapping[str, Executor]) -> Mapping[str, Executor]:
        """Return optimised sessions on mapped weights: a long input needs the memory of repacked ones for itself.

        Without a pool, the memory of each result is free for the next ones.
        """
        return {"all": self._open(self.files, True, share=True, pool=False)}

    def conditions(self) -> Sequence[Conditions]:
        longest = standard_fields(self.stored.spec.config).max_seq_len
        return [Conditions(graph, self.files[graph.name], self.stored.path, longest) for graph in self.graphs]

    def open_perturbed(self) -> Iterator[dict[str, Executor]]:
        if not self._in_float32:
            self._scratch = self._opened.enter_context(scratch_folder())
            with storage_errors(self._scratch):
                self.models.move(self.stored, self._scratch)
        for level, _ in open_perturbed(self.models):
            self._weights_now = level
            yield {level: self._open(self.files, True)}

    def close(self) -> None:
        self._opened.close()

    def moved(self) -> Iterator[Executor]:
        return (self._open(files, True) for files in self._moved)

    def module_errors(self, level: str, name: str, feeds: Feeds, point: Point) -> list[ModuleError]:
        self._recall(level)
        graph = next(graph for graph in self.graphs if graph.name == name)

        def run_tapped(data: bytes) -> Executor:
            return self._open({**self.files, name: data}, False)

        references = self.models.reference, self.models.yardstick
        return module_errors(graph, self.files[name], self.graphs, run_tapped, references, feeds, point)

    def graph_facts(self, graph: Graph, runtimes: Mapping[str, Executor]) -> dict[str, Any]:
        return onnx_facts(graph, runtimes["all"], self.files[graph.name])

    def facts(self) -> dict[str, Any]:
        layout = self.stored.layout
        return {
            "provider": self.provider,
            "dtype": self.stored.dtype,
            "reference": REFERENCE,
            "weights_in_memory": self._repacked,
            "unused_tensors": sorted(set(layout) - referenced_tensors(self.files.values(), layout)),
        }

    def _open(
        self,
        files: Mapping[str, bytes],
        optimize: bool,
        memory: Memory = "mapped",
        *,
        share: bool = False,
        pool: bool = True,
    ) -> Executor:
        """Open sessions for all graphs on the current weights of the models.

        With ``share``, optimised sessions, too, have the memory of the stored weights in common with the models.
        """
        weights = self._scratch or self.stored.path
        replaced = {name: self._replaced(file) for name, file in files.items()}
        shared = {name: self._shared(file, optimize and not share) for name, file in files.items()}

        def open_all() -> dict[str, ort.InferenceSession]:
            return {
                name: open_session(
                    file,
                    weights=weights,
                    provider=self.provider,
                    optimize=optimize,
                    placements=True,
                    memory=memory,
                    spin=False,  # torch and the sessions take turns; idle threads of one would slow down the other
                    pool=pool,
                    replace=replaced[name],
                    shared=shared[name],
                )
                for name, file in files.items()
            }

        apart = self.provider == "cpu" and self._scratch is None and not any(shared.values())
        try:
            sessions = Sessions(open_all, apart=apart and self._can_close)
        except UnreadableError:
            raise
        except ArtifactError as error:
            raise ParityError(f"cannot be verified: {error}", self.stored.path) from error
        return self._executor(sessions)

    def _executor(self, sessions: Mapping[str, ort.InferenceSession]) -> Executor:
        return OnnxExecutor(sessions, self.models.yardstick.dtype, lean=True)

    def _replaced(self, file: bytes) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the weights for the initialisers of a graph whose dtype is not that of the weights' file.

        Raises :class:`ParityError` if an initialiser is no weight at all.
        """
        names = {(tensor.file, tensor.offset): name for name, tensor in self.stored.layout.items()}
        places = pointers(file)
        astray = [name for name, place in places.items() if place not in names]
        if astray:
            raise ParityError(f"initialiser {astray[0]} points at no tensor", self.stored.path)
        if not self._in_float32:
            return None
        weights = self.models.state()
        return {name: weights[names[place]] for name, place in places.items()}

    def _shared(self, file: bytes, from_file: bool) -> dict[str, np.ndarray[Any, Any]]:
        """Return the models' weights for the initialisers of a graph, whose pages are then mapped once.

        With ``from_file``, sessions on the stored weights read the file, as users' sessions do.
        """
        if not self._shares or (from_file and self._scratch is None):
            return {}
        weights = self.models.state()
        stored = {(place.file, place.offset): weights[name] for name, place in self.stored.layout.items()}
        return arrays_of(file, stored)

    def _recall(self, level: str) -> None:
        """Give the models the weights with which ``level`` was compared."""
        needed = level if level in PERTURBED_LABELS else ""
        if needed == self._weights_now:
            return
        if not needed:
            stored = iter(weights_of(self._load()))
            self.models.change(lambda weight: weight.copy_(next(stored)))
        elif needed == FAINT:  # perturbed weights are those times a power of two
            self.models.change(lambda weight: weight.mul_(_FAINT))
        self._weights_now = needed


def open_perturbed(models: Models) -> Iterator[tuple[str, Weights]]:
    """Put noise on every weight of the models, faint first. Yields the level and the weights.

    Initial biases are 0 and initial norm weights are 1: without noise, a graph that ignores them would pass. Initial
    projections are so small that attention is almost uniform: a wrong score would vanish in rounding.
    """
    generator = torch.Generator().manual_seed(SEED)
    upper = declared_tensors(models.yardstick.model).upper
    models.change(lambda weight: add_noise(weight, generator, upper=upper.get(id(weight))).mul_(_FAINT))
    yield FAINT, models.state()
    models.change(lambda weight: weight.div_(_FAINT))
    yield PERTURBED, models.state()


def onnx_facts(graph: Graph, runtime: Executor, file: bytes) -> dict[str, Any]:
    """Return the placement of a graph's nodes by provider, and why it has no functions."""
    assert isinstance(runtime, OnnxExecutor | ServingExecutor)
    return {"placement": dict(placement(runtime.sessions[graph.name])), **without_functions(file)}
