"""Coverage of the conditions of exported models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import zoo
from tests.conftest import Result
from zoo.artifact import Export, ModelDirectory, coverage_summary
from zoo.artifact.card import model_card
from zoo.errors import ArtifactError
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Point, make_feeds
from zoo_export.coverage.outcomes import Conditions
from zoo_export.coverage.points import LARGEST_BATCH, turning_points
from zoo_export.graph.file import parse, serialize
from zoo_export.parity.covering import cover
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep
from zoo_export.trace.make import Options, make_graphs

Zoo = Callable[..., Result]
Exported = Callable[..., Path]


def plant_in_the_scan(graph: onnx.GraphProto, length: int) -> None:
    """Change the context of each step of a recurrent decoder, in the body of its Scan, at one length of the texts."""
    (node,) = (node for node in graph.node if node.op_type == "Scan")
    (body,) = (attribute.g for attribute in node.attribute if attribute.name == "body")
    makers = {name: number for number, node in enumerate(body.node) for name in node.output}
    (step,) = (node for node in body.node if node.op_type == "Concat" and node.input[0] == body.input[1].name)
    context = step.input[1]
    for reader in body.node:
        for place, name in enumerate(reader.input):
            if name == context:
                reader.input[place] = "planted"
    scalar = helper.make_tensor
    nodes = [
        helper.make_node("Shape", ["decoder_input_ids"], ["planted_length"], start=1, end=2),
        helper.make_node("Constant", [], ["planted_at"], value_ints=[length]),
        helper.make_node("Equal", ["planted_length", "planted_at"], ["planted_here"]),
        helper.make_node("Constant", [], ["planted_less"], value=scalar("", TensorProto.FLOAT, [], [0.9])),
        helper.make_node("Constant", [], ["planted_one"], value=scalar("", TensorProto.FLOAT, [], [1.0])),
        helper.make_node("Where", ["planted_here", "planted_less", "planted_one"], ["planted_factor"]),
        helper.make_node("Mul", [context, "planted_factor"], ["planted"]),
    ]
    for node in reversed(nodes):
        body.node.insert(makers[context] + 1, node)


@pytest.mark.parametrize("has_past", [False, True])
def test_every_constant_is_a_length_and_a_past(has_past: bool) -> None:
    """And so is the next number on either side, as far as the model takes that many tokens."""
    decoder = zoo.causal_graph(vocab_size=9, num_layers=1, num_kv_heads=1, head_dim=2)
    encoder = zoo.Graph(inputs=(zoo.token_ids("input_ids", 9),), outputs=())
    points = turning_points([decoder if has_past else encoder], 40, [0, 7, 23, 40, 10**6])
    wanted = {1, 6, 7, 8, 22, 23, 24, 39, 40}
    assert wanted <= {point.length for point in points}
    assert {point.batch for point in points} == set(range(1, LARGEST_BATCH + 1))
    assert all(1 <= point.length <= point.length + point.past <= 40 for point in points)
    for length in (1, 2) if has_past else ():
        most = 40 - length
        assert {past for past in wanted if past <= most} <= {point.past for point in points if point.length == length}
    assert has_past or not any(point.past for point in points)


def test_turning_points_have_declared_sizes() -> None:
    size = zoo.Size(min=8, multiple_of=4)
    tokens, output = zoo.token_ids("input_ids", 9), zoo.floats("output", "batch", "sequence", 4)
    graph = zoo.Graph(inputs=(tokens,), outputs=(output,), sizes={"sequence": size})
    points = turning_points([graph], 40, [0, 7, 23])
    assert {point.length for point in points} == {8, 24}
    assert len(set(points)) == len(points)


@pytest.mark.slow
def test_condition_in_a_scan_is_covered(exported_model: Exported) -> None:
    """No point of the grid has this length: one is added, at which the graph differs from the model."""
    export = Export(ModelDirectory.open(exported_model("seq2seq-tiny")))
    files, length = export.read(), 11
    planted = parse(files["decoder"])
    plant_in_the_scan(planted.graph, length)
    sweep = Sweep(OnnxSubject(export.stored, files | {"decoder": serialize(planted)}, "cpu"))
    grid, _ = make_grid(export.graphs, sweep.longest, sweep.parameters, whole=False)
    assert all(point.length != length for point in grid)
    added, _ = cover(sweep.evaluator, grid)
    assert any(point.length == length for point in added)
    sweep.compare_at(Point(2, 7, 3, "none"), sweep.runtimes)
    assert not sweep.findings.failures()
    for point in added:
        sweep.compare_at(point, sweep.runtimes)
    assert f"length {length}" in sweep.findings.failures()[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-tiny", Options(profile="cpu")),
        pytest.param("longformer-tiny", Options(attentions=True), marks=pytest.mark.slow),
        pytest.param("reformer-tiny", Options(), marks=pytest.mark.slow),
        pytest.param("seq2seq-tiny", Options(profile="cpu"), marks=pytest.mark.slow),
        pytest.param("t5-tiny", Options(opset=18), marks=pytest.mark.slow),
    ],
)
def test_what_is_impossible_never_happens(exported_build: Exported, name: str, options: Options) -> None:
    """Bounds are right, and the graphs of conditions run, at every point of the grid."""
    stored = ModelDirectory.open(exported_build(name))
    graphs = Export(stored, options.variant).graphs
    files = make_graphs(stored, options)
    grid, _ = make_grid(graphs, 32, 10**5, whole=True)
    for graph in graphs:
        found = Conditions(graph, files[graph.name], stored.path, 32)
        assert found.found
        outcomes = set()
        for point in grid:
            outcomes |= found.outcomes(make_feeds(graphs, point, 0, 32), point, np.dtype(np.float32))
        assert {(number, word) for number, word, _ in outcomes} <= set(found.possible)


def test_buffers_of_a_profile(exported_build: Exported) -> None:
    """Conditions on the cache's length, on its unused end, and on the number of logits to compute."""
    stored = ModelDirectory.open(exported_build("gpt-tiny"))
    (graph,) = stored.spec.graphs
    found = Conditions(graph, make_graphs(stored, Options(profile="cpu"))["model"], stored.path, 32)
    point = Point(2, 3, 4, "left")
    outcomes = found.outcomes(make_feeds([graph], point, 0, 32), point, np.dtype(np.float32))
    lines = {f"{found.found[number]}: {word} ({call})" for number, word, call in outcomes}
    assert {"LessOrEqual: true (later)", "LessOrEqual: false (later)", "Slice start: inside (later)"} <= lines
    masks = {line for line in lines if line.startswith("Attention mask in blocks.0")}
    assert masks == {f"Attention mask in blocks.0.attention: {word} (later)" for word in ("no key", "some keys")}


GUARDS = """x = self.embedding(input_ids)
        for sum_of_ids in range(1_000_000, 1_000_040):
            x = torch.where(input_ids.sum() == sum_of_ids, 0.5 * x, x)
        rotation"""


@pytest.mark.slow
def test_floor(build_small: Callable[..., None], zoo: Zoo) -> None:
    """A model most of whose conditions have one outcome in the comparison is refused, and the others are named."""
    build_small("decoder-small", ("x = self.embedding(input_ids)\n        rotation", GUARDS))
    said = zoo("export", "model", "--onnx").failed(4)
    assert "outcomes of conditions in the graph model, not Equal: true (40 times)" in said
    assert "--grid full" in said
    assert not list(Path("model").glob("*.onnx"))


def test_coverage_is_shown(exported_model: Exported, zoo: Zoo) -> None:
    """By ``zoo show``, and on a card that is published with the evidence."""
    folder = exported_model("gpt-tiny")
    evidence = json.loads((folder / "parity.json").read_text())
    facts = evidence["grid"]["coverage"]["model"]
    assert 0 < len(facts["unseen"]) + facts["conditions"] <= facts["outcomes"] <= 3 * facts["conditions"]
    seen = facts["outcomes"] - len(facts["unseen"])
    line = f"{seen} of {facts['outcomes']} outcomes of {facts['conditions']} conditions"
    assert line in zoo("show", folder).out
    stored = ModelDirectory.open(folder)
    assert line in model_card(stored.spec, stored.dtype, stored.origin, 1, evidence)
    assert "conditions" not in model_card(stored.spec, stored.dtype, stored.origin, 1)


def test_long_lists_are_abridged() -> None:
    """Equal outcomes are counted, and further ones, too."""
    unseen = ["Less: true", "Slice end: clamped", "Less: true", "Equal: true", "Mod: none", "Mod: remainder"]
    graphs = {"model": {"conditions": 9, "outcomes": 20, "impossible": 0, "unseen": unseen}}
    said = coverage_summary({"grid": {"coverage": graphs}})
    shown = "Less: true (2 times), Slice end: clamped, Equal: true and 2 more"
    assert said == f"14 of 20 outcomes of 9 conditions seen; not seen: {shown}"
    assert coverage_summary({"verified": False}) is None


@pytest.mark.parametrize("graphs", [True, {"model": 3}, {"model": {"conditions": 1}}, {"model": {"conditions": "x"}}])
def test_coverage_that_is_not_what_an_export_writes(graphs: object) -> None:
    with pytest.raises(ArtifactError, match="not the coverage of conditions"):
        coverage_summary({"grid": {"coverage": graphs}})


def test_stored_number_in_size_arithmetic(build_small: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """onnx cannot read it from its file, and infers no shapes in strict mode if it looks for it."""
    made = "        self.norm = nn.LayerNorm(c.hidden_size)\n\n    def forward(self, mels):"
    read = "x = F.gelu(self.first(mels.transpose(1, 2)))"
    picked = "mels = mels[:, torch.minimum(torch.arange(mels.shape[1]) + self.lag, torch.tensor(mels.shape[1] - 1))]"
    build_small(
        "sound-small",
        (made, f'        self.register_buffer("lag", torch.tensor(1))\n{made}'),
        (read, f"{picked}\n        {read}"),
    )
    stored = ModelDirectory.open(Path("model"))
    (graph,) = stored.spec.graphs
    data = make_graphs(stored)[graph.name]
    assert any(item.name == "lag" and not item.dims for item in parse(data).graph.initializer)
    conditions = Conditions(graph, data, stored.path)
    assert [record.getMessage() for record in caplog.records if "onnx_ir" in record.name] == []
    assert conditions.found
