"""Verification of exports: seeded faults are caught and named, and correct graphs pass with any weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import zoo
from tests.exported import inlined
from zoo.arrays import Array
from zoo.artifact import Export, ModelDirectory
from zoo.contract import TensorSpec
from zoo.errors import ParityError
from zoo.probe.errors import Errors, as_rows
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.jumps import JumpErrors
from zoo.probe.module import TorchExecutor
from zoo_export.parity.compare import compare
from zoo_export.parity.greedy import greedy_agreement, greedy_tokens
from zoo_export.parity.metrics import TokenDivergence, sampled
from zoo_export.parity.report import Report

Graph = onnx.GraphProto
Edit = Callable[[Graph], None]
Exported = Callable[..., Path]
Noisy = Callable[..., tuple[ModelDirectory, dict[str, bytes]]]


def find(graph: Graph, op: str, module: str | None = None, reads: str = "") -> list[onnx.NodeProto]:
    """Find the nodes of an operator, in a module, with an input of that name."""
    found = [
        node
        for node in graph.node
        if node.op_type == op
        and module in (None, "".join(entry.value for entry in node.metadata_props if entry.key == "zoo.module"))
        and any(name.startswith(reads) for name in node.input)
    ]
    assert found, f"no {op} in {module!r}"
    return found


def attribute(op: str, module: str | None = None, reads: str = "", **values: Any) -> Edit:
    """Edit attributes of nodes."""

    def edit(graph: Graph) -> None:
        for node in find(graph, op, module, reads):
            kept = [item for item in node.attribute if item.name not in values]
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in values.items())])

    return edit


def operator(old: str, new: str, module: str | None = None) -> Edit:
    """Replace the operator of nodes."""

    def edit(graph: Graph) -> None:
        for node in find(graph, old, module):
            node.op_type = new

    return edit


def inputs(op: str, module: str, order: tuple[int, ...], reads: str = "") -> Edit:
    """Select and reorder the inputs of nodes."""

    def edit(graph: Graph) -> None:
        for node in find(graph, op, module, reads):
            chosen = [node.input[place] for place in order]
            del node.input[:]
            node.input.extend(chosen)

    return edit


def shifted(op: str, module: str, place: int, *steps: tuple[str, int], reads: str = "") -> Edit:
    """Change an input of one node by integer operations, such as adding 1."""

    def edit(graph: Graph) -> None:
        (node,) = find(graph, op, module, reads)
        name, made = node.input[place], []
        for number, (step, amount) in enumerate(steps):
            made.append(helper.make_node("Constant", [], [f"amount_{number}"], value_int=amount))
            made.append(helper.make_node(step, [name, f"amount_{number}"], [f"shifted_{number}"]))
            name = f"shifted_{number}"
        where = list(graph.node).index(node)
        node.input[place] = name
        for new in reversed(made):
            graph.node.insert(where, new)

    return edit


def weights(**changes: str) -> Edit:
    """Redirect initialisers to other stored tensors; ``__`` stands for a dot."""

    def edit(graph: Graph) -> None:
        places = {item.name: (list(item.dims), list(item.external_data)) for item in graph.initializer}
        for name, other in ((key.replace("__", "."), value) for key, value in changes.items()):
            (target,) = (item for item in graph.initializer if item.name == name)
            assert places[name][0] == places[other][0]
            del target.external_data[:]
            target.external_data.extend(places[other][1])

    return edit


def skip_the_attention(graph: Graph) -> None:
    """Let the second residual connection start at the input of the first."""
    first, second = find(graph, "Add", "blocks.1")
    second.input[0] = first.input[0]


def read_another_layer(graph: Graph) -> None:
    """Let cross-attention read the keys of the other block."""
    (node,) = find(graph, "Attention", "decoder.0.cross")
    node.input[1] = "cross_key_values.1.key"


def flatten_the_batch(graph: Graph) -> None:
    """Reshape an output, keeping its numbers in order."""
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == "last_hidden_state":
                    names[place] = "in_order"
    graph.node.append(helper.make_node("Constant", [], ["flat"], value_ints=[1, -1, 64]))
    graph.node.append(helper.make_node("Reshape", ["in_order", "flat"], ["last_hidden_state"]))


@dataclass(frozen=True)
class Fault:
    """A faulty graph of a preset, and the module at fault."""

    model: str
    file: str
    edit: Edit
    begins: str | None = None


def cases(faults: Mapping[str, Fault]) -> list[Any]:
    """Return test parameters; variations are marked slow only because there are many."""
    return [
        pytest.param(fault, id=name, marks=pytest.mark.slow if name in VARIATIONS else ())
        for name, fault in faults.items()
    ]


GPT, BERT, SEQ2SEQ = "gpt-tiny", "bert-tiny", "transformer-tiny"
MODEL, ENCODER, DECODER = "model", "encoder", "decoder"

FAULTS = {
    "query and key weights swapped": Fault(
        GPT,
        MODEL,
        weights(
            blocks__0__attention__query__weight="blocks.0.attention.key.weight",
            blocks__0__attention__key__weight="blocks.0.attention.query.weight",
        ),
        "blocks.0.attention.query (Linear)",
    ),
    "norm weight of another block": Fault(
        GPT, MODEL, weights(blocks__1__norm_1__weight="blocks.0.norm_1.weight"), "blocks.1.norm_1 (LayerNorm)"
    ),
    "bias of another block": Fault(
        GPT, MODEL, weights(blocks__1__mlp__down__bias="blocks.0.mlp.down.bias"), "blocks.1.mlp.down (Linear)"
    ),
    "epsilon 1e-12 for 1e-5": Fault(
        GPT, MODEL, attribute("LayerNormalization", epsilon=1e-12), "blocks.0.norm_1 (LayerNorm)"
    ),
    "epsilon 1e-12 for 1e-5 in the last norm": Fault(
        GPT, MODEL, attribute("LayerNormalization", "norm", epsilon=1e-12), "norm (LayerNorm)"
    ),
    "epsilon 1e-3 for 1e-5 in one norm": Fault(
        GPT, MODEL, attribute("LayerNormalization", "blocks.1.norm_2", epsilon=1e-3), "blocks.1.norm_2 (LayerNorm)"
    ),
    "gelu exact for tanh": Fault(
        GPT, MODEL, attribute("Gelu", "blocks.1.mlp", approximate="none"), "blocks.1.mlp.down (Linear)"
    ),
    "causal mask without the diagonal": Fault(
        GPT, MODEL, operator("LessOrEqual", "Less"), "blocks.0.attention.output (Linear)"
    ),
    "causal mask turned round": Fault(
        GPT, MODEL, operator("LessOrEqual", "GreaterOrEqual"), "blocks.0.attention.output (Linear)"
    ),
    "padding ignored": Fault(GPT, MODEL, inputs("And", "", (0, 0)), "blocks.0.attention.output (Linear)"),
    "value without its bias": Fault(
        GPT, MODEL, inputs("Gemm", "blocks.0.attention.value", (0, 1)), "blocks.0.attention.value (Linear)"
    ),
    "key without its bias": Fault(
        GPT, MODEL, inputs("Gemm", "blocks.1.attention.key", (0, 1)), "blocks.1.attention.key (Linear)"
    ),
    "mlp without its bias": Fault(
        GPT, MODEL, inputs("Gemm", "blocks.1.mlp.down", (0, 1)), "blocks.1.mlp.down (Linear)"
    ),
    "positions off by one": Fault(
        GPT,
        MODEL,
        shifted("Gather", "position_embedding", 1, ("Add", 1), ("Min", 31)),
        "position_embedding (Embedding)",
    ),
    "scale 1/8 for 1/4": Fault(
        GPT, MODEL, attribute("Attention", "blocks.1.attention", scale=0.125), "blocks.1.attention.output (Linear)"
    ),
    "heads not merged": Fault(
        GPT,
        MODEL,
        attribute("Transpose", "blocks.0.attention", "scaled_dot_product", perm=[0, 1, 2, 3]),
        "blocks.0.attention.output (Linear)",
    ),
    "heads interleaved": Fault(
        GPT,
        MODEL,
        attribute("Transpose", "blocks.0.attention", "scaled_dot_product", perm=[0, 2, 3, 1]),
        "blocks.0.attention.output (Linear)",
    ),
    "new keys before the past": Fault(
        GPT,
        MODEL,
        inputs("Concat", "blocks.0.attention", (1, 0), "past_key_values.0.key"),
        "blocks.0.attention.output (Linear)",
    ),
    "new values before the past": Fault(
        GPT,
        MODEL,
        inputs("Concat", "blocks.1.attention", (1, 0), "past_key_values.1.value"),
        "blocks.1.attention.output (Linear)",
    ),
    "causal twice, from the first key": Fault(
        GPT, MODEL, attribute("Attention", "blocks.0.attention", is_causal=1), "blocks.0.attention.output (Linear)"
    ),
    "residual that skips the attention": Fault(GPT, MODEL, skip_the_attention, "blocks.1 (GPTBlock)"),
    "gelu tanh for exact": Fault(BERT, MODEL, attribute("Gelu", approximate="tanh"), "blocks.0.mlp.down (Linear)"),
    "epsilon 1e-5 for 1e-12": Fault(
        BERT, MODEL, attribute("LayerNormalization", epsilon=1e-5), "embeddings.norm (LayerNorm)"
    ),
    "epsilon 1e-5 for 1e-12 in the last norm": Fault(
        BERT, MODEL, attribute("LayerNormalization", "blocks.1.norm_2", epsilon=1e-5)
    ),
    "epsilon 1e-3 for 1e-12 in the last norm": Fault(
        BERT, MODEL, attribute("LayerNormalization", "blocks.1.norm_2", epsilon=1e-3), "blocks.1.norm_2 (LayerNorm)"
    ),
    "mask ignored": Fault(
        BERT, MODEL, inputs("Attention", "blocks.1.attention", (0, 1, 2)), "blocks.1.attention.output (Linear)"
    ),
    "an encoder made causal": Fault(
        BERT, MODEL, attribute("Attention", "blocks.1.attention", is_causal=1), "blocks.1.attention.output (Linear)"
    ),
    "types all 0": Fault(
        BERT, MODEL, shifted("Gather", "embeddings.token_type", 1, ("Mul", 0)), "embeddings.token_type (Embedding)"
    ),
    "positions of an encoder off by one": Fault(
        BERT,
        MODEL,
        shifted("Gather", "embeddings.position", 1, ("Add", 1), ("Min", 31)),
        "embeddings.position (Embedding)",
    ),
    "pooler without its bias": Fault(BERT, MODEL, inputs("Gemm", "pooler", (0, 1)), "pooler (Linear)"),
    "embedding divided by its scale": Fault(
        SEQ2SEQ, ENCODER, operator("Mul", "Div", "encoder_embedding"), "encoder_embedding (Embedding)"
    ),
    "cosines for sines": Fault(
        SEQ2SEQ, ENCODER, operator("Sin", "Cos"), "encoder_embedding.position (SinusoidalPositions)"
    ),
    "cross keys and values swapped": Fault(
        SEQ2SEQ,
        ENCODER,
        weights(
            decoder__0__cross__key__weight="decoder.0.cross.value.weight",
            decoder__0__cross__value__weight="decoder.0.cross.key.weight",
        ),
        "decoder.0.cross.key (Linear)",
    ),
    "padding of the source ignored": Fault(
        SEQ2SEQ, DECODER, inputs("Attention", "decoder.0.cross", (0, 1, 2)), "decoder.0.cross.output (Linear)"
    ),
    "keys of another block": Fault(SEQ2SEQ, DECODER, read_another_layer, "decoder.0.cross.output (Linear)"),
    "target positions off by one": Fault(
        SEQ2SEQ,
        DECODER,
        shifted("Cast", "decoder_embedding.position", 0, ("Add", 1), reads="slice"),
        "decoder_embedding.position (SinusoidalPositions)",
    ),
    "scores capped at 50": Fault(
        SEQ2SEQ, DECODER, attribute("Attention", "decoder.1.cross", softcap=50.0), "decoder.1.cross.output (Linear)"
    ),
    "epsilon 1e-12 for 1e-5 after a block": Fault(
        SEQ2SEQ, DECODER, attribute("LayerNormalization", "decoder.1.residual_3.norm", epsilon=1e-12)
    ),
}
BROKEN = {
    "a mask of the wrong rank": (Fault(GPT, MODEL, inputs("And", "", (1, 1))), "fails at batch 2, length 7, past 3"),
    "an operator that does not exist": (Fault(GPT, MODEL, operator("Gelu", "Gela")), "cannot be verified"),
}
"""Graphs that cannot be compared at every point."""
VARIATIONS = {
    "causal mask turned round",
    "mlp without its bias",
    "heads interleaved",
    "new values before the past",
    "embedding divided by its scale",
    "cosines for sines",
    "keys of another block",
    "key without its bias",
    "value without its bias",
    "heads not merged",
    "causal twice, from the first key",
    "epsilon 1e-12 for 1e-5 after a block",
    "scores capped at 50",
    "target positions off by one",
    "padding of the source ignored",
    "residual that skips the attention",
    "epsilon 1e-3 for 1e-5 in one norm",
    "epsilon 1e-12 for 1e-5",
    "epsilon 1e-5 for 1e-12",
    "epsilon 1e-3 for 1e-12 in the last norm",
    "new keys before the past",
    "cross keys and values swapped",
    "gelu exact for tanh",
    "epsilon 1e-12 for 1e-5 in the last norm",
    "epsilon 1e-5 for 1e-12 in the last norm",
}
UNSEEN_WHEN_FRESH = (
    "norm weight of another block",
    "bias of another block",
    "value without its bias",
    "key without its bias",
    "pooler without its bias",
    "gelu tanh for exact",
)


@pytest.fixture(scope="session")
def exported_noisy(exported_with: Exported) -> Noisy:
    """Return a preset with random biases and norms, and graphs exported with other ones."""

    def open_noisy(name: str, seed: int = 0) -> tuple[ModelDirectory, dict[str, bytes]]:
        stored = ModelDirectory.open(exported_with(name, seed=seed, noise=True))
        return stored, Export(stored).read()

    return open_noisy


@pytest.fixture(scope="session")
def exported_graphs(exported_noisy: Noisy) -> Callable[[Fault], dict[str, bytes]]:
    """Return a preset's graphs, one of them faulty."""

    def edit(fault: Fault) -> dict[str, bytes]:
        _, graphs = exported_noisy(fault.model)
        model = inlined(graphs[fault.file])
        fault.edit(model.graph)
        changed = model.SerializeToString()
        assert changed != graphs[fault.file]
        return {**graphs, fault.file: changed}

    return edit


@pytest.fixture(scope="session")
def exported_fault(
    exported_noisy: Noisy, exported_graphs: Callable[[Fault], dict[str, bytes]]
) -> Callable[[Fault], Report]:
    """Compare a faulty graph, once."""
    reports: dict[int, Report] = {}

    def run(fault: Fault) -> Report:
        if id(fault) not in reports:
            stored, _ = exported_noisy(fault.model)
            reports[id(fault)] = compare(stored, exported_graphs(fault))
        return reports[id(fault)]

    return run


@pytest.mark.parametrize("name", [GPT, BERT, pytest.param(SEQ2SEQ, marks=pytest.mark.slow)])
def test_an_honest_graph_passes(exported_noisy: Noisy, name: str) -> None:
    report = compare(*exported_noisy(name))
    assert report.failures == []
    assert report.passed
    assert report.evidence["verified"] is True


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_graph_passes_with_any_weights_of_its_layout(exported_noisy: Noisy, seed: int) -> None:
    assert compare(*exported_noisy(GPT, seed)).failures == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fault", cases(FAULTS))
def test_seeded_fault_is_caught(exported_fault: Callable[[Fault], Report], fault: Fault) -> None:
    report = exported_fault(fault)
    assert report.passed is False
    assert report.evidence["verified"] is False
    assert "allowed" in report.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", cases({name: fault for name, fault in FAULTS.items() if fault.begins is not None}))
def test_first_diverging_module_of_a_fault_is_named(exported_fault: Callable[[Fault], Report], fault: Fault) -> None:
    failures = exported_fault(fault).failures
    assert f"; it begins in {fault.begins}, " in failures[0]
    assert re.search(r"\), (zoo\.nn|zoo_plugins)[.\w]+:\d+, of plugin '\w+' \(attention-zoo [\d.]+\)$", failures[0])
    assert not any("it begins in" in failure for failure in failures[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN_WHEN_FRESH)
def test_fault_hidden_by_initial_weights_is_caught(
    exported_model: Exported, exported_graphs: Callable[..., Any], name: str
) -> None:
    """Dropping or swapping biases of 0 and norms of 1 has no effect, but the graph must be correct for any weights."""
    fault = FAULTS[name]
    report = compare(ModelDirectory.open(exported_model(fault.model)), exported_graphs(fault))
    assert report.passed is False


@pytest.mark.parametrize(("fault", "message"), BROKEN.values(), ids=BROKEN)
def test_incomparable_graph_is_rejected(exported_fault: Callable[[Fault], Report], fault: Fault, message: str) -> None:
    with pytest.raises(ParityError, match=message) as caught:
        exported_fault(fault)
    assert caught.value.exit_code == 4


def gather_beyond(*condition: onnx.NodeProto) -> Edit:
    """Make the graph fail at run time if ``failing``, computed by these nodes, is true."""

    def edit(graph: Graph) -> None:
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name == "input_ids":
                    node.input[place] = "checked_ids"
        nodes = [
            helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
            *condition,
            helper.make_node("Cast", ["failing"], ["index"], to=onnx.TensorProto.INT64),
            helper.make_node("Constant", [], ["one_zero"], value_ints=[0]),
            helper.make_node("Gather", ["one_zero", "index"], ["zero"]),
            helper.make_node("Add", ["input_ids", "zero"], ["checked_ids"]),
        ]
        for node in reversed(nodes):
            graph.node.insert(0, node)

    return edit


GREEDY_PROMPT = make_feeds(
    [zoo.causal_graph(vocab_size=260, num_layers=2, num_kv_heads=4, head_dim=16)], Point(2, 5, 0, "left"), 1, 13
)["input_ids"]
PROMPT_ALONE = gather_beyond(
    helper.make_node("Constant", [], ["sum"], value_ints=[int(GREEDY_PROMPT.sum())]),
    helper.make_node("ReduceSum", ["input_ids"], ["found"], keepdims=0),
    helper.make_node("Equal", ["found", "sum"], ["failing"]),
)
"""Fails for the prompts of greedy decoding."""
OTHER_WEIGHTS = gather_beyond(
    helper.make_node("Constant", [], ["nothing"], value_ints=[0]),
    helper.make_node("Greater", ["length", "nothing"], ["true"]),
    helper.make_node("Gather", ["norm.weight", "nothing"], ["first_weight"]),
    helper.make_node("Constant", [], ["fresh"], value_floats=[1.0]),
    helper.make_node("Equal", ["first_weight", "fresh"], ["unchanged"]),
    helper.make_node("Not", ["unchanged"], ["changed"]),
    helper.make_node("And", ["true", "changed"], ["failing"]),
)
"""Fails if the last norm has other than initial weights."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (PROMPT_ALONE, "in greedy decoding, optimisations off"),
        (OTHER_WEIGHTS, "at batch 2, length 7, past 3, padding none, with faint weights"),
    ],
)
def test_graph_that_fails_at_run_time_is_rejected(exported_model: Exported, edit: Edit, where: str) -> None:
    stored = ModelDirectory.open(exported_model(GPT))
    model = inlined(Export(stored).read()[MODEL])
    edit(model.graph)
    with pytest.raises(ParityError, match=f"^the graph fails {re.escape(where)} .*out of data bounds"):
        compare(stored, {MODEL: model.SerializeToString()})


@pytest.mark.slow
def test_comparison_stops_at_a_clear_failure(
    exported_noisy: Noisy, exported_graphs: Callable[[Fault], dict[str, bytes]]
) -> None:
    fault = FAULTS["value without its bias"]
    stored, _ = exported_noisy(GPT)
    report = compare(stored, exported_graphs(fault))
    points = report.evidence["grid"]["points"]
    assert len(points) == 1
    assert (points[0]["batch"], points[0]["length"]) == (2, 7)
    assert f"; it begins in {fault.begins}, " in report.failures[0]
    assert set(report.evidence["graphs"][MODEL]["outputs"]["logits"]) == {"off", "all"}
    assert report.evidence["greedy_decoding"] == {}


@pytest.mark.slow
def test_reason_for_a_missing_module_is_given(
    exported_noisy: Noisy, exported_graphs: Callable[[Fault], dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("zoo_export.parity.subject.module_errors", fail)
    report = compare(exported_noisy(GPT)[0], exported_graphs(FAULTS["value without its bias"]))
    assert report.failures[0].endswith("; it begins in a module that cannot be named (no memory)")


def test_output_of_another_shape_is_rejected(exported_fault: Callable[[Fault], Report]) -> None:
    fault = Fault(BERT, MODEL, flatten_the_batch)
    try:
        passed = exported_fault(fault).passed
    except ParityError:
        passed = False
    assert not passed


def test_verdict_has_the_number_of_failures() -> None:
    assert Report({}, ["logits is off"]).verdict() == "the ONNX graph is not equal to the model: logits is off"
    assert Report({}, ["logits is off", "two", "three"]).verdict().endswith(": logits is off and 2 more")


def test_non_finite_weights_are_rejected(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Callable[..., Any]
) -> None:
    folder = exported_copy(GPT)
    place = ModelDirectory.open(folder).layout["blocks.1.mlp.up.weight"]
    with (folder / place.file).open("r+b") as file:
        file.seek(place.offset + 4 * 77)
        file.write(np.float32("nan").tobytes())
    seal(folder)
    zoo("verify", folder).failed(4, "is not finite")


# Metrics, against plain calculations.

POINTS = (Point(2, 3, 0, "none"), Point(2, 3, 0, "left"), Point(1, 1, 0, "none"))
EPSILON = 2.0**-23
ONE = np.ones(1, bool)


@pytest.mark.parametrize("shape", [(24, 8), (30, 20), (6, 8)], ids=str)
def test_errors_are_maxima_over_valid_rows(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    errors = Errors(EPSILON)
    seen = []
    for point in POINTS:
        reference = rng.standard_normal(shape)
        yardstick = (reference + 1e-6 * rng.standard_normal(shape)).astype(np.float32)
        result = (reference + 3e-6 * rng.standard_normal(shape)).astype(np.float32)
        valid = rng.random(shape[0]) < 0.6
        errors.add(reference, yardstick, result, valid, point)
        found = np.abs(result.astype(np.float64) - reference)[valid]
        allowed = np.abs(yardstick.astype(np.float64) - reference)[valid]
        seen.append((found.max(), allowed.max(), np.abs(reference[valid]).max(), np.quantile(found, 0.999), point))
    runtime, torch_error, scale, p999 = (max(row[place] for row in seen) for place in range(4))
    assert (errors.runtime, errors.torch, errors.scale, errors.p999) == (runtime, torch_error, scale, p999)
    assert errors.worst == max(seen, key=lambda row: row[0])[4]
    limit = 2 * torch_error + 4 * EPSILON * scale
    facts = errors.to_dict()
    assert facts["limit"] == pytest.approx(limit, rel=1e-12)
    assert facts["passed"] is errors.passed is bool(runtime <= limit)
    assert facts["max_rel_error"] == pytest.approx(runtime / scale, rel=1e-12)
    assert facts["ratio"] == pytest.approx(runtime / torch_error, rel=1e-12)


@pytest.mark.parametrize("kind", [Errors, JumpErrors])
def test_rows_may_be_wider_than_a_chunk(kind: type[Errors]) -> None:
    """As the states of layers with many heads, of few rows."""
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((2, 3 * 2**17))
    yardstick, result = (
        (reference + size * rng.standard_normal(reference.shape)).astype(np.float32) for size in (1e-6, 1.5e-6)
    )
    errors = kind(EPSILON)
    errors.add(reference, yardstick, result, np.ones(2, bool), POINTS[0])
    errors.allow(reference, yardstick, np.ones(2, bool))
    assert errors.runtime == np.abs(result.astype(np.float64) - reference).max()
    assert errors.torch == np.abs(yardstick.astype(np.float64) - reference).max()
    assert errors.passed


def test_fixed_dimensions_are_channels() -> None:
    values = np.arange(2 * 4 * 7 * 3.0).reshape(2, 4, 7, 3)
    key = TensorSpec(name="key", dims=("batch", 4, "sequence", 3))
    rows = as_rows(key, values)
    assert rows.shape == (14, 12)
    assert rows[9].tolist() == values[1, :, 2].reshape(-1).tolist()
    assert as_rows(TensorSpec(name="weights", dims=("batch", "sequence")), values[0, 0]).shape == (21, 1)


@pytest.mark.parametrize(("error", "passed"), [(2.9e-3, True), (3.1e-3, False)])
def test_limit_is_twice_torch_plus_four_epsilon(error: float, passed: bool) -> None:
    errors = Errors(0.25e-3)
    reference = np.array([[1.0, 0.5]])
    errors.add(reference, reference + 1e-3, np.array([[1.0 + error, 0.5]]), ONE, POINTS[0])
    assert errors.limit == pytest.approx(3e-3)
    assert errors.passed is passed


@pytest.mark.parametrize("along", ["rows", "channels"])
def test_large_numbers_do_not_hide_errors_of_others(along: str) -> None:
    """One row or channel is 10,000 times larger; all others are off by 1e-4 of their size."""
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((40, 30))
    reference[(0,) if along == "rows" else (slice(None), 0)] *= 1e4
    rounded = reference.astype(np.float32).astype(np.float64)
    wrong = rounded.copy()
    wrong[1:, 1:] *= 1.0001
    for local, found, passed in ((True, rounded, True), (True, wrong, False), (False, wrong, True)):
        errors = Errors(EPSILON, local=local)
        errors.add(reference, rounded, found, np.ones(40, bool), POINTS[0])
        assert errors.passed is passed
        assert ("of its row or channel" in (errors.failure() or "")) is not passed


@pytest.mark.parametrize(
    ("yardstick", "message"),
    [
        (np.inf, "overflows in PyTorch at batch 2, length 3"),
        (np.nan, "overflows in PyTorch at batch 2, length 3"),
        (1.02, "amplifies rounding errors"),
    ],
)
def test_useless_yardstick_fails(yardstick: float, message: str) -> None:
    """Whatever the graph gives would be within a limit that depends on it."""
    errors = Errors(EPSILON)
    reference = np.ones((1, 4))
    errors.add(reference, np.array([[1, 1, 1, yardstick]]), reference, ONE, POINTS[0])
    assert not errors.passed
    assert message in (errors.failure() or "")


def test_rounding_is_allowed_and_padding_ignored() -> None:
    reference, valid = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([True, False])
    errors = Errors(1e-7, local=False)
    errors.add(reference, reference, reference + 0.1, valid, POINTS[0])
    assert not errors.passed
    errors.allow(reference, reference + np.array([[0.0, 0.04], [9.0, 9.0]]), valid)
    assert errors.torch == pytest.approx(0.04)
    assert not errors.passed
    errors.allow(reference, reference - 0.06, valid)
    assert errors.passed
    errors.allow(reference, reference + 0.01, valid)
    assert errors.torch == pytest.approx(0.06)


def test_padding_only_has_to_be_finite() -> None:
    reference, valid = np.zeros((6, 4)), np.ones(6, bool)
    valid[5] = False
    wrong = reference.copy()
    wrong[5] = 7
    errors = Errors(1e-7)
    errors.add(reference, reference, wrong, valid, POINTS[0])
    assert errors.passed
    wrong[5, 3] = np.inf
    errors.add(reference, reference, wrong, valid, POINTS[0])
    errors.add(reference, reference, reference, valid, POINTS[1])
    assert not errors.passed


@pytest.mark.parametrize("which", ["reference", "result"])
def test_non_finite_output_at_any_point_fails(which: str) -> None:
    good, valid = np.ones((2, 4)), np.ones(2, bool)
    bad = np.array([[1.0, 1, 1, np.nan], [1, 1, 1, 1]])
    errors = Errors(1e-7)
    reference, result = (bad, good) if which == "reference" else (good, bad)
    errors.add(good, good, good, valid, POINTS[0])
    errors.add(reference, good, result, valid, POINTS[1])
    errors.add(good, good, good, valid, POINTS[2])
    assert not errors.passed
    assert errors.worst == POINTS[1]
    assert errors.hopeless


@pytest.mark.parametrize(("error", "hopeless"), [(0.099, False), (0.101, True)])
def test_error_far_beyond_the_limit_is_hopeless(error: float, hopeless: bool) -> None:
    reference = np.array([[1.0]])
    errors = Errors(0.25e-3)
    errors.add(reference, reference, reference + error, ONE, POINTS[0])
    assert not errors.passed
    assert errors.hopeless is hopeless


def test_nothing_is_hopeless_without_a_limit() -> None:
    """If the model returns exact zeros, other inputs may still allow the error."""
    zeros = np.zeros((1, 1))
    errors = Errors(1e-7)
    errors.add(zeros, zeros, zeros + 1e-9, ONE, POINTS[0])
    assert not errors.hopeless


def test_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(40, 30, generator=generator, dtype=torch.float64)
    found = wanted + 0.1 * torch.randn(40, 30, generator=generator, dtype=torch.float64)
    margin = 0.15
    item = TokenDivergence(EPSILON)
    item.add(wanted.numpy(), wanted.float().numpy(), found.numpy(), margin)
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
    )
    assert item.kl == pytest.approx(float(divergence.sum(-1).max()), rel=1e-9)
    tops = zip(wanted.topk(10).indices.tolist(), found.topk(10).indices.tolist(), strict=True)
    assert item.overlap == min(len({*one} & {*other}) for one, other in tops) / 10
    best = wanted.topk(2).values
    tied = (best[:, 0] - best[:, 1]) <= margin
    differs = wanted.argmax(-1) != found.argmax(-1)
    assert (item.rows, item.disagreements, item.near_ties) == (
        40,
        int((differs & ~tied).sum()),
        int((differs & tied).sum()),
    )
    assert item.near_ties > 0
    assert item.overlap < 1
    assert item.torch_kl < 1e-12
    assert "KL divergence" in (replace(item, disagreements=0, missing=0).failure() or "")
    assert replace(item, disagreements=0, missing=0, judged=False).failure() is None


def test_better_token_among_the_ten_best_is_missed() -> None:
    logits = np.arange(20.0)[None]
    found = logits.copy()
    found[0, 12] = 0
    item = TokenDivergence(EPSILON)
    item.add(logits, logits, found, 0.1)
    assert "ranks 1 of the ten best" in (item.failure() or "")
    item = TokenDivergence(EPSILON)
    item.add(logits, logits, found, 3.0)
    assert item.missing == 0


def test_divergence_that_is_not_a_number_fails() -> None:
    logits = np.zeros((1, 20))
    item = TokenDivergence(EPSILON)
    item.add(logits, logits, np.full((1, 20), np.nan), 0.1)
    assert item.failure() is not None


def test_other_token_without_a_near_tie_is_a_disagreement() -> None:
    item = TokenDivergence(EPSILON)
    logits = np.array([[3.0, 2.0, 0.0], [3.0, 2.99, 0.0]])
    item.add(logits, logits, logits[:, [1, 0, 2]], 0.1)
    assert (item.disagreements, item.near_ties, item.overlap) == (1, 1, 1.0)


def test_long_outputs_are_sampled_evenly() -> None:
    logits = np.arange(1000.0)[:, None]
    valid = np.arange(1000) >= 100
    (rows,) = sampled(logits, valid).T
    assert 64 <= len(rows) <= 128
    assert rows[0] == 100
    assert rows[-1] > 990
    assert len(set(np.diff(rows))) == 1


# Greedy decoding.


def decoded(execute: TorchExecutor, graphs: Sequence[zoo.Graph], longest: int = 13) -> Array:
    tokens = greedy_tokens(execute, graphs, longest)
    assert tokens is not None
    return tokens


def test_encoder_does_not_decode(exported_model: Exported) -> None:
    folder = exported_model(BERT)
    executor = TorchExecutor(zoo.load(folder))
    graphs = ModelDirectory.open(folder).spec.config.graphs()
    assert greedy_tokens(executor, graphs) is None
    assert greedy_agreement(executor, {}, graphs, {}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [GPT, SEQ2SEQ])
def test_greedy_agreement_distinguishes_models(exported_noisy: Noisy, name: str) -> None:
    (one, _), (other, _) = exported_noisy(name), exported_noisy(name, 1)
    graphs = one.spec.config.graphs()
    reference, same, different = (
        TorchExecutor(model) for model in (zoo.load(one.path).double(), zoo.load(one.path), zoo.load(other.path))
    )
    tokens = {"same": decoded(same, graphs), "different": decoded(different, graphs)}
    found = greedy_agreement(reference, tokens, graphs, dict.fromkeys(tokens, 1e-6))
    assert found["same"] == {"passed": True, "rows": 2, "tokens": 8, "agreed": 8, "compared": 16}
    assert found["different"]["passed"] is False
    assert found["different"]["agreed"] < 8
    nothing_settled = greedy_agreement(reference, tokens, graphs, dict.fromkeys(tokens, 1e6))["different"]
    assert (nothing_settled["passed"], nothing_settled["compared"]) == (True, 0)


@pytest.mark.parametrize("longest", range(1, 15))
def test_decoding_stays_within_the_positions(longest: int) -> None:
    """Each row is decoded by the real model, whose position table has no further rows."""
    model = zoo.create_model("gpt-tiny", max_seq_len=longest).double()
    executor = TorchExecutor(model)
    graphs = model.config.graphs()
    tokens = {"own": decoded(executor, graphs, longest)}
    agreed = greedy_agreement(executor, tokens, graphs, {"own": 0.0}, longest)["own"]
    prompt = min(5, (longest + 1) // 2)
    assert (agreed["passed"], agreed["tokens"]) == (True, min(8, longest - prompt + 1))
    assert agreed["tokens"] >= 1


# The evidence.


@pytest.mark.parametrize("name", [GPT, BERT, pytest.param(SEQ2SEQ, marks=pytest.mark.slow)])
def test_evidence(exported_model: Exported, name: str) -> None:
    folder = exported_model(name)
    evidence = json.loads((folder / "parity.json").read_text())
    stored = ModelDirectory.open(folder)
    graphs = stored.spec.config.graphs()
    assert (evidence["schema"], evidence["verified"], evidence["model"]) == (1, True, name)
    assert (evidence["provider"], evidence["dtype"]) == ("cpu", "float32")
    points, left_out = make_grid(graphs, 32, 100_000, whole=True)
    assert [Point(**point) for point in evidence["grid"]["points"]][: len(points)] == points
    assert {graph.name for graph in graphs} == set(evidence["grid"]["coverage"])
    assert set(evidence["laws"].values()) <= {"passed", "does not apply: no graph has a past"}
    assert evidence["grid"]["left_out"] == left_out == 0
    packages = ("torch", "onnx", "onnx-ir", "onnxscript")
    assert {package: evidence["versions"][package] for package in packages} == {
        package: version(package) for package in packages
    }
    assert evidence["versions"]["zoo"] == zoo.__version__
    assert evidence["unused_tensors"] == []
    assert evidence["weights"] == {"model.safetensors": sha256(folder / "model.safetensors")}
    assert list(evidence["graphs"]) == [graph.name for graph in graphs]
    for graph in graphs:
        part = evidence["graphs"][graph.name]
        assert list(part["outputs"]) == [tensor.name for tensor in graph.output_tensors()]
        assert set(part["placement"]) == {"CPUExecutionProvider"}
        for levels in part["outputs"].values():
            assert set(levels) == {"off", "all", "perturbed", "faint"}
            for facts in levels.values():
                assert (facts["passed"], facts["finite"]) == (True, True)
                assert 0 < facts["p99_9_abs_error"] <= facts["max_abs_error"] <= facts["limit"]
                scale = facts["max_abs_error"] / facts["max_rel_error"]
                limit = 2 * facts["torch_max_abs_error"] + 4 * 2.0**-23 * scale
                assert facts["limit"] == pytest.approx(limit, rel=1e-9)
    if name == BERT:
        assert (evidence["logits"], evidence["greedy_decoding"]) == ({}, {})
    else:
        assert set(evidence["greedy_decoding"]) == {"off", "all"}
        assert set(evidence["logits"]) == {"off", "all", "perturbed", "faint"}
        for level in ("off", "all"):
            assert evidence["logits"][level]["argmax_disagreements"] == 0
            assert 0 <= evidence["logits"][level]["max_kl_divergence"] < 1e-6
            assert evidence["greedy_decoding"][level]["passed"] is True


@pytest.mark.parametrize("name", [GPT, BERT, pytest.param(SEQ2SEQ, marks=pytest.mark.slow)])
def test_graphs_and_evidence_contain_each_others_digests(exported_model: Exported, name: str) -> None:
    """A graph contains the digest of its evidence, which contains the digests of the graph's file and of the sample."""
    folder, sample = exported_model(name), "recorded.safetensors.gz"
    evidence = json.loads((folder / "parity.json").read_text())
    files = evidence.pop("files")
    graphs = [f"{graph}.onnx" for graph in evidence["graphs"]]
    assert files == {name: sha256(folder / name) for name in (*graphs, sample)}
    covered = json.dumps([evidence, {sample: files[sample]}]).encode()
    for file in graphs:
        model = onnx.load(folder / file, load_external_data=False)
        entries = {item.key: item.value for item in model.metadata_props}
        assert entries["zoo.evidence_sha256"] == hashlib.sha256(covered).hexdigest()
        assert entries["zoo.weights_sha256"] == sha256(folder / "model.safetensors")
        assert entries["zoo.tokenizer_sha256"] == sha256(folder / "tokenizer.json")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
