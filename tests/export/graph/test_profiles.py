"""Profiles: graphs that update caches in place and compute the requested logits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo.probe.inputs import empty_past, next_past
from zoo_export.export import export_model
from zoo_export.trace.make import Options, make_graphs
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP, OnnxExecutor
from zoo_runtime.onnx_runtime.providers import loading_problem, open_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Array = np.ndarray[Any, Any]

CPU = Options(profile="cpu")
DECODERS = [
    ("gpt-tiny", ()),
    pytest.param("gpt-tiny", ("num_kv_heads=2", "tie_embeddings=false"), marks=pytest.mark.slow),
    pytest.param(
        "llama-tiny",
        ("qk_norm=true", "sliding_windows=[0, 5]", "rope_scaling=llama3", "rope_factor=4.0"),
        marks=pytest.mark.slow,
    ),
    pytest.param("gpt-tiny", ("sliding_windows=[0, 5]", "num_heads=3", "head_dim=10"), marks=pytest.mark.slow),
    ("transformer-tiny", ()),
    pytest.param("t5-tiny", (), marks=pytest.mark.slow),
]


@pytest.fixture(scope="session")
def exported_cpu(exported_build: Exported) -> Exported:
    """Export a model with non-trivial weights for the CPU."""
    made: dict[object, Path] = {}

    def export(name: str, *changes: str) -> Path:
        if (name, changes) not in made:
            folder = made[name, changes] = exported_build(name, *changes, noise=True, gain=4.0)
            export_model(folder, options=CPU)
        return made[name, changes]

    return export


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(str(path), load_external_data=False)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), DECODERS)
def test_decoder_updates_caches_in_place(exported_cpu: Exported, zoo: Zoo, name: str, changes: tuple[str, ...]) -> None:
    """Only standard operators, as in the portable profile; the inputs are described in the metadata."""
    folder = exported_cpu(name, *changes)
    model = load(folder / ("decoder.cpu.onnx" if (folder / "decoder.cpu.onnx").exists() else "model.cpu.onnx"))
    assert {(item.domain, item.version) for item in model.opset_import} == {("", 24)}
    assert not model.functions
    assert operators(model).count("TensorScatter") == 4
    assert "zoo.cache" not in {entry.key for entry in model.metadata_props}
    contract = json.loads(next(entry.value for entry in model.metadata_props if entry.key == "zoo.contract"))
    inputs = {item["name"]: item["dims"] for item in contract["inputs"]}
    outputs = {item["name"]: item["dims"] for item in contract["outputs"]}
    assert inputs[PAST_LENGTH] == inputs[LOGITS_TO_KEEP] == []
    assert inputs["past_key_values.1.value"][2] == outputs["present.1.value"][2] == "capacity"
    assert outputs["logits"][1] == "kept"
    evidence = json.loads((folder / "parity.cpu.json").read_text())
    assert (evidence["verified"], evidence["provider"]) == (True, "cpu")
    assert zoo("verify", folder, "--variant", "cpu").status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gpt-tiny", "model"),
        ("bert-tiny", "model"),
        ("vit-tiny", "model"),
        ("transformer-tiny", "decoder"),
        ("t5-tiny", "decoder"),
    ],
)
def test_layers_add_no_shape_arithmetic(exported_build: Exported, name: str, file: str) -> None:
    """Activations stay matrices between products: only Reshapes that split and merge heads remain."""
    counts = []
    for layers in (2, 3):
        stored = ModelDirectory.open(exported_build(name, f"num_layers={layers}"))
        data = make_graphs(stored, CPU)[file]
        counts.append(Counter(operators(onnx.load_model_from_string(data))))
    added = counts[1] - counts[0]
    attentions = added["Attention"]
    assert attentions == (2 if file == "decoder" else 1)
    sizes = {"Shape", "Concat", "Squeeze", "Unsqueeze", "Constant", "Range", "Expand", "Cast"}
    assert not sizes & set(added)
    assert added["Reshape"] == (6 if file == "decoder" else 4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt-tiny", ("num_heads=3", "head_dim=10")),
        pytest.param("llama-tiny", ("num_heads=4", "num_kv_heads=2", "head_dim=10"), marks=pytest.mark.slow),
    ],
)
def test_queries_are_scaled_before_attention(exported_build: Exported, name: str, changes: tuple[str, ...]) -> None:
    """The results are those of a factor inside of attention, for which ONNX Runtime would copy the keys."""
    stored = ModelDirectory.open(exported_build(name, *changes, noise=True, gain=4.0))
    (graph,) = stored.spec.graphs
    scaled = onnx.load_model_from_string(make_graphs(stored, CPU)[graph.name])
    makers = {output: node for node in scaled.graph.node for output in node.output}
    inside = onnx.ModelProto()
    inside.CopyFrom(scaled)
    attentions = [node for node in inside.graph.node if node.op_type == "Attention"]
    assert attentions
    for node in attentions:
        (scale,) = (attribute for attribute in node.attribute if attribute.name == "scale")
        product = makers[node.input[0]]
        assert (scale.f, product.op_type) == (1, "Mul")
        node.input[0], scale.f = product.input[0], 10**-0.5
    rng = np.random.default_rng(0)
    sizes = {"batch": 2, str(graph.past_length): 8}
    feeds = {spec.name: rng.standard_normal(spec.shape(sizes), np.float32) for spec in graph.past_tensors()}
    feeds |= {"input_ids": rng.integers(0, 260, (2, 1)), "attention_mask": np.ones((2, 6), np.int64)}
    feeds |= {PAST_LENGTH: np.array(5), LOGITS_TO_KEEP: np.array(0)}
    before, after = (
        open_session(model.SerializeToString(), weights=stored.path, spin=False).run(["logits"], feeds)[0]
        for model in (inside, scaled)
    )
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_encoder_has_no_further_inputs(exported_cpu: Exported) -> None:
    folder = exported_cpu("bert-tiny")
    inputs = [item.name for item in load(folder / "model.cpu.onnx").graph.input]
    assert inputs == ["input_ids", "attention_mask", "token_type_ids"]


@pytest.mark.slow
def test_profiles_coexist_with_the_portable_graph(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("gpt-tiny", gain=4.0)
    assert zoo("export", folder, "--onnx").status == 0
    graph = (folder / "model.onnx").read_bytes()
    said = zoo("export", folder, "--onnx", "--profile", "cpu")
    assert (said.status, said.err) == (0, "")
    assert "model.cpu.onnx verified on cpu at" in said.out
    assert (folder / "model.onnx").read_bytes() == graph
    assert {"model.cpu.onnx", "parity.cpu.json", "model.onnx", "parity.json"} <= set(ModelDirectory.open(folder).files)
    plain, special = (zoo("run", folder, "hello", *more).out for more in ((), ("--variant", "cpu")))
    assert plain == special != ""
    assert zoo("verify", folder, "--variant", "cpu", "--retrace").status == 0
    assert "blocks.1" in zoo("diff", folder, "--variant", "cpu").out
    zoo("export", folder, "--onnx", "--profile", "cpu").failed(2, "model.cpu.onnx", "--force")


@pytest.mark.slow
def test_profile_of_an_unbuilt_preset(zoo: Zoo) -> None:
    said = zoo("export", "gpt-tiny", "--onnx", "--profile", "cpu", "--graph-only")
    assert said.err == (
        "warning: gpt-tiny: model.cpu.onnx NOT VERIFIED: zoo verify gpt-tiny --variant cpu completes it\n"
    )
    assert json.loads(Path("gpt-tiny/parity.cpu.json").read_text())["verified"] is False


# Inputs of the graphs.


class Decoder:
    """The decoder of an exported model, called with numpy arrays."""

    def __init__(self, folder: Path) -> None:
        self.stored = ModelDirectory.open(folder)
        self.graph = self.stored.spec.graphs[-1]
        self.session = open_session(folder / "model.cpu.onnx", spin=False)

    def feeds(self, ids: Array, past: int, capacity: int, keep: int, fill: float) -> dict[str, Array]:
        sizes = {"batch": len(ids), str(self.graph.past_length): capacity}
        caches = {spec.name: np.full(spec.shape(sizes), fill, np.float32) for spec in self.graph.past_tensors()}
        mask = np.ones((len(ids), past + ids.shape[1]), np.int64)
        numbers = {PAST_LENGTH: np.array(past), LOGITS_TO_KEEP: np.array(keep)}
        return {"input_ids": ids, "attention_mask": mask, **caches, **numbers}

    def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        names = [item.name for item in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, feeds), strict=True))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 6), past=st.integers(0, 5), room=st.integers(0, 9),
    keep=st.integers(0, 8), fill=st.floats(-9, 9, width=32), seed=st.integers(0, 99),
)  # fmt: skip
def test_step_depends_only_on_filled_positions(
    exported_cpu: Exported, batch: int, length: int, past: int, room: int, keep: int, fill: float, seed: int
) -> None:
    """Results do not depend on capacity, content of free positions, or number of logits."""
    decoder = Decoder(exported_cpu("gpt-tiny"))
    ids = np.random.default_rng(seed).integers(0, 260, (batch, past + length))
    capacity = past + length + room
    whole = decoder.run(decoder.feeds(ids, 0, past + length, 0, 0.0))
    first = decoder.run(decoder.feeds(ids[:, :past], 0, capacity, 0, fill)) if past else None
    feeds = decoder.feeds(ids[:, past:], past, capacity, keep, fill)
    for spec, name in decoder.graph.past_pairs():
        if first is not None:
            feeds[spec.name] = first[name.name]
    second = decoder.run(feeds)
    kept = min(keep, length) or length
    assert second["logits"].shape[:2] == (batch, kept)
    np.testing.assert_allclose(second["logits"], whole["logits"][:, -kept:], rtol=0, atol=2e-4)
    for tensor in decoder.graph.present_tensors():
        found, wanted = second[tensor.name], whole[tensor.name]
        np.testing.assert_allclose(found[:, :, : past + length], wanted, rtol=0, atol=2e-4)
        assert np.array_equal(found[:, :, past + length :], np.full_like(found[:, :, past + length :], fill))


@pytest.mark.slow
def test_bound_cache_is_not_copied(exported_cpu: Exported) -> None:
    """The runtime writes the new token after the past, into the caller's memory."""
    decoder = Decoder(exported_cpu("gpt-tiny"))
    feeds = decoder.feeds(np.array([[5]]), 2, 8, 1, 0.5)
    binding = decoder.session.io_binding()
    buffers = {}
    for name, value in feeds.items():
        if name.startswith("past_key_values"):
            buffers[name] = ort.OrtValue.ortvalue_from_numpy(value)
            binding.bind_ortvalue_input(name, buffers[name])
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffers[name])
        else:
            binding.bind_cpu_input(name, value)
    binding.bind_output("logits")
    before = {name: feeds[name].copy() for name in buffers}
    decoder.session.run_with_iobinding(binding)
    for name, old in before.items():
        assert np.array_equal(feeds[name][:, :, [0, 1, 3, 4, 5, 6, 7]], old[:, :, [0, 1, 3, 4, 5, 6, 7]])
        assert not np.array_equal(feeds[name][:, :, 2], old[:, :, 2])


@pytest.mark.slow
def test_continuation_reuses_buffers_and_branch_gets_new_ones(exported_cpu: Exported) -> None:
    folder = exported_cpu("gpt-tiny")
    decoder = Decoder(folder)
    execute = OnnxExecutor({"model": decoder.session}, np.dtype(np.float32), twice=False)
    graph = decoder.graph

    def step(ids: list[int], past: dict[str, Any], seen: int) -> dict[str, Any]:
        feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, seen + len(ids)), np.int64)}
        return execute(graph, feeds | past)

    prompt = step([1, 2, 3], empty_past(graph, 1, execute.dtype), 0)
    past = next_past(graph, prompt)
    one = step([4], past, 3)
    assert np.shares_memory(one["present.0.key"], past["past_key_values.0.key"])
    kept = {name: value.copy() for name, value in one.items()}
    other = step([9], past, 3)
    assert not np.shares_memory(other["present.0.key"], past["past_key_values.0.key"])
    assert all(np.array_equal(one[name], kept[name]) for name in kept)
    again = step([4], past, 3)
    np.testing.assert_allclose(again["logits"], one["logits"], rtol=0, atol=1e-5)
    assert not np.allclose(other["logits"], one["logits"], atol=1e-3)
    rest = one
    for count in range(28):  # until the positions are exhausted
        rest = step([5], next_past(graph, rest), 4 + count)
    straight = step([1, 2, 3, 4, *[5] * 28], empty_past(graph, 1, execute.dtype), 0)
    np.testing.assert_allclose(rest["logits"], straight["logits"][:, -1:], rtol=0, atol=2e-4)


# Third-party decoders.

PLUGIN = """
import zoo
ZOO_API = 1
@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name=name.lower(), tasks=("text-generation",), config="{module}_config:ToyConfig",
                             model=f"{module}_model:{name}", reference="none")
            for name in ("Masked", "ByHand", "Scaled", "Headless")]
"""
CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class ToyConfig(zoo.Config):
    task: Literal["text-generation"] = "text-generation"
    max_seq_len: int = 16
    vocab_size: int = 40
    def graphs(self):
        return (zoo.Graph(inputs=(zoo.token_ids("input_ids", 40),),
                          outputs=(zoo.floats("logits", "batch", "sequence", 40),),
                          past=zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=4)),)
"""
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Masked(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding, self.qkv, self.head = nn.Embedding(40, 8), nn.Linear(8, 24), nn.Linear(8, 40, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    def seen(self, query, key):
        places = torch.arange(key.shape[2])
        return places <= places[key.shape[2] - query.shape[2]:].unsqueeze(-1)

    def attend(self, query, key, value):
        mask = self.seen(query, key).expand(query.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def logits(self, x):
        return 2.0 * self.head(x)

    def forward(self, input_ids, past_key_values=None):
        x = self.embedding(input_ids)
        query, key, value = map(self.heads, self.qkv(x).chunk(3, -1))
        if past_key_values is not None:
            key, value = past_key_values[0].extend(key, value)
        mixed = self.attend(query, key, value)
        return {"logits": self.logits(x + mixed.transpose(1, 2).flatten(2))}

class ByHand(Masked):
    def attend(self, query, key, value):
        scores = (query @ key.transpose(-1, -2) / 2).masked_fill(~self.seen(query, key), float("-inf"))
        return scores.softmax(-1) @ value

class Scaled(Masked):
    def attend(self, query, key, value):
        return super().attend(query, key * 1.5, value)

class Headless(Masked):
    def logits(self, x):
        return torch.log_softmax(self.head(x), -1)
"""


@pytest.fixture
def decoders(install: Callable[..., Path]) -> None:
    """Install a plugin with decoders, one of which can be rewritten."""
    install("decoders", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL})
    names = ("masked", "byhand", "scaled", "headless")
    Path("zoo.toml").write_text("schema = 1\n" + "".join(f'[models.{n}]\narch = "{n}"\n' for n in names))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_place", "on_request", "notes"),
    [
        ("masked", True, True, {}),
        ("byhand", False, True, {"zoo.cache": "as traced: keys or values are read by Transpose"}),
        ("scaled", False, True, {"zoo.cache": "as traced: keys or values are read by Mul"}),
        ("headless", True, False, {"zoo.logits": "as traced: LogSoftmax comes before the logits"}),
    ],
)
def test_third_party_decoder_is_rewritten_where_possible(
    decoders: None, zoo: Zoo, name: str, in_place: bool, on_request: bool, notes: dict[str, str]
) -> None:
    """Unsuitable parts stay as traced, with a reason in the metadata, and are verified as well."""
    said = zoo("export", name, "--onnx", "--profile", "cpu")
    assert said.status == 0, said.err
    model = load(Path(name, "model.cpu.onnx"))
    inputs = {item.name for item in model.graph.input}
    assert (PAST_LENGTH in inputs, LOGITS_TO_KEEP in inputs) == (in_place, on_request)
    found = {entry.key: entry.value for entry in model.metadata_props if entry.key in ("zoo.cache", "zoo.logits")}
    assert found == notes


# Rejected uses.


@pytest.mark.slow
def test_profile_without_its_provider_is_rejected(
    exported_cpu: Exported, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    if loading_problem("cuda") is None:
        pytest.skip("CUDA is here")
    before = snapshot()
    zoo("export", exported_cpu("gpt-tiny"), "--onnx", "--profile", "cuda").failed(2, "CUDAExecutionProvider")
    assert snapshot() == before


@pytest.mark.gpu
def test_cuda_profile(exported_build: Exported, zoo: Zoo) -> None:
    if problem := loading_problem("cuda"):
        pytest.skip(problem)
    folder = exported_build("gpt-tiny", noise=True, gain=4.0)
    assert "verified on cuda" in zoo("export", folder, "--onnx", "--profile", "cuda").out


@pytest.mark.slow
def test_conflicting_options_are_rejected(exported_cpu: Exported, zoo: Zoo) -> None:
    folder = exported_cpu("gpt-tiny")
    zoo("export", folder, "--onnx", "--profile", "cpu", "--option", "opset=23").failed(
        2, "opset 23", "profile cpu", "24"
    )
    zoo("export", folder, "--onnx", "--profile", "cpu", "--generate").failed(2, "--generate", "separately")
    zoo("export", folder, "--onnx", "--profile", "gpu").failed(2, "gpu", "cpu", "cuda")
    with pytest.raises(UsageError, match="no profile 'gpu'"):
        Options(profile="gpu")
    assert [Options().operators, Options(profile="cpu").operators] == [23, 24]


@pytest.mark.slow
def test_profile_is_reproducible(exported_cpu: Exported) -> None:
    stored = ModelDirectory.open(exported_cpu("gpt-tiny"))
    assert make_graphs(stored, CPU, cached=False) == make_graphs(stored, CPU)
