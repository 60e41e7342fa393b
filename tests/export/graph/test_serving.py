"""The profile ``serving``: graphs of fixed sizes whose rows have pasts of their own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from zoo.artifact import PREFILL, ModelDirectory
from zoo.errors import ParityError, UsageError
from zoo_export.export import export_graphs_only, export_model
from zoo_export.graph import serving
from zoo_export.trace import cache
from zoo_export.trace.make import Options, make_graphs
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.serving.names import NEW_LENGTHS, PAST_LENGTHS
from zoo_runtime.serving.sizes import sizes_of_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

DECODERS = [
    "gpt-tiny", "llama-tiny", "gemma-tiny", "phi-tiny", "transformer-tiny", "t5-tiny", "adaptive-span-tiny",
    "all-attention-tiny", "product-key-memory-tiny", "mamba2-tiny",
]  # fmt: skip
DYNAMIC = {
    "Shape", "Size", "Range", "Pad", "NonZero", "If", "Loop", "Scan", "ConstantOfShape", "Compress", "Unique", "Resize",
}  # fmt: skip
SMALL = Options(profile="serving", fix={"batch": 3, "capacity": 24, "sequence": 5}, contrib=False)
GROUPED = replace(SMALL, contrib=True)
GROUPS = {"gpt-tiny": 2, "llama-tiny": 2, "gemma-tiny": 0, "phi-tiny": 2, "transformer-tiny": 2, "t5-tiny": 0,
          "adaptive-span-tiny": 0, "all-attention-tiny": 0, "product-key-memory-tiny": 2, "mamba2-tiny": 0}  # fmt: skip
"""Number of attentions that become the operator of ONNX Runtime: none with windows, biases or persistent memories."""


def with_rows(model: onnx.ModelProto, rows: int) -> int:
    """Give a graph a number of rows. Returns the number of inputs and outputs that had none."""
    free = [
        dim
        for value in (*model.graph.input, *model.graph.output)
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param == "batch"
    ]
    for dim in free:
        dim.dim_value = rows
    return len(free)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", DECODERS)
def test_sizes_are_fixed(exported_build: Exported, name: str) -> None:
    """Every value has a fixed shape once the number of rows is given, on which alone operators compute with sizes."""
    stored = ModelDirectory.open(exported_build(name))
    for graph, data in make_graphs(stored, SMALL).items():
        given = onnx.load_model_from_string(data)
        free = graph not in (PREFILL, "encoder")
        assert free == (with_rows(given, 3) > 0)
        model = onnx.shape_inference.infer_shapes(given, strict_mode=True, data_prop=True)
        counts = {node.output[0] for node in model.graph.node if free and list(node.input) == [NEW_LENGTHS]}
        assert not {node.op_type for node in model.graph.node if node.output[0] not in counts} & DYNAMIC, graph
        assert {node.domain for node in model.graph.node} == {""}
        constants = {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
        for node in model.graph.node:
            if node.op_type == "Concat" and counts & set(node.input):
                assert {*node.input} <= constants | counts
                constants.add(node.output[0])
        for node in model.graph.node:
            if node.op_type in ("Reshape", "Expand", "Tile"):
                assert node.input[1] in constants
        shapes = {value.name: value.type.tensor_type.shape for value in (*model.graph.value_info, *model.graph.output)}
        for node in model.graph.node:
            for value in node.output:
                assert all(dim.HasField("dim_value") for dim in shapes[value].dim), (node.op_type, value)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", DECODERS)
def test_attention_of_own_tokens(exported_build: Exported, name: str) -> None:
    """Only attention that hides nothing but later tokens becomes the operator, which leaves none of its mask behind."""
    for graph in (data for graph, data in make_graphs(ModelDirectory.open(exported_build(name)), GROUPED).items()
                  if graph != "encoder"):  # fmt: skip
        model = onnx.load_model_from_string(graph)
        kinds = Counter(node.op_type for node in model.graph.node)
        assert kinds["GroupQueryAttention"] == GROUPS[name]
        if GROUPS[name]:
            assert kinds["TensorScatter"] == 0


@pytest.mark.parametrize(("graph", "rows", "length"), [("model", "batch", 1), (PREFILL, 1, 5)])
def test_inputs_and_outputs(exported_build: Exported, graph: str, rows: int | str, length: int) -> None:
    """The lengths of rows replace the padding mask; one graph has the buffers of any rows, the other those of one."""
    data = make_graphs(ModelDirectory.open(exported_build("gpt-tiny")), SMALL)[graph]
    model = onnx.load_model_from_string(data)
    contract = json.loads(next(item.value for item in model.metadata_props if item.key == "zoo.contract"))
    inputs, outputs = ({item["name"]: item["dims"] for item in contract[side]} for side in ("inputs", "outputs"))
    assert inputs["input_ids"] == [rows, length]
    assert outputs["logits"] == [rows, length, 260]
    assert inputs[PAST_LENGTHS] == inputs[NEW_LENGTHS] == [rows]
    assert inputs["past_key_values.1.value"] == outputs["present.1.value"] == [rows, 4, 24, 16]
    assert "attention_mask" not in inputs


@pytest.fixture(scope="module", params=[SMALL, GROUPED], ids=["standard", "grouped"])
def small(exported_build: Exported, request: pytest.FixtureRequest) -> Path:
    folder = exported_build("gpt-tiny", noise=True, gain=4.0)
    export_graphs_only(folder, options=request.param)
    return folder


@pytest.mark.parametrize("graph", ["model", PREFILL])
def test_row_beyond_its_buffers_harms_nothing(small: Path, graph: str) -> None:
    """A row with wrong lengths changes neither the results of others, if there are any, nor its own caches."""
    session = open_session(small / f"{graph}.serving.onnx")
    length, wrong_row = (1, 1) if graph == "model" else (sizes_of_session(session)["sequence"], 0)
    others = (0, 2) if graph == "model" else ()
    generator = np.random.default_rng(0)
    feeds = {
        item.name: generator.standard_normal((1 + len(others), *item.shape[1:])).astype(np.float32)
        for item in session.get_inputs()
        if item.name.startswith("past_key_values")
    }
    feeds["input_ids"] = generator.integers(0, 260, (1 + len(others), length))
    names = [item.name for item in session.get_outputs()]
    wrong = [(24, 1), (10**9, length), (23 if length > 1 else 24, 0), (3, 10**9), (-7, -1)]
    good: dict[str, Any] | None = None
    for past, new in wrong:
        values = {PAST_LENGTHS: [3, past, 17], NEW_LENGTHS: [1, new, length]}
        lengths = {name: np.array(rows if others else rows[1:2]) for name, rows in values.items()}
        found = dict(zip(names, session.run(names, feeds | lengths), strict=True))
        good = good or found
        assert np.isfinite(found["logits"]).all()
        for row in others:
            assert all(np.array_equal(found[name][row], good[name][row]) for name in names)
        if past > 24 - length:
            assert np.array_equal(found["present.0.key"][wrong_row], feeds["past_key_values.0.key"][wrong_row])


@pytest.mark.slow_after(0)
@pytest.mark.parametrize("name", DECODERS)
def test_export_is_verified(exported_build: Exported, zoo: Zoo, name: str) -> None:
    """The usual comparison, over rows of different lengths, and again from the files."""
    folder = exported_build(name, noise=True, gain=2.0)
    said = zoo("export", folder, "--onnx", "--profile", "serving")
    assert said.status == 0, said.err
    evidence = json.loads((folder / "parity.serving.json").read_text())
    positions = 32
    assert evidence["verified"]
    assert evidence["sizes"]["batch"] == 8
    assert evidence["row_counts"] == [1, 2, 4, 8]  # the comparison has run at each
    assert evidence["sizes"]["capacity"] == positions
    assert {point["padding"] for point in evidence["grid"]["points"]} >= {"none", "left", "empty row"}
    assert evidence["greedy_decoding"]["all"]["passed"]
    assert {"prefill.serving.onnx", "parity.serving.json"} <= set(ModelDirectory.open(folder).files)
    assert zoo("verify", folder, "--variant", "serving").status == 0
    assert zoo("verify", folder, "--variant", "serving", "--retrace").status == 0


def _all_tokens(self: Any, tape: Any, past: Any, new: Any) -> Any:
    size = (self.before if self.extended else 0) + self.added
    none = tape.op("Less", tape.op("Unsqueeze", past, tape.integers(1)), tape.integers(0))
    return tape.op("Or", none, tape.constant(np.ones((1, size), bool)))


def _unrotated(self: Any, node: Any) -> Any:
    return node.inputs[3]


def _from_the_start(self: Any) -> None:
    _ROTATE(self)
    self.past = self.start.op("Sub", self.past, self.past)


_ROTATE = serving._Serving._rotate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "fault"), [("_tokens", _all_tokens), ("_mask", _unrotated), ("_rotate", _from_the_start)]
)
def test_comparison_finds_faults(
    exported_build: Exported, monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[..., Any]
) -> None:
    """Unused slots that are seen, masks in another order than the keys, and tokens written to the wrong slots."""
    folder = exported_build("gpt-tiny", noise=True, gain=2.0)
    monkeypatch.setattr(serving._Serving, method, fault)
    monkeypatch.setattr(cache, "read", lambda key: None)
    monkeypatch.setattr(cache, "write", lambda key, data: None)
    with pytest.raises(ParityError, match="is not equal to the model"):
        export_model(folder, options=Options(profile="serving"))


def test_a_model_without_a_past_is_refused(zoo: Zoo) -> None:
    zoo("export", "bert-tiny", "--onnx", "--profile", "serving").failed(2, "bert has no past to keep between calls")


@pytest.mark.slow
def test_a_scan_is_refused(zoo: Zoo) -> None:
    zoo("export", "seq2seq-tiny", "--onnx", "--profile", "serving", "--graph-only").failed(
        2, "graph 'decoder' cannot be exported for serving", "Scan of the model"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [("mixtral-tiny", "Unique of blocks.0.mlp.experts"), ("qwen3-next-tiny", "Scan of blocks.0.attention")],
)
def test_refused_modules(zoo: Zoo, name: str, reason: str) -> None:
    said = zoo("export", name, "--onnx", "--profile", "serving", "--graph-only")
    said.failed(2, f"graph 'model' cannot be exported for serving: {reason} has a size that is not fixed")


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        (("capacity=33",), ["the model has 32 positions"]),
        (("capacity=8", "sequence=8"), ["sequence 8 must be below the capacity 8"]),
        (("batc=8",), ["no free dimension 'batc'", "did you mean 'batch'?"]),
        (("past_sequence=8",), ["no free dimension 'past_sequence'"]),
        (("batch=0",), ["must be positive"]),
    ],
)
def test_refused_sizes(exported_build: Exported, fix: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(UsageError) as failure:
        options = Options.from_dict({"profile": "serving", "fix": fix})
        make_graphs(ModelDirectory.open(exported_build("gpt-tiny")), options)
    assert all(word in str(failure.value) for word in words)


def test_other_profiles_have_no_fixed_sizes() -> None:
    with pytest.raises(UsageError, match="cannot have fixed dimensions"):
        Options(profile="cpu", fix={"batch": 2})
