"""Detection of nodes without a CUDA kernel, and absence of such nodes in exported graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, parser

from tests.exported import inlined
from tests.rows import each_row
from zoo import plugins
from zoo.errors import ArtifactError, UsageError
from zoo.registry import registry
from zoo_export.graph import cuda_kernels
from zoo_export.graph.cuda_kernels import nodes_without_kernel, on_sizes
from zoo_export.trace.make import TRACED, Options, unlinked_graphs
from zoo_runtime.onnx_runtime.placement import PlacedNode, left_on_cpu, placed_nodes, unexpected_cpu_nodes
from zoo_runtime.onnx_runtime.providers import loading_problem, open_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Graphs = Callable[..., dict[str, bytes]]

WAYS = {
    "portable": ("float32", Options()),
    "float16": ("float16", Options()),
    "cuda": ("float32", Options(profile="cuda")),
    "cuda in float16": ("float16", Options(profile="cuda")),
    "bfloat16": ("bfloat16", Options()),
    "cuda in bfloat16": ("bfloat16", Options(profile="cuda")),
}
MODELS = [
    ("gpt-tiny", ()),
    ("gpt-tiny", ("activation=silu", "num_kv_heads=2", "tie_embeddings=false")),
    ("bert-tiny", ()),
    ("bert-tiny", ("task=feature-extraction", "pooler=true")),
    ("bert-tiny", ("task=sentence-embedding", "pooling=mean", "normalize=true")),
    ("bert-tiny", ("task=sentence-embedding", "pooling=cls")),
    ("bert-tiny", ("task=fill-mask", "activation=relu")),
    ("bert-tiny", ("task=pretraining", "pooler=true")),
    ("bert-tiny", ("task=text-classification", "pooler=true", "activation=gelu_tanh")),
    ("transformer-tiny", ()),
    ("transformer-tiny", ("positions=learned", "norm_first=true", "activation=gelu")),
]
CASES = [
    pytest.param(*model, way, marks=[] if model == ("bert-tiny", ()) and way == "cuda" else pytest.mark.slow)
    for model in MODELS
    for way in WAYS
]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
COMPUTES = {"Attention", "Gelu", "Gemm", "LayerNormalization", "TensorScatter"}
COUNTS = {"And", "Clip", "CumSum", "LessOrEqual", "Range", "Shape", "Squeeze"}


@pytest.fixture(scope="module")
def made_graphs() -> Iterator[Graphs]:
    """Trace the graphs of a preset with the built-in plugins, once."""
    made: dict[object, dict[str, bytes]] = {}

    def make(name: str, changes: Sequence[str] = (), way: str = "portable") -> dict[str, bytes]:
        key = name, tuple(changes), way
        if key not in made:
            plugins.select(plugins.Selection(third_party=False))
            dtype, options = WAYS[way]
            made[key] = unlinked_graphs(registry().resolve(name, tuple(changes)), dtype, options)
            plugins.select(plugins.Selection())
        return made[key]

    return make


def sketch(body: str, kind: str = "float", opset: int = 24) -> bytes:
    """Build a graph of a few nodes over ``x``, a matrix of one element type."""
    head = f'<ir_version: 10, opset_import: ["": {opset}]> sketch ({kind}[2, 2] x, bool c) => (float[?, ?] y)'
    data: bytes = parser.parse_model(f"{head} {{ {body} }}").SerializeToString()
    return data


def missing(graph: bytes) -> list[str]:
    return [node.operator for node in nodes_without_kernel(graph)]


# Graphs written by zoo.


@pytest.mark.parametrize(("name", "changes", "way"), CASES)
def test_every_node_of_an_exported_graph_has_a_kernel(
    made_graphs: Graphs, name: str, changes: Sequence[str], way: str
) -> None:
    for graph in made_graphs(name, changes, way).values():
        assert nodes_without_kernel(graph) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["portable", "cuda"])
def test_each_kernel_of_a_graph_is_looked_up(made_graphs: Graphs, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """If the kernels of one operator are removed, exactly its floating-point nodes are found."""
    graph = inlined(made_graphs("gpt-tiny", way=way)["model"])
    data = graph.SerializeToString()
    table = cuda_kernels._read_table()
    real = on_sizes(data)
    operators = Counter(node.op_type for node in graph.graph.node if not real[node.name])
    assert set(operators) >= COMPUTES - ({"TensorScatter"} if way == "portable" else set())
    for operator, count in operators.items():
        if operator == "Constant":
            continue
        fewer = {name: kernels for name, kernels in table.kernels.items() if name != operator}
        monkeypatch.setattr(
            cuda_kernels,
            "_read_table",
            lambda fewer=fewer: cuda_kernels._Table(table.first_opset, table.decomposed, fewer),
        )
        assert missing(data) == [operator] * count


@pytest.mark.slow
def test_functions_are_examined(made_graphs: Graphs) -> None:
    graph = onnx.load_model_from_string(made_graphs("gpt-tiny")["model"])
    assert graph.functions
    (gelu,) = [node for node in graph.functions[0].node if node.op_type == "Gelu"]
    gelu.op_type = "Elu"
    assert missing(graph.SerializeToString()) == ["Elu"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("element", "lacking"),
    [
        (TensorProto.DOUBLE, {"Attention"}),
        (TensorProto.FLOAT16, set()),
        (TensorProto.BFLOAT16, set()),
    ],
    ids=["float64", "float16", "bfloat16"],
)
def test_other_element_types_are_found(made_graphs: Graphs, element: int, lacking: set[str]) -> None:
    """No attention in float64: neither provider has a kernel."""
    graph = inlined(made_graphs("gpt-tiny")["model"])
    for value in (*graph.graph.input, *graph.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = element
    for tensor in graph.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.data_type = element
    del graph.graph.value_info[:]
    found = nodes_without_kernel(graph.SerializeToString())
    assert {node.operator for node in found} == lacking
    if lacking:
        assert all(set(node.inputs[:3]) == {"double"} for node in found)


# Small graphs, compared with the placement by onnxruntime 1.31.1.


@each_row(
    ("body", "kind", "lacking"),
    [
        ("y = Relu(x)", "float", []),
        ("a = Relu(x) y = Celu(a)", "float", ["Celu"]),
        ("y = Asin(x)", "float", ["Asin"]),
        ("y = Elu(x)", "float", ["Elu"]),  # has kernels for older versions of the operator
        ("a = Log(x) y = Cast<to=1>(a)", "double", []),
        ("a = Log(x) y = Cast<to=1>(a)", "bfloat16", ["Log"]),
        ("a = ReduceMax(x) y = Cast<to=1>(a)", "bfloat16", ["ReduceMax"]),
        ("a = Mish(x) y = Cast<to=1>(a)", "float16", []),
        ("a = Det(x) y = Relu(x)", "float", ["Det"]),
        ("a = ArgMax(x) y = Cast<to=1>(a)", "bfloat16", ["ArgMax"]),  # writes whole numbers, but reads real ones
        ("a = Shape(x) b = BitwiseNot(a) y = Cast<to=1>(b)", "float", []),
        ("y = If(c) <then_branch = t () => (float[A, B] p) { p = Celu(x) }, "
         "else_branch = e () => (float[A, B] q) { q = Relu(x) }>", "float", ["Celu"]),
    ],
)  # fmt: skip
def test_nodes_without_kernels_are_found(body: str, kind: str, lacking: list[str]) -> None:
    assert missing(sketch(body, kind)) == lacking


def test_operator_versions_beyond_the_kernels_are_found() -> None:
    """Kernels of Range are listed up to opset 26, the runtime's latest; that of Einsum is for one version."""
    if onnx.defs.onnx_opset_version() < 28:
        pytest.skip("this onnx has no later version of them")
    steps = "a = Constant<value = float {1}>() b = Range(a, a, a) y = Relu(x)"
    assert [missing(sketch(steps, opset=opset)) for opset in (24, 26, 27)] == [[], [], ["Range"]]
    product = 'y = Einsum<equation="ij,jk->ik">(x, x)'
    assert [missing(sketch(product, opset=opset)) for opset in (24, 27, 28)] == [[], [], ["Einsum"]]


def test_operator_newer_than_the_opset_has_no_kernel() -> None:
    step = "b = Shape(x) y = TensorScatter(x, x, b)"
    assert [missing(sketch(step, opset=opset)) for opset in (23, 24)] == [["TensorScatter"], []]


def test_custom_operators_are_reported() -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 24, "com.example": 1]> sketch (float[2, 2] x) => (float[2, 2] y) '
        "{ a = com.example.Gelu(x) y = Relu(a) }"
    )
    model = parser.parse_model(text)
    model.graph.node[0].name = "middle"
    (node,) = nodes_without_kernel(model.SerializeToString())
    assert (node.name, node.domain, node.operator) == ("middle", "com.example", "Gelu")
    assert (node.inputs, node.outputs) == (("float",), ("?",))


def test_unsupported_opsets_and_files_are_rejected() -> None:
    with pytest.raises(UsageError, match="kernels of opset 20 are not known"):
        nodes_without_kernel(sketch("y = Relu(x)", opset=20))
    with pytest.raises(ArtifactError, match="not an ONNX graph"):
        nodes_without_kernel(b"garbage")


def test_kernel_table_matches_onnx_schemas() -> None:
    """Each kernel is selected by some opset, and its type parameters exist in that version."""
    table = cuda_kernels._read_table()
    assert table.first_opset == TRACED
    for operator, kernels in table.kernels.items():
        selected = []
        for opset in range(TRACED, 27):
            if opset > onnx.defs.onnx_opset_version():
                break
            try:
                schema = onnx.defs.get_schema(operator, opset)
            except onnx.defs.SchemaError:
                continue  # TensorScatter is of opset 24
            formals = (*schema.inputs, *schema.outputs)
            for kernel in kernels:
                if kernel.runs(schema.since_version, {}):
                    selected.append(kernel)
                    assert set(kernel.types) <= {name for item in formals for name in (item.type_str, item.name)}
        if onnx.defs.onnx_opset_version() >= 26:
            assert all(kernel in selected for kernel in kernels), operator


# Placement by sessions.


@pytest.fixture
def cpu_session(exported_model: Exported) -> tuple[bytes, list[PlacedNode], Any]:
    """Return a graph without functions, the placement of its nodes on the CPU, and the session."""
    folder = exported_model("gpt-tiny")
    graph = inlined((folder / "model.onnx").read_bytes()).SerializeToString()
    session = open_session(graph, weights=folder, placements=True, optimize=False)
    return graph, placed_nodes(session), session


def test_all_floating_point_nodes_are_unexpected_on_the_cpu(cpu_session: tuple[bytes, list[PlacedNode], Any]) -> None:
    graph, _, session = cpu_session
    found = unexpected_cpu_nodes(session, on_sizes(graph))
    there = Counter(node.op_type for node in onnx.load_model_from_string(graph).graph.node)
    counts = Counter(node.operator for node in found)
    for operator in COMPUTES & set(there):
        assert counts[operator] == there[operator]
    assert not COUNTS & set(counts)
    assert 0 < counts["Reshape"] < there["Reshape"]  # of activations, and of sizes
    guessed = Counter(node.operator for node in unexpected_cpu_nodes(session))
    assert all(guessed[operator] == there[operator] for operator in COMPUTES & set(there))
    assert not {"Reshape", "Shape"} & set(guessed)  # the operator does not tell


def test_single_fallback_node_is_found(cpu_session: tuple[bytes, list[PlacedNode], Any]) -> None:
    """Starting from shape arithmetic on the CPU and the rest on CUDA, move one node after the other to the CPU."""
    graph, nodes, _ = cpu_session
    sizes = on_sizes(graph)
    placed = [PlacedNode(CPU if sizes[node.name] else CUDA, node.operator, node.name) for node in nodes]
    assert {node.provider for node in placed} == {CPU, CUDA}
    assert left_on_cpu(placed, sizes) == []
    for number, node in enumerate(placed):
        if node.provider == CUDA:
            fallen = node._replace(provider=CPU)
            assert left_on_cpu([*placed[:number], fallen, *placed[number + 1 :]], sizes) == [fallen]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
@pytest.mark.parametrize("optimize", [True, False])
def test_cuda_session_runs_on_cuda(exported_model: Exported, name: str, optimize: bool) -> None:
    if problem := loading_problem("cuda"):
        pytest.skip(problem)
    folder = exported_model(name)
    for path in folder.glob("*.onnx"):
        graph = inlined(path.read_bytes()).SerializeToString()
        options: dict[str, Any] = {"provider": "cuda", "placements": True, "optimize": optimize}
        session = open_session(graph, weights=folder, **options)
        assert CUDA in {node.provider for node in placed_nodes(session)}
        assert unexpected_cpu_nodes(session, on_sizes(graph)) == []
        assert unexpected_cpu_nodes(open_session(path, **options)) == []


# The command.

PLUGIN = """
import zoo
ZOO_API = 1
@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="bent", tasks=("feature-extraction",), config="{module}_config:BentConfig",
                             model="{module}_model:Bent", reference="none")]
"""
CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class BentConfig(zoo.Config):
    task: Literal["feature-extraction"] = "feature-extraction"
    max_seq_len: int = 16
    def graphs(self):
        return (zoo.Graph(inputs=(zoo.token_ids("input_ids", 40),),
                          outputs=(zoo.floats("features", "batch", "sequence", 8),)),)
"""
MODEL = """
import torch.nn.functional as F
from torch import nn

class Bent(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.embedding, self.linear = config, nn.Embedding(40, 8), nn.Linear(8, 8)

    def forward(self, input_ids):
        return {"features": F.elu(self.linear(F.elu(self.embedding(input_ids))))}
"""


@pytest.mark.slow
def test_cuda_export_reports_missing_kernels(install: Callable[..., Path], zoo: Zoo) -> None:
    install("bent", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL})
    Path("zoo.toml").write_text('schema = 1\n[models.bent]\narch = "bent"\n')
    said = zoo("export", "bent", "--onnx", "--graph-only", "--profile", "cuda")
    assert said.status == 0
    not_verified, on_cpu = said.warnings
    assert "NOT VERIFIED" in not_verified
    assert on_cpu == "warning: bent: model.cuda.onnx will run partly on the CPU: CUDA has no kernel for 2 x Elu"
    for profile in ("cpu", "portable"):
        said = zoo("export", "bent", "--onnx", "--graph-only", "--profile", profile, "-o", profile)
        assert len(said.warnings) == 1
    assert zoo("build", "bent", "--dtype", "bfloat16", "-o", "half").status == 0
    said = zoo("export", "half", "--onnx", "--graph-only")  # no other provider is available
    assert said.warnings[1:] == ["warning: half: model.onnx cannot run: CUDA has no kernel for 2 x Elu"]
    said = zoo("export", "gpt-tiny", "--onnx", "--graph-only", "--profile", "cuda")
    assert len(said.warnings) == 1
