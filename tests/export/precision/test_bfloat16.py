"""Models in bfloat16, which numpy lacks and ONNX Runtime supports on CUDA only.

Without a GPU, graphs are compared in float32, and run with float32 arithmetic between bfloat16 inputs, weights and
outputs. Tests that need a GPU are in ``test_cuda.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, parser
from safetensors.torch import load_file, save_file

from tests.precisions import make_reduced
from zoo.artifact import Export, ModelDirectory
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo.probe.dtypes import BFLOAT16, epsilon, numpy_dtype
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.module import TorchExecutor, as_array, as_tensor
from zoo.probe.pipeline import run_pipeline
from zoo_export import compare_runtime
from zoo_export.comparison import Comparison
from zoo_export.export import export_graphs_only
from zoo_export.graph.file import parse, serialize
from zoo_export.graph.links import external_tensors
from zoo_export.graph.widen import widen
from zoo_export.parity.compare import compare
from zoo_export.parity.subject import OnnxSubject
from zoo_export.parity.sweep import Sweep
from zoo_export.trace.make import Options, make_graphs
from zoo_export.variants.halves import as_model
from zoo_export.variants.reduced.smallest import NoPrecisionError, SmallestPrecision
from zoo_runtime import load_session
from zoo_runtime.generation.decoder import Decoder, take_rows
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import loading_problem, open_session
from zoo_runtime.onnx_runtime.values import run_session, to_array, to_value

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

REFUSAL = "onnxruntime has no bfloat16 kernels on the CPU"
NAMES = ["gpt-tiny", "bert-tiny", pytest.param("transformer-tiny", marks=pytest.mark.slow)]
BITS = hnp.arrays(np.uint16, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
POINT = Point(2, 7, 3, "left")


@pytest.fixture(scope="module")
def half_model(exported_build: Exported) -> Callable[[str], Path]:
    """Build a preset in bfloat16 with non-trivial weights, once."""
    made: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in made:
            made[name] = exported_build(name, dtype="bfloat16", noise=True, gain=3.0)
        return made[name]

    return build


def bridged(graph: bytes) -> bytes:
    """Convert a bfloat16 graph to float32 arithmetic, keeping bfloat16 inputs, weights and outputs."""
    wide, exact = widen(graph)
    assert exact
    model = parse(wide)
    halves = []
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
            halves.append(value.name)
    for tensor in external_tensors(model):
        tensor.data_type = TensorProto.BFLOAT16
        halves.append(tensor.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name} in float32" if name in halves else name for name in names]
    made = {item.name for item in model.graph.output}
    casts = [
        onnx.helper.make_node("Cast", [f"{name} in float32"], [name], to=TensorProto.BFLOAT16)
        if name in made
        else onnx.helper.make_node("Cast", [name], [f"{name} in float32"], to=TensorProto.FLOAT)
        for name in halves
    ]
    nodes = [node for node in casts if node.input[0] in halves]
    nodes += [*model.graph.node, *(node for node in casts if node.input[0] not in halves)]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return serialize(model)


def sketch(body: str, signature: str) -> bytes:
    """Build a graph of a few nodes."""
    text = f'<ir_version: 10, opset_import: ["": 23]> sketch {signature} {{ {body} }}'
    data: bytes = parser.parse_model(text).SerializeToString()
    return data


# Arrays, values and tensors.


@given(BITS)
def test_bits_survive_conversion_to_values(bits: np.ndarray[Any, Any]) -> None:
    array = bits.view(BFLOAT16)
    value = to_value(array)
    assert (value.data_type(), tuple(value.shape())) == ("tensor(bfloat16)", bits.shape)
    if bits.size:
        np.testing.assert_array_equal(torch.from_dlpack(value).view(torch.int16).numpy().view(np.uint16), bits)
    back = to_array(value)
    assert back.dtype == BFLOAT16
    np.testing.assert_array_equal(back.view(np.uint16), bits)


@given(BITS)
def test_bits_survive_conversion_to_tensors(bits: np.ndarray[Any, Any]) -> None:
    tensor = as_tensor(bits.view(BFLOAT16))
    assert tensor.dtype == torch.bfloat16
    numbers = bits.view(BFLOAT16).astype(np.float32)
    np.testing.assert_array_equal(tensor.float().numpy().reshape(bits.shape), numbers)
    np.testing.assert_array_equal(as_array(tensor).view(np.uint16).reshape(bits.shape), bits)
    np.testing.assert_array_equal(as_array(tensor.flatten()[::2]).view(np.uint16), bits.reshape(-1)[::2])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "bool"])
def test_other_arrays_are_unchanged(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    value = to_value(array)
    assert value.data_ptr() == array.ctypes.data
    assert to_array(value).dtype == array.dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(to_array(value), array)


def test_cpu_values_share_the_memory_of_arrays() -> None:
    array = np.zeros((2, 3), BFLOAT16)
    value = to_value(array)
    assert value.data_ptr() == array.ctypes.data
    array[1, 2] = 0.5
    assert to_array(value)[1, 2] == 0.5
    assert not np.shares_memory(to_array(value), array)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtype_properties_equal_torch(dtype: str) -> None:
    facts = torch.finfo(getattr(torch, dtype))
    for known in (dtype, numpy_dtype(dtype)):
        assert epsilon(known) == facts.eps
    assert numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)


# Sessions.


@pytest.fixture(scope="module")
def passing() -> ort.InferenceSession:
    """Build a graph of the bfloat16 operations that the CPU supports: casts in both directions and identity."""
    signature = "(float[n] x, bfloat16[n] b) => (bfloat16[n] rounded, bfloat16[n] same, float[n] read)"
    return open_session(sketch("rounded = Cast<to=16>(x) same = Identity(b) read = Cast<to=1>(b)", signature))


@given(hnp.arrays(np.float32, 7, elements=st.floats(width=32)), hnp.arrays(np.uint16, 7))
def test_session_accepts_and_returns_bfloat16(
    passing: ort.InferenceSession, x: np.ndarray[Any, Any], bits: np.ndarray[Any, Any]
) -> None:
    names = ["rounded", "same", "read"]
    rounded, same, read = run_session(passing, names, {"x": x, "b": bits.view(BFLOAT16)})
    assert (rounded.dtype, same.dtype, read.dtype) == (BFLOAT16, BFLOAT16, np.float32)
    wanted = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded.astype(np.float32), wanted)
    np.testing.assert_array_equal(same.view(np.uint16), bits)
    np.testing.assert_array_equal(read, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy())


def test_session_binds_bfloat16(passing: ort.InferenceSession) -> None:
    b, x, same = np.arange(4).astype(BFLOAT16), np.zeros(4, np.float32), np.empty(4, BFLOAT16)
    binding = passing.io_binding()
    values = {"x": to_value(x), "b": to_value(b), "same": to_value(same)}
    binding.bind_ortvalue_input("x", values["x"])
    binding.bind_ortvalue_input("b", values["b"])
    binding.bind_ortvalue_output("same", values["same"])
    binding.bind_output("rounded")
    passing.run_with_iobinding(binding)
    np.testing.assert_array_equal(same, b)
    np.testing.assert_array_equal(to_array(binding.get_outputs()[1]), np.zeros(4, BFLOAT16))


def test_rows_of_a_value_are_selected() -> None:
    array = np.arange(6).reshape(3, 2).astype(BFLOAT16)
    taken = take_rows(to_value(array), np.array([2, 0, 2, 1]), "cpu")
    np.testing.assert_array_equal(to_array(taken), array[[2, 0, 2, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("replaced", [False, True], ids=["stored weights", "other weights"])
def test_executor_passes_bfloat16_between_graphs(half_model: Callable[[str], Path], name: str, replaced: bool) -> None:
    """Values that an executor passes between graphs, and replacements of weights."""
    stored = ModelDirectory.open(half_model(name))
    model = persist.load_directory(stored)
    if replaced:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.75)
    names = {(tensor.file, tensor.offset): key for key, tensor in stored.layout.items()}
    weights = {key: as_array(tensor.detach()) for key, tensor in model.state_dict().items()}
    sessions = {}
    for graph, data in make_graphs(stored).items():
        file = bridged(data)
        others = {}
        for tensor in external_tensors(parse(file)):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            others[tensor.name] = weights[names[entries["location"], int(entries["offset"])]]
        sessions[graph] = open_session(file, weights=stored.path, replace=others if replaced else None)
    graphs = stored.spec.graphs
    feeds = make_feeds(graphs, POINT, 0, 32)
    found = run_pipeline(OnnxExecutor(sessions, BFLOAT16), graphs, feeds, POINT, split=True)
    wanted = run_pipeline(TorchExecutor(model.double()), graphs, feeds, POINT, split=False)
    for graph in graphs:
        for tensor in graph.output_tensors():
            one, other = found[graph.name][tensor.name], wanted[graph.name][tensor.name]
            assert one.dtype == BFLOAT16
            error = np.abs(one.astype(np.float64) - other)
            rows = slice(1) if "past" not in tensor.name else slice(None)  # the first has no padding
            assert error[rows].max() < 8 * epsilon("bfloat16") * np.abs(other[rows]).max()


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["portable", "cuda"])
def test_decoder_keeps_caches_in_bfloat16(half_model: Callable[[str], Path], profile: str) -> None:
    """One or several tokens per step, with rows moved, duplicated and dropped, against full passes in torch."""
    stored = ModelDirectory.open(half_model("gpt-tiny"))
    (graph,) = stored.spec.graphs
    file = bridged(make_graphs(stored, Options(profile=profile))["model"])
    session = open_session(file, weights=stored.path)
    model = persist.load_directory(stored).float()
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 256, (3, 5))
    decode = Decoder(session, graph, {}, 3, BFLOAT16)
    assert (decode.buffers is not None) == (profile == "cuda")
    new = ids
    for order in ([2, 0, 1], [0, 0, 2], [1, 2], [0, 1], [1, 0]):
        found = decode.step(new)
        with torch.inference_mode():
            wanted = model(torch.tensor(ids))[:, -1].numpy()
        assert found.dtype == np.float32
        assert np.abs(found - wanted).max() < 8 * epsilon("bfloat16") * np.abs(wanted).max()
        assert np.abs(found - np.roll(wanted, 1, 0)).max() > 0.1 * np.abs(wanted).max(), "the rows must differ"
        decode.take(np.array(order))
        ids = ids[order]
        new = rng.integers(0, 256, (len(ids), rng.integers(1, 4)))
        ids = np.concatenate((ids, new), 1)


# Exports.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_graph_is_valid_and_reads_stored_weights(
    half_model: Callable[[str], Path], zoo: Zoo, name: str
) -> None:
    folder = half_model(name)
    result = zoo("export", folder, "--onnx", "--graph-only", "--force")
    assert result.status == 0
    (warning,) = result.warnings
    assert "NOT VERIFIED" in warning
    stored = ModelDirectory.open(folder)
    wanted = load_file(folder / "model.safetensors")
    read: set[str] = set()
    for file in Export(stored).graph_files.values():
        onnx.checker.check_model(folder / file, full_check=True)
        for tensor in external_tensors(onnx.load(folder / file, load_external_data=False)):
            place = {entry.key: entry.value for entry in tensor.external_data}
            assert (tensor.data_type, place["location"]) == (TensorProto.BFLOAT16, "model.safetensors")
            start, length = int(place["offset"]), int(place["length"])
            data = (folder / place["location"]).read_bytes()[start : start + length]
            assert data == wanted[tensor.name].view(torch.int16).numpy().tobytes()
            read.add(tensor.name)
    assert read == set(wanted)


def faulty(graph: bytes) -> bytes:
    """Change the epsilon of one norm, with an effect far below bfloat16 rounding."""
    model = parse(graph)
    nodes = [node for item in (model.graph, *model.functions) for node in item.node]
    norm = next(node for node in nodes if node.op_type == "LayerNormalization")
    (attribute,) = [item for item in norm.attribute if item.name == "epsilon"]
    attribute.f = 1e-3
    return serialize(model)


def failures_in_float32(stored: ModelDirectory, wide: Mapping[str, tuple[bytes, bool]]) -> list[str]:
    """Compare widened graphs with the model in float32 at one point."""
    assert all(exact for _, exact in wide.values())
    graphs = {name: graph for name, (graph, _) in wide.items()}
    sweep = Sweep(OnnxSubject(stored, graphs, "cpu", in_float32=True))
    sweep.perturb([POINT])
    return sweep.failures()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_graph_is_compared_in_float32(half_model: Callable[[str], Path], name: str) -> None:
    stored = ModelDirectory.open(half_model(name))
    graphs = make_graphs(stored)
    for change in (bytes, faulty):
        wide = {key: widen(change(graph)) for key, graph in graphs.items()}
        assert bool(failures_in_float32(stored, wide)) == (change is faulty)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_body_of_a_loop_is_widened(dtype: str) -> None:
    """With its inputs, outputs and constants; the lowest number of the dtype becomes that of float32."""
    lowest = int(np.array(ml_dtypes.finfo(numpy_dtype(dtype)).min).view(np.uint16))  # the parser wants bits
    body = f"""
        step ({dtype}[2] before, {dtype}[2] x) => ({dtype}[2] after, {dtype}[2] y)
        {{ low = Constant <value = {dtype} {{ {lowest} }}> ()  after = Add (before, x)  y = Max (after, low) }}"""
    signature = f"({dtype}[2] first, {dtype}[3, 2] x) => ({dtype}[2] last, {dtype}[3, 2] y)"
    wide, exact = widen(sketch(f"last, y = Scan <num_scan_inputs = 1, body = {body}> (first, x)", signature))
    assert exact
    x = np.array([[1, -1e38], [2, -1e38], [3, -1e38]], np.float32)
    last, y = ort.InferenceSession(wide).run(None, {"first": np.zeros(2, np.float32), "x": x})
    np.testing.assert_array_equal(y, x.cumsum(0))
    np.testing.assert_array_equal(last, x.sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_loop_over_steps_is_compared_in_float32(exported_build: Exported, dtype: str) -> None:
    stored = ModelDirectory.open(exported_build("seq2seq-tiny", dtype=dtype, noise=True))
    graphs = make_graphs(stored)
    wide = {name: widen(graph) for name, graph in graphs.items()}
    assert failures_in_float32(stored, wide) == []
    model = parse(graphs["decoder"])
    (body,) = [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.name == "body"]
    next(node for node in body.node if node.op_type == "Tanh").op_type = "Identity"
    assert failures_in_float32(stored, {**wide, "decoder": widen(serialize(model))})


@pytest.mark.slow
def test_bfloat16_variant_is_the_rounded_model(exported_build: Exported, tmp_path: Path) -> None:
    stored = ModelDirectory.open(exported_build("gpt-tiny", noise=True))
    variant = make_reduced(stored, "bfloat16", tmp_path)
    wanted = {name: tensor.bfloat16() for name, tensor in load_file(stored.path / "model.safetensors").items()}
    found = load_file(variant.path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert variant.footprint() == sum(place.length for place in stored.layout.values()) // 2
    model = as_model(stored, variant)
    assert model.dtype == "bfloat16"
    wide = {name: widen(graph) for name, graph in variant.files().items()}
    assert failures_in_float32(model, wide) == []


def test_overflowing_weights_are_rejected(
    exported_build: Exported, seal: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = exported_build("gpt-tiny")
    weights = load_file(folder / "model.safetensors")
    weights["norm.bias"][3] = 3.4e38
    save_file(weights, folder / "model.safetensors", {"format": "pt", "head.weight": "token_embedding.weight"})
    seal(folder)
    with pytest.raises(UsageError, match=r"norm\.bias reaches 3\.4e\+38, too large for bfloat16"):
        make_reduced(ModelDirectory.open(folder), "bfloat16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny", "transformer-tiny"])
def test_other_runtimes_are_compared_in_bfloat16(exported_build: Exported, name: str) -> None:
    """The module itself passes; a single number off by more than rounding fails."""
    gain = 1.0 if name == "transformer-tiny" else 3.0  # with more, rounding alone changes half of a number
    stored = ModelDirectory.open(exported_build(name, dtype="bfloat16", noise=True, gain=gain))

    def open_runtime(weights: Any, *, wrong: float = 0.0) -> Any:
        model = persist.load_directory(stored)
        if weights is not None:
            assert {value.dtype for value in weights.values()} == {BFLOAT16}
            model.load_state_dict({name: as_tensor(value) for name, value in weights.items()})
        execute = TorchExecutor(model)

        def run(graph: Any, arrays: Any) -> Any:
            outputs = execute(graph, arrays)
            last = graph.output_tensors()[0].name
            outputs[last] = outputs[last] + np.array(wrong * np.abs(outputs[last]).max(), BFLOAT16)
            return outputs

        return {graph.name: lambda arrays, graph=graph: run(graph, arrays) for graph in stored.spec.graphs}

    report = compare_runtime(stored, open_runtime)
    assert report.passed, report.failures
    assert report.evidence["dtype"] == "bfloat16"
    assert not compare_runtime(stored, lambda weights: open_runtime(weights, wrong=0.25)).passed


# Rejected uses.


@pytest.mark.slow
def test_cpu_provider_is_rejected(half_model: Callable[[str], Path], zoo: Zoo) -> None:
    folder = half_model("gpt-tiny")
    export_graphs_only(folder, force=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for command in (
        ("export", folder, "--onnx", "--force"),
        ("export", folder, "--onnx", "--profile", "cpu"),
        ("verify", folder),
        ("diff", folder),
        ("run", folder, "x", "--unverified"),
        ("bench", folder, "--unverified"),
    ):
        zoo(*command).failed(2, REFUSAL, str(folder), "use --provider cuda")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_cpu_variant_is_rejected_before_it_is_made(exported_model: Exported, zoo: Zoo, tmp_path: Path) -> None:
    folder = exported_model("gpt-tiny")
    before = sorted(path.name for path in folder.iterdir())
    zoo("quantize", folder, "--dtype", "bfloat16").failed(2, REFUSAL, "use --provider cuda")
    zoo("run", folder, "x", "--dtype", "bfloat16").failed(
        3, "not exported for bfloat16", "zoo quantize", "--dtype bfloat16"
    )
    with pytest.raises(ArtifactError, match=r"zoo quantize .* --dtype bfloat16$"):
        load_session(folder, dtype="bfloat16", provider="cpu")
    assert sorted(path.name for path in folder.iterdir()) == before
    stored = ModelDirectory.open(folder)
    (tmp_path / "text.txt").write_text("time flies like an arrow")
    recipe = SmallestPrecision(1e9, text=tmp_path / "text.txt", candidates=("bfloat16",))
    recipe.check(stored, Comparison())
    with pytest.raises(NoPrecisionError):
        recipe.make(stored, tmp_path)
    (entry,) = recipe.tried
    assert (entry["precision"], entry["passed"]) == ("bfloat16", False)
    assert REFUSAL in entry["why"]


@pytest.mark.slow
def test_unavailable_cuda_is_reported_for_any_dtype(exported_build: Exported, zoo: Zoo) -> None:
    problem = loading_problem("cuda")
    if problem is None:
        pytest.skip("CUDA loads here")
    said = []
    for dtype in ("float16", "bfloat16"):
        folder = exported_build("bert-tiny", dtype=dtype)
        export_graphs_only(folder)
        lines = [
            zoo(*command).failed(2, str(problem).split(":")[0])
            for command in (
                ("export", folder, "--onnx", "--force", "--provider", "cuda"),
                ("export", folder, "--onnx", "--profile", "cuda"),
                ("verify", folder, "--provider", "cuda"),
                ("run", folder, "x", "--unverified", "--provider", "cuda"),
            )
        ]
        said.append([line.replace(str(folder), "") for line in lines])
        assert not list(folder.glob("*.cuda.onnx"))
    assert said[0] == said[1]


@pytest.mark.slow
def test_comparison_on_the_cpu_is_rejected(half_model: Callable[[str], Path]) -> None:
    stored = ModelDirectory.open(half_model("bert-tiny"))
    with pytest.raises(UsageError, match=REFUSAL):
        compare(stored, make_graphs(stored))
