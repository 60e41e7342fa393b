"""Judges of faulty graphs: zoo's own comparison (the gate), the checks of other exporters, and float64 evaluation."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from tests.export.parity.regimes import REGIMES
from tests.exported import change_weights, inlined
from tests.precisions import compare_reduced, make_reduced
from zoo import plugins
from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, ParityError
from zoo.models import create, persist
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Arrays, Executor, run_pipeline
from zoo.probe.positions import valid_positions
from zoo.probe.widened import WideWeight
from zoo.registry import registry
from zoo_export.parity import compare, reference, sweep
from zoo_export.trace.make import PORTABLE, Options, make_graphs
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP, OnnxExecutor
from zoo_runtime.onnx_runtime.providers import open_session

__all__ = [
    "FAMILIES",
    "POINTS",
    "REGIMES",
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
    size: tuple[str, ...] = SIZE
    precision: str | None = None
    """A smaller precision in whose graphs faults are seeded, instead of the model's own."""


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
_NARROW = (*SIZE, "intermediate_size=24")
_SPANS = ("span=12", "max_seq_len=32", "hidden_size=16", "num_heads=4")
FAMILIES = {
    "adaptive span": Study("adaptive-span-tiny", ("span_ramp=4", "intermediate_size=24"), size=_SPANS),
    "all-attention": Study("all-attention-tiny", ("num_memories=6",), size=_SPANS),
    "bert, 5000 ids": Study("bert-tiny", ("vocab_size=5000", "mask_token_id=17", "pooler=false"), size=_NARROW),
    "linformer": Study("linformer-tiny", ("attention_rank=8",), size=_NARROW),
    "llama": Study("llama-tiny", ("num_kv_heads=2", "head_dim=4"), size=_NARROW),
    "llama, in place": Study("llama-tiny", ("num_kv_heads=2", "head_dim=4"), profile="cpu", size=_NARROW),
    "longformer": Study("longformer-tiny", ("attention_window=8",), size=_NARROW),
    "mamba2": Study(
        "mamba2-tiny", size=("max_seq_len=48", "hidden_size=12", "head_dim=4", "state_size=4", "num_groups=2")
    ),
    "mixtral": Study("mixtral-tiny", ("num_experts=4",), size=_NARROW),
    "neox": Study("neox-tiny", ("rotary_dim=2",), size=_NARROW),
    "modernbert": Study("modernbert-tiny", ("sliding_windows=[0, 8]",), size=_NARROW),
    "perceiver": Study(
        "perceiver-tiny",
        ("embedding_size=12", "num_latents=4", "value_head_dim=4", "cross_value_head_dim=4"),
        size=_NARROW,
    ),
    "performer": Study("performer-tiny", ("attention_rank=8",), size=_NARROW),
    "product-key memory": Study("product-key-memory-tiny", ("memory_keys=8", "memory_query_size=8"), size=_NARROW),
    "qwen3-next": Study(
        "qwen3-next-tiny",
        ("linear_layers=[true, false]", "num_kv_heads=2", "head_dim=8", "linear_num_heads=4", "linear_head_dim=4"),
        size=(*_NARROW, "linear_num_key_heads=2", "linear_key_head_dim=4"),
    ),
    "reformer": Study(
        "reformer-tiny",
        ("head_dim=4", "axial_shape=[4, 8]", "axial_sizes=[4, 12]", "local_chunk_length=4", "lsh_chunk_length=8"),
        size=("max_seq_len=32", "hidden_size=16", "num_heads=4", "intermediate_size=24"),
    ),
    "rnn": Study("rnn-tiny", size=("max_seq_len=32", "embedding_size=12", "hidden_size=8")),
    "seq2seq": Study(
        "seq2seq-tiny",
        size=("max_seq_len=32", "embedding_size=8", "hidden_size=8", "attention_size=8", "maxout_size=4"),
    ),
    "t5": Study("t5-tiny", ("head_dim=4",), size=_NARROW),
    "t5, in place": Study("t5-tiny", ("head_dim=4",), profile="cpu", size=_NARROW),
    "textcnn": Study("textcnn-tiny", ("num_filters=6",), size=("max_seq_len=32", "hidden_size=16")),
    "vit": Study("vit-tiny", size=("hidden_size=16", "num_heads=4", "intermediate_size=24")),
    "gpt, int8": Study("gpt-tiny", precision="int8"),
    "gpt, int4": Study("gpt-tiny", precision="int4"),
    "bert, int8": Study("bert-tiny", precision="int8"),
    "bert, float16 variant": Study("bert-tiny", precision="float16"),
}
"""Models of the other architectures, and smaller precisions."""


class Subject:
    """A saved model, its correct graphs, and all their faults."""

    def __init__(self, stored: ModelDirectory, profile: str = PORTABLE, precision: str | None = None) -> None:
        self.stored = stored
        self.variant = make_reduced(stored, precision, stored.path) if precision is not None else None
        self.linked = self.variant.files() if self.variant else make_graphs(stored, Options(profile=profile))
        self.flat = {name: inlined(data) for name, data in self.linked.items()}
        self.model = persist.load_directory(stored)
        self.values = {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    @classmethod
    def build(cls, study: Study, folder: Path) -> Subject:
        """Build the model of a study in a new folder."""
        plugins.select(plugins.Selection(third_party=False))
        spec = registry().resolve(study.preset, (*study.size, *study.settings))
        model = create.build(spec, seed=0, dtype=study.dtype)
        if study.trained:
            change_weights(model, 0, noise=True, gain=2.0)
        stored = ModelDirectory.open(persist.save_spec(spec, model, folder / "model"))
        return cls(stored, study.profile, study.precision)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that the model declares."""
        return self.stored.spec.graphs

    @property
    def dtype(self) -> str:
        """The dtype in which the graphs compute."""
        return "float16" if self.variant and self.variant.precision == "float16" else self.stored.dtype

    @property
    def runtime_only(self) -> bool:
        """Whether ONNX's reference implementation does not compute the graphs correctly, or only ONNX Runtime can."""
        operators = {node.op_type for model in self.flat.values() for node in model.graph.node}
        return self.variant is not None or bool(operators & {"GRU", "LSTM", "Scan"})

    @property
    def longest(self) -> int:
        """Number of tokens of the longest input."""
        return int(getattr(self.stored.spec.config, "max_seq_len", 1))

    def faults(self) -> Iterator[tuple[str, Fault]]:
        """Every fault with the name of its graph."""
        for name, model in self.flat.items():
            for fault in enumerate_faults(model, self.values, self.longest):
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
        digest.update(self._weights(tuple(tensor._version for tensor in self._stored())))
        for name, value in sorted(feeds.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        key = digest.digest()
        if key not in self.results:
            self.results[key] = super().__call__(graph, feeds)
        return dict(self.results[key])

    @functools.lru_cache(maxsize=4)  # noqa: B019  (lives as long as one comparison)
    def _weights(self, _versions: tuple[int, ...]) -> bytes:
        digest = hashlib.sha256()
        for tensor in self._stored():
            digest.update(tensor.detach().numpy().tobytes())
        return digest.digest()

    def _stored(self) -> Iterator[torch.Tensor]:
        for tensor in self.model.parameters():
            yield tensor.stored if isinstance(tensor, WideWeight) else tensor


@contextmanager
def kept_references() -> Iterator[None]:
    """Share torch's results between comparisons in this block."""
    kept = type("_KeptHere", (_Kept,), {"results": {}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "TorchExecutor", kept)
        yield


def gate(subject: Subject, name: str, data: bytes) -> Verdict:
    """Apply zoo's comparison. Faults are caught if the graph differs or cannot be compared.

    The search for the diverging module is skipped.
    """
    graphs, variant = {**subject.linked, name: data}, subject.variant
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep.Sweep, "first_divergence", lambda _: None)
            if variant is None:
                report = compare.compare(subject.stored, graphs)
            else:
                faulty = {key: variant.parse(value, subject.stored) for key, value in graphs.items()}
                report = compare_reduced(subject.stored, replace(variant, graphs=faulty))
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
            ids = next(tensor.name for tensor in graph.input_tensors() if "sequence" in tensor.dims)
            for tensor in graph.past_tensors():
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

    The maximum over random weights of several sizes and over inputs other than the gate's, among them those that meet
    the condition of the fault. 0, up to float64 rounding, means that the fault changes no outputs.
    """
    correct = subject.flat
    broken = {**correct, name: fault.apply(correct[name])}
    runs = _on_the_runtime if subject.runtime_only else _in_float64
    moved = 0.0
    for draw in range(draws):
        honest, faulty = (runs(subject, graphs, draw) for graphs in (correct, broken))
        for point in (*POINTS, *fault.reach.points):
            feeds = make_feeds(subject.graphs, point, 1000 + draw, subject.longest, special=fault.reach.ids)
            wanted = run_pipeline(honest, subject.graphs, feeds, point, split=True)
            try:
                found = run_pipeline(faulty, subject.graphs, feeds, point, split=True)
            except Exception:  # anything that numpy cannot compute
                return np.inf
            moved = max(moved, _distance(subject.graphs, wanted, found, feeds, point))
    return moved


def _in_float64(subject: Subject, graphs: Mapping[str, onnx.ModelProto], draw: int) -> Executor:
    weights = random_weights(subject, draw)
    return Exact({name: in_double(model, weights, subject.stored) for name, model in graphs.items()})


def _on_the_runtime(subject: Subject, graphs: Mapping[str, onnx.ModelProto], draw: int) -> Executor:
    """Return the graphs on ONNX Runtime, with the stored weights: rounding is that of the model's dtype."""
    sessions = {
        name: open_session(model.SerializeToString(), weights=subject.stored.path, optimize=False, spin=False)
        for name, model in graphs.items()
    }
    return OnnxExecutor(sessions, np.dtype(subject.dtype))


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
    order = sorted(stored.layout, key=lambda name: (stored.layout[name].file, stored.layout[name].offset))
    places = {(stored.layout[name].file, stored.layout[name].offset): place for place, name in enumerate(order)}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for item in made.graph.initializer:
        if item.external_data:
            entries = {entry.key: entry.value for entry in item.external_data}
            place, size = places[entries["location"], int(entries["offset"])], math.prod(item.dims)
            value = weights[order[place]]
            if value.size != size:  # it spans several tensors
                following = np.concatenate([weights[name].ravel() for name in order[place:]])
                value = following[:size].reshape(tuple(item.dims))
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
