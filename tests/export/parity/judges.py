"""Judges of faulty graphs: zoo's own comparison (the gate), the checks of other exporters, and float64 evaluation."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch.onnx.verification import VerificationInfo

from tests.export.parity.faults import Fault, enumerate_faults
from tests.exported import change_weights, inlined
from zoo import plugins
from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError
from zoo.models import create, persist
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, run_pipeline
from zoo.probe.positions import valid_positions
from zoo.registry import registry
from zoo_export.parity import compare, reference, sweep
from zoo_export.trace.make import PORTABLE, Options, make_graphs
from zoo_runtime.buffers import PAST_LENGTH
from zoo_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.providers import open_session

__all__ = [
    "POINTS",
    "STUDIES",
    "Exact",
    "Study",
    "Subject",
    "Verdict",
    "effect",
    "gate",
    "in_double",
    "kept_references",
    "optimum",
    "random_weights",
    "torch_verify",
]

Array = np.ndarray[Any, Any]
Verdict = Literal["caught", "passed"]

SIZE = ("max_seq_len=32", "hidden_size=16", "num_layers=2", "num_heads=4")
"""Small, because calls dominate the time; 32 positions suffice for the inputs of every judge."""


@dataclass(frozen=True)
class Study:
    """A model in whose graphs faults are seeded."""

    preset: str
    settings: tuple[str, ...] = ()
    dtype: str = "float32"
    trained: bool = True
    """Whether biases and norms are random and matrices twice as large; initial weights hide more faults."""
    profile: str = PORTABLE


STUDIES = {
    "gpt": Study("gpt-tiny"),
    "gpt, fresh": Study("gpt-tiny", trained=False),
    "gpt, grouped queries, untied": Study("gpt-tiny", ("num_kv_heads=2", "tie_embeddings=false", "activation=relu")),
    "gpt, float16": Study("gpt-tiny", dtype="float16"),
    "gpt, in place": Study("gpt-tiny", profile="cpu"),
    "bert": Study("bert-tiny"),
    "bert, fresh": Study("bert-tiny", trained=False),
    "bert, sentence embedding": Study("bert-tiny", ("task=sentence-embedding", "activation=silu")),
    "bert, first token": Study("bert-tiny", ("task=sentence-embedding", "pooling=cls", "normalize=false")),
    "bert, classification": Study("bert-tiny", ("task=text-classification", "num_classes=3", "activation=relu")),
    "bert, pretraining": Study("bert-tiny", ("task=pretraining",)),
    "bert, positions of words, no segments": Study(
        "bert-tiny", ("skip_padding=true", "pad_token_id=3", "type_vocab_size=0", "pooler_activation=relu")
    ),
    "bert, one block, narrow embeddings": Study(
        "bert-tiny", ("task=fill-mask", "share_layers=true", "embedding_size=24", "pooler=false")
    ),
    "bert, replaced tokens": Study("bert-tiny", ("task=replaced-token-detection", "pooler=false")),
    "transformer": Study("transformer-tiny"),
    "transformer, fresh": Study("transformer-tiny", trained=False),
    "transformer, in place": Study("transformer-tiny", profile="cpu"),
    "transformer, norm first, learned positions, biases, untied": Study(
        "transformer-tiny",
        ("norm_first=true", "positions=learned", "attention_bias=true", "tie_embeddings=false", "activation=gelu"),
    ),
}


class Subject:
    """A saved model, its correct graphs, and all their faults."""

    def __init__(self, stored: ModelDirectory, profile: str = PORTABLE) -> None:
        self.stored = stored
        self.linked = make_graphs(stored, Options(profile=profile))
        self.flat = {name: inlined(data) for name, data in self.linked.items()}
        self.model = persist.load_directory(stored)
        self.values = {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    @classmethod
    def build(cls, study: Study, folder: Path) -> Subject:
        """Build the model of a study in a new folder."""
        plugins.select(plugins.Selection(third_party=False))
        spec = registry().resolve(study.preset, (*SIZE, *study.settings))
        model = create.build(spec, seed=0, dtype=study.dtype)
        if study.trained:
            change_weights(model, 0, noise=True, gain=2.0)
        return cls(ModelDirectory.open(persist.save_spec(spec, model, folder / "model")), study.profile)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that the model declares."""
        return self.stored.spec.graphs

    def faults(self) -> Iterator[tuple[str, Fault]]:
        """Every fault with the name of its graph."""
        for name, model in self.flat.items():
            for fault in enumerate_faults(model, self.values):
                yield name, fault

    def seed(self, name: str, fault: Fault) -> bytes | None:
        """Return the graph with a fault, or None if the runtime does not load it."""
        data = fault.apply(self.flat[name]).SerializeToString()
        try:
            open_session(data, weights=self.stored.path, optimize=False, spin=False)
        except ArtifactError:
            return None
        return data


# The gate.


class _Kept(TorchExecutor):
    """Cached torch results, keyed by everything that they depend on, since they are the same for all faults."""

    results: dict[bytes, Arrays]

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        digest = hashlib.sha256(f"{graph.name} {self.real}".encode())
        digest.update(self._weights(tuple(tensor._version for tensor in self.model.parameters())))
        for name, value in sorted(feeds.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        key = digest.digest()
        if key not in self.results:
            self.results[key] = super().__call__(graph, feeds)
        return dict(self.results[key])

    @functools.lru_cache(maxsize=4)  # noqa: B019  (lives as long as one comparison)
    def _weights(self, _versions: tuple[int, ...]) -> bytes:
        digest = hashlib.sha256()
        for tensor in self.model.parameters():
            digest.update(tensor.detach().numpy().tobytes())
        return digest.digest()


@contextmanager
def kept_references() -> Iterator[None]:
    """Share torch's results between comparisons in this block, and skip the search for the diverging module."""
    kept = type("_KeptHere", (_Kept,), {"results": {}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "TorchExecutor", kept)
        patch.setattr(sweep.Sweep, "first_divergence", lambda _: None)
        yield


def gate(subject: Subject, name: str, data: bytes) -> Verdict:
    """Apply zoo's comparison. Faults are caught if the graph differs or cannot be compared."""
    try:
        report = compare.compare(subject.stored, {**subject.linked, name: data})
    except ParityError:
        return "caught"
    return "passed" if report.passed else "caught"


# The checks of other exporters.


def optimum(subject: Subject, name: str, data: bytes) -> Verdict:
    """Apply the rule of optimum's exporter (``validate_model_outputs`` in optimum/exporters/onnx/convert.py).

    Each graph by itself at one random input of its default shape: a batch of 2, 16 tokens, 16 of past where there is a
    past, one length of right padding for all rows. ``numpy.allclose`` with its default rtol and the configuration's
    ATOL_FOR_VALIDATION: 1e-4 for BERT, else the base class's 1e-5. Basic graph optimisations.
    """
    atol = 1e-4 if subject.stored.spec.architecture.name == "bert" else 1e-5
    rows = _one_call(subject, name, data, padded=True, level=ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    if rows is None:
        return "caught"
    same = all(want.shape == made.shape and np.allclose(want, made, atol=atol) for want, made in rows)
    return "passed" if same else "caught"


def torch_verify(subject: Subject, name: str, data: bytes) -> Verdict:
    """Apply the rule of ``torch.onnx.export(..., verify=True)``, with torch's own measure of differences.

    The example input is typical of its users: a batch of random tokens without padding. An absolute difference below
    5e-3 and a relative one below 0.1 pass.
    """
    rows = _one_call(subject, name, data, padded=False, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    if rows is None:
        return "caught"
    for want, made in rows:
        if want.shape != made.shape:
            return "caught"
        info = VerificationInfo.from_tensors("", torch.from_numpy(want), torch.from_numpy(made))
        if not (info.max_abs_diff < 5e-3 and info.max_rel_diff < 1e-1):
            return "caught"
    return "passed"


def _one_call(
    subject: Subject, name: str, data: bytes, *, padded: bool, level: ort.GraphOptimizationLevel
) -> list[tuple[Array, Array]] | None:
    """Return torch's and the graph's outputs for one input in the model's dtype, or None if the graph fails."""
    feeds, wanted = _dummy(subject, name, padded)
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(subject.stored.path))
    try:
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        made = session.run(list(wanted), dict(feeds))
    except Exception:  # the runtime's exceptions have no common base class
        return None
    return list(zip(wanted.values(), made, strict=True))


@functools.lru_cache(maxsize=32)
def _dummy(subject: Subject, name: str, padded: bool) -> tuple[Arrays, Arrays]:
    """Return a random input of the default shape, and the model's outputs."""
    graph = next(graph for graph in subject.graphs if graph.name == name)
    rng = np.random.default_rng(0)
    sizes = dict.fromkeys(graph.dim_names(), 16) | {"batch": 2}
    feeds: Arrays = {}
    for tensor in graph.input_tensors():
        shape = tensor.shape(sizes)
        if tensor.is_mask:
            feeds[tensor.name] = np.ones(shape, np.int64)
            if padded:
                feeds[tensor.name][:, 16 - int(rng.integers(1, 16)) : 16] = 0
        elif tensor.dtype == "int64":
            feeds[tensor.name] = rng.integers(0, tensor.upper or 2, shape)
        else:
            feeds[tensor.name] = rng.standard_normal(shape).astype(subject.stored.dtype)
    return feeds, TorchExecutor(subject.model)(graph, feeds)


# Float64.

POINTS = (
    Point(3, 5, 4, "left"),
    Point(3, 5, 4, "right"),
    Point(2, 1, 0, "none"),
    Point(2, 9, 0, "left"),
    Point(2, 1, 7, "none"),
)


class Exact:
    """Runs graphs in float64 with ONNX's own reference implementation."""

    dtype: np.dtype[Any] = np.dtype(np.float64)

    def __init__(self, graphs: Mapping[str, onnx.ModelProto]) -> None:
        self.runs = {name: ReferenceEvaluator(model) for name, model in graphs.items()}

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        names = [tensor.name for tensor in graph.output_tensors()]
        run = self.runs[graph.name]
        arrays, total = dict(feeds), 0
        if PAST_LENGTH in run.input_names:
            assert graph.past is not None
            ids = next(tensor.name for tensor in graph.input_tensors() if "sequence" in tensor.dims)
            for tensor in graph.past.tensors():
                start = feeds[tensor.name].shape[2]
                total = start + feeds[ids].shape[1]
                arrays[tensor.name] = np.pad(
                    feeds[tensor.name], ((0, 0), (0, 0), (0, total + 2 - start), (0, 0)), constant_values=3.0
                )
                arrays[PAST_LENGTH] = np.array(start)
        with np.errstate(all="ignore"):
            if LOGITS_TO_KEEP not in run.input_names:
                made = dict(zip(names, run.run(names, arrays), strict=True))
            else:
                made = dict(zip(names, run.run(names, arrays | {LOGITS_TO_KEEP: np.array(0)}), strict=True))
                (last,) = run.run(["logits"], arrays | {LOGITS_TO_KEEP: np.array(1)})
                made["logits"] = np.concatenate((made["logits"][:, :-1], last), axis=1)
        if total:
            made |= {tensor.name: made[tensor.name][:, :, :total] for tensor in graph.present_tensors()}
        return made


def effect(subject: Subject, name: str, fault: Fault, draws: int = 3) -> float:
    """Return the effect of a fault on valid outputs in float64, relative to the largest output.

    The maximum over random weights of several sizes and over inputs other than the gate's. 0, up to float64 rounding,
    means that the fault changes no outputs.
    """
    moved = 0.0
    for draw in range(draws):
        weights = random_weights(subject, draw)
        honest = {name: in_double(model, weights, subject.stored) for name, model in subject.flat.items()}
        faulty = {**honest, name: in_double(fault.apply(subject.flat[name]), weights, subject.stored)}
        for point in POINTS:
            feeds = make_feeds(subject.graphs, point, 1000 + draw, 32)
            wanted = run_pipeline(Exact(honest), subject.graphs, feeds, point, split=True)
            try:
                found = run_pipeline(Exact(faulty), subject.graphs, feeds, point, split=True)
            except Exception:  # anything that numpy cannot compute
                return np.inf
            moved = max(moved, _distance(subject.graphs, wanted, found, feeds, point))
    return moved


def _distance(
    graphs: tuple[Graph, ...], wanted: Mapping[str, Arrays], found: Mapping[str, Arrays], feeds: Feeds, point: Point
) -> float:
    furthest = 0.0
    for graph in graphs:
        for tensor in graph.output_tensors():
            exact, made = wanted[graph.name][tensor.name], found[graph.name][tensor.name]
            if exact.shape != made.shape:
                return np.inf
            valid = np.broadcast_to(valid_positions(graph, tensor, feeds, point), exact.shape)
            if not np.isfinite(made[valid]).all():
                return np.inf
            scale = float(np.max(np.abs(exact[valid]), initial=1e-300))
            furthest = max(furthest, float(np.max(np.abs(exact - made)[valid], initial=0.0)) / scale)
    return furthest


def random_weights(subject: Subject, draw: int) -> dict[str, Array]:
    rng = np.random.default_rng(draw)
    size = (0.5, 0.15, 1.5)[draw % 3]
    return {name: rng.standard_normal(value.shape) * size for name, value in subject.values.items()}


def in_double(model: onnx.ModelProto, weights: Mapping[str, Array], stored: ModelDirectory) -> onnx.ModelProto:
    """Convert the graph to float64 with these weights. Values that a fault introduced are kept."""
    own = helper.np_dtype_to_tensor_dtype(np.dtype(stored.dtype))
    places = {(tensor.file, tensor.offset): name for name, tensor in stored.layout.items()}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for item in made.graph.initializer:
        if item.external_data:
            entries = {entry.key: entry.value for entry in item.external_data}
            value = weights[places[entries["location"], int(entries["offset"])]]
        else:
            value = numpy_helper.to_array(item)
        item.CopyFrom(numpy_helper.from_array(_double(value, own), item.name))
    for node in made.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in (own, TensorProto.FLOAT):
                attribute.i = TensorProto.DOUBLE
            elif attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.CopyFrom(numpy_helper.from_array(_double(numpy_helper.to_array(attribute.t), own)))
    return made


def _double(value: Array, own: int) -> Array:
    return value.astype(np.float64) if helper.np_dtype_to_tensor_dtype(value.dtype) == own else value
