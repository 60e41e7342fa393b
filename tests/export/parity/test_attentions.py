"""Graphs that return attention weights: exported next to the plain ones, verified like all outputs, and run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.conformance.plugin import install_edited
from zoo.artifact import ATTENTIONS, Export, ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo.nn import call_graph
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import run_pipeline
from zoo_export.diff import diff_model
from zoo_export.export import export_model
from zoo_export.graph.file import parse, serialize
from zoo_export.parity.compare import compare, judge
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep
from zoo_export.trace.make import Options, graphs_of, make_graphs
from zoo_export.verify import verify_model
from zoo_runtime import Pair, Session, load_session

SHOWN = Options(attentions=True)
Array = np.ndarray[Any, Any]
Zoo = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "settings", "count"),
    [
        ("bert-tiny", (), 2),
        ("gpt-tiny", ("num_kv_heads=2",), 2),
        ("longformer-tiny", ("global_tokens=2",), 2),
        ("seq2seq-tiny", (), 1),
        ("all-attention-tiny", (), 2),
        ("bert-tiny", ("attention=linformer", "attention_rank=5"), 2),
        ("performer-tiny", (), 2),
        ("perceiver-tiny", (), 4),
        ("reformer-tiny", ("attention_kinds=local,lsh",), 2),
        ("t5-tiny", (), 6),
        ("transformer-tiny", (), 6),
        ("vit-tiny", (), 2),
        ("clip-tiny", (), 4),
        ("siglip-tiny", (), 5),
    ],
)
def test_every_attention_weight_is_compared(
    preset: str, settings: Sequence[str], count: int, showing: Callable[..., Path]
) -> None:
    stored = ModelDirectory.open(showing(preset, *settings))
    export = Export(stored, ATTENTIONS)
    assert export.is_verified()
    compared = {name: part["outputs"] for name, part in export.evidence["graphs"].items()}
    names = {graph.name: [tensor.name for tensor in graph.recorded()] for graph in export.graphs}
    assert sum(map(len, names.values())) == count
    for graph, outputs in names.items():
        assert set(outputs) <= compared[graph].keys()
        made = [value.name for value in onnx.load(stored.path / f"{graph}.attentions.onnx").graph.output]
        assert made == [tensor.name for tensor in export.graphs[list(names).index(graph)].output_tensors()]


@pytest.mark.slow
def test_runtime_returns_the_models_weights(showing: Callable[..., Path]) -> None:
    """At a length and batch size outside the comparison's grid, with padding."""
    folder = showing("bert-tiny")
    model = persist.load_directory(ModelDirectory.open(folder)).double()
    (graph,) = Export(ModelDirectory.open(folder), ATTENTIONS).graphs
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(0, 200, (3, 11)) for name in ("input_ids", "attention_mask", "token_type_ids")}
    feeds["attention_mask"] = (np.arange(11) < np.array([[11], [6], [1]])).astype(np.int64)
    feeds["token_type_ids"] %= 2
    wanted = call_graph(model, graph, {name: torch.as_tensor(value) for name, value in feeds.items()})
    with load_session(folder, variant=ATTENTIONS) as session:
        found = session.execute(session.graphs[0], feeds)
    for name in ("attentions.0", "attentions.1", "last_hidden_state"):
        exact = wanted[name].detach().numpy()
        counts = (feeds["attention_mask"] != 0).reshape((3, 1, 11, 1) if exact.ndim == 4 else (3, 11, 1))
        np.testing.assert_allclose(found[name] * counts, exact * counts, atol=2e-5)


@pytest.mark.slow
def test_export_does_not_affect_the_plain_one(exported_build: Callable[..., Path], zoo: Zoo) -> None:
    folder = exported_build("bert-tiny", "pooler=false")
    export_model(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    result = zoo("export", folder, "--onnx", "--attentions")
    assert (result.status, result.err) == (0, "")
    assert "model.attentions.onnx verified on cpu" in result.out
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    added = {"model.attentions.onnx", "parity.attentions.json", "recorded.attentions.safetensors.gz"}
    assert after.keys() - before.keys() == added
    assert {name: after[name] for name in before} == before
    assert zoo("verify", folder, "--variant", "attentions").status == 0
    assert zoo("verify", folder).status == 0
    zoo("export", folder, "--onnx", "--attentions").failed(2, "already exported", "--force")
    assert zoo("verify", folder, "--variant", "attentions", "--retrace").status == 0
    assert {error.diverges for error in diff_model(folder, variant=ATTENTIONS)["model"]} == {False}
    with load_session(folder) as session:
        assert "attentions.0" not in session.execute(session.graphs[0], _feeds(3))


def _feeds(length: int) -> dict[str, Array]:
    ones = np.ones((1, length), np.int64)
    return {"input_ids": ones, "attention_mask": ones, "token_type_ids": ones * 0}


@pytest.mark.slow
def test_weights_of_another_layer_are_rejected(exported_build: Callable[..., Path]) -> None:
    """The rest of the graph is correct."""
    stored = ModelDirectory.open(exported_build("bert-tiny", "max_seq_len=8", noise=True, gain=3.0))
    files = make_graphs(stored, SHOWN)
    model = parse(files["model"])
    first, second = (value for value in model.graph.output if value.name.startswith("attentions"))
    first.name, second.name = second.name, first.name
    for node in model.graph.node:
        swapped = {"attentions.0": "attentions.1", "attentions.1": "attentions.0"}
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = swapped.get(name, name)
    first.name, second.name = second.name, first.name
    declared = Export(stored, ATTENTIONS).graphs
    assert compare(stored, files, declared=declared).passed
    report = compare(stored, {"model": serialize(model)}, declared=declared)
    assert not report.passed
    assert "attentions.0 of model" in report.verdict()


@pytest.mark.slow
def test_lengths_are_bounded_by_memory(exported_build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of weights grows with the square of the length: lengths that do not fit are left out and reported."""
    stored = ModelDirectory.open(exported_build("bert-tiny"))
    files, declared = make_graphs(stored, SHOWN), Export(stored, ATTENTIONS).graphs
    monkeypatch.setattr("zoo_export.parity.memory._ATTENTIONS", 2 * 4 * 2 * 16 * 16)
    sweep = Sweep(OnnxSubject(stored, files, "cpu", declared))
    assert sweep.longest == 16
    report = judge(sweep)
    assert report.passed
    grid = report.evidence["grid"]
    assert max(point["length"] for point in grid["points"]) == 16
    assert {point["batch"] for point in grid["points"] if point["length"] == 16} == {1, 2}
    assert grid["left_out"] > 0


def test_model_without_attention_is_rejected(zoo: Zoo, tmp_path: Path) -> None:
    assert zoo("build", "rnn-tiny").status == 0
    zoo("export", "rnn-tiny", "--onnx", "--attentions").failed(2, "rnn declares no attention weights", "rnn-tiny")
    assert not list((tmp_path / "rnn-tiny").glob("*.onnx"))


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--profile", "cpu"), "only portable graphs"),
        (("--generate",), "--generate"),
    ],
)
def test_models_without_declared_weights_are_rejected(options: Sequence[str], fragment: str, zoo: Zoo) -> None:
    assert zoo("build", "bert-tiny").status == 0
    zoo("export", "bert-tiny", "--onnx", "--attentions", *options).failed(2, fragment)


@pytest.mark.slow
def test_weights_of_texts_do_not_depend_on_the_batch(showing: Callable[..., Path]) -> None:
    """By layer and head, without padding; rows sum to 1."""
    texts = ["time flies", "x", "like an arrow"]
    with load_session(showing("bert-tiny"), variant=ATTENTIONS) as session:
        together = session.run(texts, task="attentions")
        alone = [session.run(text, task="attentions") for text in texts]
        chosen = session.run("x", task="attentions", layers=(1,), heads=(0, 3))
    names = {f"attentions.{layer}.{head}" for layer in range(2) for head in range(4)}
    for text, ours, single in zip(texts, together, alone, strict=True):
        assert ours["attentions"].keys() == names
        assert ours["texts"] == list(text)
        for name, weights in ours["attentions"].items():
            assert weights.shape == (len(text), len(text))
            np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
            np.testing.assert_array_equal(weights, single["attentions"][name])
    assert chosen["attentions"].keys() == {"attentions.1.0", "attentions.1.3"}


@pytest.mark.slow
def test_decoder_weights_are_causal(showing: Callable[..., Path]) -> None:
    with load_session(showing("gpt-tiny", "num_kv_heads=2"), variant=ATTENTIONS) as session:
        found = session.run("arrow", task="attentions")["attentions"]
    assert len(found) == 8
    assert all(not np.triu(weights, 1).any() and weights[-1].all() for weights in found.values())


@pytest.mark.slow
def test_attentions_of_source_and_target(showing: Callable[..., Path]) -> None:
    """The encoder reads a source; with a pair, the decoder reads the target after its start token."""
    folder = showing("seq2seq-tiny")
    with load_session(folder, variant=ATTENTIONS) as session:
        pair = session.run(Pair("source", "tar"), task="attentions")
        alone = session.run("source", task="attentions")
        together = session.run(["0123456789", Pair("source", "tar")], task="attentions")  # of one size: one batch
    assert alone["attentions"] == together[0]["attentions"] == {}
    assert together[1]["attentions"].keys() == pair["attentions"].keys()
    assert pair["attentions"].keys() == {"decoder.cross_attentions.0.0"}
    weights = pair["attentions"]["decoder.cross_attentions.0.0"]
    assert weights.shape == (pair["target_tokens"], pair["tokens"]) == (4, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


@pytest.mark.slow
def test_from_the_command_line(showing: Callable[..., Path], zoo: Zoo) -> None:
    folder = showing("bert-tiny")
    options = ("--variant", "attentions", "--task", "attentions")
    result = zoo("run", folder, "ab", *options, "--option", "layers=1", "--option", "heads=2")
    assert (result.status, result.err, result.out.count("\n")) == (0, "", 1)
    assert "attentions.1.2  a>" in result.out
    (found,) = zoo("run", folder, "ab", *options, "--json").json["results"]
    assert np.shape(found["attentions"]["attentions.0.3"]) == (2, 2)
    zoo("run", folder, "ab", *options, "--option", "layers=2").failed(2, "no layer 2", "0 to 1")
    zoo("run", folder, "ab", *options, "--option", "heads=-1").failed(2, "no head -1", "0 to 3")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plain", [False, True])
def test_task_selects_its_export(showing: Callable[..., Path], zoo: Zoo, tmp_path: Path, plain: bool) -> None:
    """With and without a plain export."""
    folder = Path(shutil.copytree(showing("bert-tiny"), tmp_path / "bert"))
    assert ("model.onnx" in ModelDirectory.open(folder).files) is False
    if plain:
        export_model(folder)
    wanted = zoo("run", folder, "ab", "--variant", "attentions", "--task", "attentions")
    assert zoo("run", folder, "ab", "--task", "attentions").out == wanted.out != ""
    with load_session(folder, task="attentions") as session:
        assert session.export.variant == ATTENTIONS


@pytest.mark.slow
def test_task_is_rejected_for_models_without_attention(exported_model: Callable[..., Path], zoo: Zoo) -> None:
    folder = exported_model("rnn-tiny")
    zoo("run", folder, "ab", "--task", "attentions").failed(2, "rnn declares no attention weights")


@pytest.mark.slow
def test_missing_attentions_name_the_command(exported_build: Callable[..., Path], zoo: Zoo) -> None:
    folder = exported_build("bert-tiny", "num_layers=1")
    export_model(folder)
    command = f"zoo export {folder} --onnx --attentions"
    zoo("run", folder, "ab", "--task", "attentions").failed(3, f"not exported for attentions: {folder}: {command}\n")
    with load_session(folder) as session, pytest.raises(UsageError, match=command):
        session.run("ab", task="attentions")
    zoo("run", folder, "ab", "--variant", "attentions").failed(3, "not exported", "--attentions")
    zoo("run", folder, "ab", "--variant", "attention").failed(2, "unknown variant", "attentions")


@pytest.mark.slow
def test_images(showing: Callable[..., Path], zoo: Zoo, tmp_path: Path) -> None:
    folder = showing("vit-tiny")
    with load_session(folder, variant=ATTENTIONS) as session:
        found = session.run(np.zeros((8, 8), np.uint8), task="image-attentions", layers=(0,))
    assert {weights.shape for weights in found["attentions"].values()} == {(17, 17)}
    assert len(found["attentions"]) == 4
    from PIL import Image

    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    result = zoo("run", folder, "black.png", "--variant", "attentions", "--task", "image-attentions")
    assert (result.status, result.out.count("\n")) == (0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["clip-tiny", "siglip-tiny"])
def test_both_encoders_of_images_and_texts(preset: str, showing: Callable[..., Path]) -> None:
    """Their layers and heads have the same names but not the same numbers of them."""
    folder = showing(preset)
    with load_session(folder, variant=ATTENTIONS) as session:
        text = session.run("a cat", task="attentions")
        image = session.run(np.zeros((16, 16, 3), np.uint8), task="image-attentions", heads=(2,))["attentions"]
        with pytest.raises(UsageError, match=r"no head 3.*0 to 2"):
            session.run("a cat", task="attentions", heads=(3,))
        tokens = len(text["texts"])
    assert {weights.shape for weights in text["attentions"].values()} == {(tokens, tokens)}
    assert text["attentions"].keys() == {f"text.attentions.{layer}.{head}" for layer in range(2) for head in range(2)}
    pads = preset == "siglip-tiny"  # it reads its padding
    assert (text["tokens"], tokens, text["texts"][:5]) == (5, 32 if pads else 5, list("a cat"))
    shapes = {name: weights.shape for name, weights in image.items()}
    places = 16 if pads else 17
    assert shapes == {f"image.attentions.{layer}.2": (places, places) for layer in range(2)} | (
        {"image.cross_attentions.0.2": (1, 16)} if pads else {}
    )


def test_altered_graph_is_not_run(showing: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(showing("bert-tiny"), tmp_path / "bert"))
    file = folder / "model.attentions.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(ArtifactError, match="altered"):
        load_session(folder, variant=ATTENTIONS)
    with pytest.raises(ArtifactError, match="altered"):
        verify_model(folder, variant=ATTENTIONS)
    assert json.loads((folder / "parity.attentions.json").read_text())["verified"]


DOTS = {
    "bert-tiny": (),
    "gpt-tiny": ("num_kv_heads=2",),
    "llama-tiny": (),
    "gemma-tiny": (),
    "t5-tiny": (),
    "transformer-tiny": (),
    "all-attention-tiny": (),
    "perceiver-tiny": (),
    "vit-tiny": (),
    "whisper-test": (),
    "qwen3-next-tiny": (),
    "adaptive-span-tiny": (),
    "seq2seq-tiny": ("attention=dot",),
    "clip-tiny": (),
    "siglip-tiny": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", DOTS)
def test_queries_keys_and_biases_give_the_weights(preset: str, showing: Callable[..., Path]) -> None:
    """On ONNX Runtime, in numpy, for two rows of other lengths than those compared, with padding and a past."""
    folder = showing(preset, *DOTS[preset], queries_keys=True)
    export = Export(ModelDirectory.open(folder), ATTENTIONS)
    assert export.is_verified()
    assert export.evidence["options"]["queries_keys"] is True
    longest = getattr(export.stored.spec.config, "max_seq_len", 8)
    point = Point(2, min(9, longest - 3), 3 if export.graphs[-1].pasts else 0, "left")
    with load_session(folder, variant=ATTENTIONS) as session:
        feeds = make_feeds(session.graphs, point, 1, longest)
        results = run_pipeline(_Session(session), session.graphs, feeds, point, split=True)
    count = 0
    for graph in export.graphs:
        made = {tensor.name for tensor in graph.output_tensors()}
        compared = export.evidence["graphs"][graph.name]["outputs"]
        for item in graph.attention_inputs:
            assert {tensor.name for tensor in item.tensors()} <= made & compared.keys()
            given = {name: results[graph.name][f"{item.weights.name}.{name}"].astype(np.float64) for name in PARTS
                     if getattr(item, name) is not None}  # fmt: skip
            keys = given["key"].repeat(given["query"].shape[1] // given["key"].shape[1], axis=1)
            scores = np.einsum("bhtd,bhsd->bhts", given["query"], keys) * item.scale
            if item.softcap is not None:
                scores = np.tanh(scores / item.softcap) * item.softcap
            shares = np.exp(scores + given.get("bias", 0)) * given.get("seen", 1)
            sums = shares.sum(-1, keepdims=True)
            weights = results[graph.name][item.weights.name]
            np.testing.assert_allclose(shares / np.where(sums > 0, sums, 1), weights, atol=2e-5)
            assert np.ptp(weights) > 2e-3  # not uniform
            count += 1
    assert count == sum(len(graph.attentions) for graph in export.graphs)


PARTS = ("query", "key", "bias", "seen")


class _Session:
    """Runs the graphs of a session as an executor."""

    dtype = np.dtype(np.float32)

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, graph: Graph, feeds: Any) -> dict[str, Array]:
        return self.session.execute(graph, feeds)


@pytest.mark.slow
def test_wrong_queries_are_rejected(exported_build: Callable[..., Path]) -> None:
    """The weights are right, but the queries of the two layers are exchanged."""
    stored = ModelDirectory.open(exported_build("bert-tiny", "max_seq_len=8", noise=True, gain=3.0))
    options = Options(attentions=True, queries_keys=True)
    files, declared = make_graphs(stored, options), graphs_of(stored.spec, stored.dtype, options)
    model = parse(files["model"])
    swapped = {"attentions.0.query": "attentions.1.query", "attentions.1.query": "attentions.0.query"}
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = swapped.get(name, name)
    report = compare(stored, {"model": serialize(model)}, declared=declared)
    assert not report.passed
    assert "attentions.0.query of model" in report.verdict()


@pytest.mark.slow
def test_plugins_declare_nothing_for_queries_and_keys(install: Callable[..., Path], zoo: Zoo) -> None:
    """They are found by a run on the meta device."""
    preset = install_edited(install, "zoo-scored", []) + "-tiny"
    assert zoo("build", preset).status == 0
    result = zoo("export", preset, "--onnx", "--attentions", "--queries-keys")
    assert (result.status, result.err) == (0, "")
    export = Export(ModelDirectory.open(Path(preset)), ATTENTIONS)
    (item,) = export.graphs[0].attention_inputs
    assert (item.head_size, item.num_kv_heads, item.scale, item.bias, item.seen_heads) == (8, 2, 8**-0.5, None, 1)
    assert export.is_verified()
    assert zoo("verify", preset, "--variant", "attentions", "--retrace").status == 0
    zoo("export", preset, "--onnx", "--attentions", "--graph-only", "--queries-keys", "--force")
    assert Export(ModelDirectory.open(Path(preset)), ATTENTIONS).graphs[0].attention_inputs == (item,)


def test_queries_of_other_attention_are_rejected(zoo: Zoo) -> None:
    assert zoo("build", "performer-tiny").status == 0
    result = zoo("export", "performer-tiny", "--onnx", "--attentions", "--queries-keys")
    result.failed(5, "performer computes no attention weights as scaled dot products")
    zoo("export", "performer-tiny", "--onnx", "--queries-keys").failed(2, "returned with attention weights")


def test_profiles_have_no_attentions() -> None:
    with pytest.raises(UsageError, match="portable graphs"):
        Options(attentions=True, profile="cpu")
