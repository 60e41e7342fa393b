"""Repeated modules of any author become functions; unsuitable modules are traced normally."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.artifact import ModelDirectory
from zoo.contract import Graph, floats
from zoo_export import export as exporting
from zoo_export.export import export_model
from zoo_export.trace import graph as tracing
from zoo_export.trace.functions import _Function
from zoo_export.trace.make import Options, make_graphs
from zoo_export.trace.outline import Outline

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

WIDTH = 4
GRAPH = Graph(inputs=(floats("x", "batch", WIDTH),), outputs=(floats("y", "batch", WIDTH),))
CALLS = {
    ("gpt-tiny", "model.onnx"): {"GPTBlock": 2},
    ("bert-tiny", "model.onnx"): {"BERTBlock": 2},
    ("llama-tiny", "model.onnx"): {"LlamaBlock": 2},
    ("transformer-tiny", "encoder.onnx"): {"EncoderBlock": 2},
    ("transformer-tiny", "decoder.onnx"): {"DecoderBlock": 2},
    ("t5-tiny", "decoder.onnx"): {"DecoderBlock": 2},
    ("vit-tiny", "model.onnx"): {"ViTBlock": 2},
}


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def calls(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of calls of each function."""
    names = [node.op_type for node in model.graph.node if node.domain]
    return {name: names.count(name) for name in dict.fromkeys(names)}


@pytest.mark.parametrize(
    ("name", "file"), [pytest.param(*key, marks=pytest.mark.slow if key[0] == "t5-tiny" else ()) for key in CALLS]
)
def test_each_block_is_one_function(exported_model: Exported, name: str, file: str) -> None:
    folder = exported_model(name)
    model = load(folder / file)
    assert calls(model) == CALLS[name, file] == {function.name: 2 for function in model.functions}
    modules = dict(zoo.load(folder).named_modules())
    for function in model.functions:
        nodes = [node for node in model.graph.node if node.op_type == function.name]
        paths = ["".join(item.value for item in node.metadata_props if item.key == "zoo.block") for node in nodes]
        assert [node.name for node in nodes] == paths
        for path in paths:
            assert type(modules[path]).__name__ == function.name
            assert type(modules[path]).__module__ == function.domain
        own = {name for name, _ in modules[paths[0]].named_parameters()}
        assert len(own & set(function.input)) >= len(own) - 4  # encoder's graph: cross-attention keys
        for node, path in zip(nodes, paths, strict=True):
            weights = dict(zip(function.input, node.input, strict=True))
            assert all(weights[name] == f"{path}.{name}" for name in own & set(weights))
        for node in function.node:
            for item in node.metadata_props:
                assert item.value in {inner for inner, _ in modules[paths[0]].named_modules()}


def slow(*values: Any) -> list[Any]:
    """Mark parameters as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), *slow(("tie_embeddings=false",), ("num_kv_heads=2",))])
def test_depth_adds_only_calls(exported_build: Exported, settings: tuple[str, ...]) -> None:
    """A deeper model has the same functions and the same number of other nodes."""
    folders = [exported_build("gpt-tiny", *settings, layers) for layers in ("num_layers=3", "num_layers=9")]
    graphs = [make_graphs(ModelDirectory.open(folder))["model"] for folder in folders]
    shallow, deep = map(onnx.load_model_from_string, graphs)
    assert [function.SerializeToString() for function in shallow.functions] == [
        function.SerializeToString() for function in deep.functions
    ]
    assert (calls(shallow), calls(deep)) == ({"GPTBlock": 3}, {"GPTBlock": 9})
    assert len(deep.graph.node) - len(shallow.graph.node) == 6


@pytest.mark.slow
def test_depth_hardly_affects_export_time(exported_build: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-two more layers take less than twice as long; without functions they would take several times as long.

    The check of branches at sizes of 0 and 1 runs every layer, and is left out here.
    """
    monkeypatch.setattr(tracing, "check_small_sizes", lambda *_: None)
    seconds = {}
    for layers in (4, 36, 4, 36):
        stored = ModelDirectory.open(exported_build("gpt-tiny", f"num_layers={layers}"))
        started = time.process_time()
        make_graphs(stored, cached=False)
        seconds[layers] = min(seconds.get(layers, float("inf")), time.process_time() - started)
    assert seconds[36] < 2 * seconds[4]


@pytest.mark.slow
def test_inlined_graph_gives_the_same_results(exported_model: Exported, exported_build: Exported) -> None:
    folder = exported_build("gpt-tiny", seed=0)
    export_model(folder, options=Options(functions=False), force=True)
    flat = load(folder / "model.onnx")
    assert not flat.functions
    assert {node.domain for node in flat.graph.node} == {""}
    assert [(item.domain, item.version) for item in flat.opset_import] == [("", 23)]


@pytest.mark.slow
def test_runtime_optimises_both_forms_equally(exported_model: Exported, tmp_path: Path) -> None:
    """With optimisations, graphs with and without functions result in the same operators, and so in the same speed."""
    stored = ModelDirectory.open(exported_model("gpt-tiny"))
    kinds = []
    for functions in (True, False):
        data = make_graphs(stored, Options(functions=functions))["model"]
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{functions}.onnx")
        options.log_severity_level = 4
        folder = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(folder, str(stored.path))
        ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        nodes = load(tmp_path / f"{functions}.onnx").graph.node
        kinds.append(sorted((node.domain, node.op_type) for node in nodes))
    assert kinds[0] == kinds[1]


# Arbitrary modules, outlined separately.


class Layer(nn.Module):
    """Two modules and a plain attribute."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.linear(x) * self.scale
        return y if shift is None else y + shift


class Pair(Layer):
    """Returns two tensors, in a mapping and in a tuple."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        y = super().forward(x, shift)
        return {"both": (y, y * 2)}


class InPlace(Layer):
    """Changes its argument in place."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x.add_(1.0)
        return super().forward(x)


class RMSNorm(nn.Module):
    """As in most decoders: the epsilon is a number in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Normed(nn.Module):
    """A linear map after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = RMSNorm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Wrapped(Layer):
    """A layer with another inside."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)
        self.inner = Normed()

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return super().forward(self.inner(x), shift)


class Model(nn.Module):
    """Layers, called by ``run``."""

    def __init__(self, layers: list[nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def chain(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def chain_with_shift(layers: Any, x: Tensor) -> Tensor:
    shift = x.sin()
    for layer in layers:
        x = layer(x, shift=shift)
    return x


def chain_of_triples(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, times=3)
    return x


def different_calls(layers: Any, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x, x.sin()) if number else layer(x)
    return x


def between(layers: Any, x: Tensor) -> Tensor:
    """Compute something between the calls, and use one result twice."""
    kept = x
    for layer in layers:
        x = layer(x.relu() + kept)
        kept = x
    return x


def reaches_inside(layers: Any, x: Tensor) -> Tensor:
    return layers[1].linear(layers[0](x))


def reads_a_weight(layers: Any, x: Tensor) -> Tensor:
    return chain(layers, x) + layers[-1].linear.weight.sum()


def pairs(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        first, second = layer(x)["both"]
        x = first + second
    return x


def again(layers: Any, x: Tensor) -> Tensor:
    """Call one layer three times."""
    for _ in range(3):
        x = layers[0](x)
    return x


def norm_after_all(layers: Any, x: Tensor) -> Tensor:
    """End with a norm, which shares its epsilon with those of the layers."""
    *blocks, norm = layers
    return norm(chain(blocks, x))


def backwards(layers: Any, x: Tensor) -> Tensor:
    return chain(reversed(layers), x)


def tied() -> list[nn.Module]:
    """Tie the second layer's matrix to the first's."""
    first, second = Layer(), Layer()
    second.linear.weight = first.linear.weight
    return [first, second]


def replaced(*, all_layers: bool = False) -> list[nn.Module]:
    """Give the first layers, or all, a method of their own, with one more argument."""

    def double(module: nn.Module, x: Tensor, shift: Tensor | None = None, *, times: int = 2) -> Tensor:
        return Layer.forward(module, x, shift) * times  # type: ignore[arg-type]

    layers: list[Any] = [Layer() for _ in range(4)]
    for layer in layers if all_layers else layers[:2]:
        layer.forward = MethodType(double, layer)
    return layers


MODULES: dict[str, tuple[Callable[[], list[nn.Module]], Any, dict[str, int]]] = {
    "a chain": (lambda: [Layer() for _ in range(4)], chain, {"Layer": 4}),
    "a shared epsilon": (lambda: [Normed(), Normed(), RMSNorm()], norm_after_all, {"Normed": 2}),
    "an argument from outside": (lambda: [Layer() for _ in range(3)], chain_with_shift, {"Layer": 3}),
    "something between": (lambda: [Layer() for _ in range(3)], between, {"Layer": 3}),
    "several results": (lambda: [Pair() for _ in range(3)], pairs, {"Pair": 3}),
    "one layer, again and again": (lambda: [Layer()], again, {"Layer": 3}),
    "from the last to the first": (lambda: [Layer() for _ in range(3)], backwards, {"Layer": 3}),
    "a shared matrix": (tied, chain, {"Layer": 2}),
    "layers of two kinds": (
        lambda: [Layer(), Layer(2.0), Layer(), Layer(2.0)], chain, {"Layer": 2, "Layer_2": 2},
    ),
    "a first layer of another kind": (lambda: [Wrapped(2.0), Wrapped(), Wrapped()], chain, {"Wrapped": 2}),
    "methods of modules": (partial(replaced, all_layers=True), chain_of_triples, {}),
    "methods of some modules": (replaced, chain, {"Layer": 2}),
    "a single layer": (lambda: [Layer()], chain, {}),
    "layers that all differ": (lambda: [Layer(1.0), Layer(2.0), Layer(3.0)], chain, {}),
    "different arguments": (lambda: [Layer() for _ in range(3)], different_calls, {"Layer": 2}),
    "a layer reached inside": (lambda: [Layer(), Layer()], reaches_inside, {}),
    "arguments changed in place": (lambda: [InPlace(), InPlace()], chain, {}),
}  # fmt: skip


REASONS = {
    "a layer reached inside": "layers.0 (Layer) has submodules that are called from outside",
    "arguments changed in place": "layers.0 (InPlace) changes an argument in place",
}
"""Reasons why repeated modules do not become functions."""


def traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch, graph: Graph = GRAPH) -> onnx.ModelProto:
    """Trace a module to ONNX in the same way as an architecture."""
    from types import SimpleNamespace

    monkeypatch.setattr(tracing.create, "build_on_meta", lambda spec, dtype: build_on_meta(model))
    monkeypatch.setattr(tracing, "_describe", lambda *_: None)
    plugin = SimpleNamespace(distribution="test")
    spec: Any = SimpleNamespace(plugin=plugin, name="test", config=None, graphs=(graph,))
    return ir.to_proto(tracing.trace_graph(spec, graph, "float32", opset=23))


def reason(graph: onnx.ModelProto) -> str | None:
    """Return the reason for missing functions from a graph's metadata."""
    return next((entry.value for entry in graph.metadata_props if entry.key == "zoo.without_functions"), None)


def build_on_meta(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model).to("meta").eval()


def with_values(graph: onnx.ModelProto, model: nn.Module) -> bytes:
    """Return the graph with the module's weights inside."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for tensor in graph.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(onnx.numpy_helper.from_array(state[tensor.name], tensor.name))
    graph.ir_version = 10
    data: bytes = graph.SerializeToString()
    return data


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODULES)
def test_outlined_modules_give_the_same_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, run, expected = MODULES[name]
    torch.manual_seed(0)
    model = Model(make(), run).eval()
    graph = traced(model, monkeypatch)
    assert calls(graph) == expected
    assert reason(graph) == REASONS.get(name)
    session = ort.InferenceSession(with_values(graph, model), providers=["CPUExecutionProvider"])
    for batch in (1, 6):
        x = torch.randn(batch, WIDTH)
        with torch.no_grad():
            wanted = model(x.clone()).numpy()
        (found,) = session.run(None, {"x": x.numpy()})
        assert found == pytest.approx(wanted, abs=1e-5)


def test_weights_read_from_outside_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outline cannot predict it; the trace fails and is repeated without functions."""
    torch.manual_seed(0)
    model = Model([Layer() for _ in range(3)], reads_a_weight).eval()
    graph = traced(model, monkeypatch)
    assert calls(graph) == {}
    assert "weight" in str(reason(graph))
    session = ort.InferenceSession(with_values(graph, model), providers=["CPUExecutionProvider"])
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        wanted = model(x).numpy()
    assert session.run(None, {"x": x.numpy()})[0] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_invalid_functions_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is cut out of the graph although later nodes need it."""
    monkeypatch.setattr(_Function, "_without_shared", lambda self, inside, enter, leave: inside)
    torch.manual_seed(0)
    make, run, _ = MODULES["a shared epsilon"]
    model = Model(make(), run).eval()
    graph = traced(model, monkeypatch)
    assert calls(graph) == {}
    assert re.search("not a valid ONNX graph: .*input 'val_[0-9]+' of node", str(reason(graph)))
    session = ort.InferenceSession(with_values(graph, model), providers=["CPUExecutionProvider"])
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert session.run(None, {"x": x.numpy()})[0] == pytest.approx(model(x).numpy(), abs=1e-5)


def test_invalid_graph_is_not_written(exported_build: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even without a comparison, in which ONNX Runtime would refuse it."""
    folder = exported_build("gpt-tiny")

    def broken(data: bytes) -> bytes:
        model = onnx.load_model_from_string(data)
        model.graph.node[-1].input[0] = "nowhere"
        return bytes(model.SerializeToString())

    link = exporting.link_graphs
    monkeypatch.setattr(exporting, "link_graphs", lambda *a, **k: {n: broken(g) for n, g in link(*a, **k).items()})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    zoo("export", folder, "--onnx", "--graph-only").failed(4, "model.onnx is not a valid ONNX graph", "'nowhere'")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
def test_missing_functions_are_reported(exported_build: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, in JSON, in the evidence and in the graph."""
    cut = tracing.cut_functions

    def fail(model: Any, outline: Outline, simplify: Any) -> None:
        if outline.blocks:
            raise RuntimeError("no functions today, says <object at 0x7f001234>")
        cut(model, outline, simplify)

    monkeypatch.setattr(tracing, "cut_functions", fail)
    monkeypatch.setenv("ZOO_CACHE", "off")
    folder = exported_build("bert-tiny", "max_seq_len=2")
    done = zoo("export", folder, "--onnx", "--json")
    why = "no functions today, says <object at 0x...>"
    assert done.err == f"note: {folder}: exported without functions: {why}\n"
    assert done.json["without_functions"] == {"model": why}
    assert json.loads((folder / "parity.json").read_text())["graphs"]["model"]["without_functions"] == why
    assert reason(load(folder / "model.onnx")) == why
    again = zoo("export", folder, "--onnx", "--option", "functions=false", "--graph-only", "--force", "--json")
    assert again.json["without_functions"] == {}


class Many(nn.Module):
    """Sums inputs with different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.scale * torch.stack([value.sum(1) for value in inputs.values()]).sum(0)


@pytest.mark.slow
def test_many_dynamic_dimensions_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tuple(floats(f"x_{number}", "batch", f"length_{number}", WIDTH) for number in range(9))
    graph = traced(Many(), monkeypatch, Graph(inputs=tensors, outputs=(floats("y", "batch", WIDTH),)))
    dims = [[dim.dim_param for dim in value.type.tensor_type.shape.dim][:2] for value in graph.graph.input]
    assert dims == [["batch", f"length_{number}"] for number in range(9)]


@pytest.mark.parametrize(("run", "seen"), [(chain, [0]), (chain_with_shift, [0]), (between, [0, 1, 2, 3, 4, 5])])
def test_tracer_sees_only_necessary_calls(run: Any, seen: list[int]) -> None:
    model = Model([Layer() for _ in range(6)], run).to("meta").eval()
    outline = Outline(model, GRAPH, (torch.zeros(3, WIDTH, device="meta"),))
    assert [number for number, call in enumerate(outline.calls) if call.traced] == seen
    assert len(outline.calls) == 6


def test_graphs_with_functions_are_verified(exported_model: Exported) -> None:
    """The exported file has functions, and is the one that was verified."""
    folder = exported_model("gpt-tiny")
    assert json.loads((folder / "parity.json").read_text())["verified"] is True
    assert load(folder / "model.onnx").functions


@dataclass
class Holder:
    """A structure that functions do not support."""

    value: Tensor


class Opaque(Layer):
    """Takes a custom structure."""

    def forward(self, x: Any, shift: Tensor | None = None) -> Any:
        return Holder(super().forward(x.value))


def test_unsupported_arguments_are_traced_normally(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layers: Any, x: Tensor) -> Tensor:
        held = Holder(x)
        for layer in layers:
            held = layer(held)
        return held.value

    torch.manual_seed(0)
    model = Model([Opaque(), Opaque()], run).eval()
    graph = traced(model, monkeypatch)
    assert calls(graph) == {}
    assert reason(graph) == "layers.0 (Opaque) takes or returns a value of type Holder"
    session = ort.InferenceSession(with_values(graph, model), providers=["CPUExecutionProvider"])
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        wanted = model(x).numpy()
    assert session.run(None, {"x": x.numpy()})[0] == pytest.approx(wanted, abs=1e-5)
