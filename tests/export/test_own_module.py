"""A user's own module: what is exported, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo as library
from tests.conftest import Result
from tests.export import own_modules
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, ParityError, UsageError, ZooError
from zoo_export import export_module
from zoo_export.trace.key import key
from zoo_runtime import load_session

Zoo = Callable[..., Result]

HERE = own_modules.__name__
RANKER = f"{HERE}:make_ranker"
IDS = torch.tensor([[5, 3, 9, 1], [7, 2, 0, 4]])
EXAMPLE = {"input_ids": IDS, "mask": torch.ones_like(IDS)}
DIMS = {"input_ids": ("batch", "sequence"), "mask": {0: "batch", 1: "sequence"}}
CALL: dict[str, Any] = {"example": EXAMPLE, "dims": DIMS}
GRAPH = library.Graph(
    inputs=(library.token_ids("input_ids", 40), library.mask("mask")), outputs=(library.floats("score", "batch"),)
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ranker, exported from its factory. Tests that change it must copy it."""
    folder = tmp_path_factory.mktemp("own") / "ranker"
    export_module(RANKER, {"hidden": 8}, path=folder, **CALL)
    return folder


@pytest.fixture
def ranker(exported: Path, tmp_path: Path) -> Path:
    """A copy of the exported ranker."""
    return Path(shutil.copytree(exported, tmp_path / "ranker"))


# What is written.


def test_the_result_is_a_model_directory(exported: Path) -> None:
    """Weights are stored once, under the names of the module's own state dict, and the graph points at them."""
    assert sorted(path.name for path in exported.iterdir()) == [
        "README.md", "config.json", "manifest.json", "model.onnx", "model.safetensors", "parity.json",
        "recorded.safetensors.gz",
    ]  # fmt: skip
    torch.manual_seed(0)
    module = own_modules.make_ranker(8).eval()
    stored = load_file(exported / "model.safetensors")
    assert stored.keys() == {*module.state_dict(), "frequencies"}  # a buffer that is computed at construction
    for name, tensor in module.state_dict().items():
        assert torch.equal(stored[name], tensor)
    assert (exported / "model.onnx").stat().st_size < 8_000
    evidence = json.loads((exported / "parity.json").read_text())
    assert evidence["verified"]
    assert evidence["not_perturbed"] == ["frequencies"]
    assert evidence["laws"]["padding-invariance"] == evidence["laws"]["batch-invariance"] == "passed"
    assert evidence["answers"]["tensors"]["compared"] is not False

    with load_session(exported) as session:
        feeds = {"input_ids": IDS.numpy(), "mask": np.array([[1, 1, 0, 0], [1, 1, 1, 1]])}
        outputs = session.execute(session.graphs[0], feeds)
    with torch.no_grad():
        expected = module(IDS, torch.from_numpy(feeds["mask"]))
    for name, tensor in expected.items():
        np.testing.assert_allclose(outputs[name], tensor.numpy(), rtol=1e-5, atol=1e-6)


def test_commands_that_need_no_module(ranker: Path, zoo: Zoo) -> None:
    assert zoo("show", ranker).out.count("verified") == 1
    assert "score" in zoo("run", ranker, '{"input_ids": [5, 3]}').out
    assert zoo("publish", ranker, "alone", "--layout", "standalone").status == 0
    assert zoo("publish", ranker, "hub", "--layout", "hub").status == 2


def test_object(exported: Path, zoo: Zoo) -> None:
    """An object keeps its weights and its mode; its comparison can only be replayed."""
    torch.manual_seed(5)
    module = own_modules.Ranker()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    export_module(module, path="ranker", **CALL)
    assert module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    stored = load_file("ranker/model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())
    error = zoo("verify", "ranker").failed(2, "ranker was exported from a module object", "zoo verify --recorded")
    assert error == zoo("verify", "ranker", "--factory", f"{HERE}:Ranker").err
    assert "A module of the class Ranker, of which no code is recorded" in Path("ranker/README.md").read_text()
    assert zoo("show", "ranker").status == zoo("run", "ranker", '{"input_ids": [5, 3]}').status == 0
    with pytest.raises(UsageError, match="takes no arguments"):
        export_module(module, {"hidden": 8}, path="other", **CALL)


@pytest.mark.parametrize("name", ["Positional", "Named"])
def test_arguments_and_results(name: str) -> None:
    """Inputs are passed by name, or in order to a module of other names; results may be of several classes."""
    export_module(f"{HERE}:{name}", path="m", **CALL)
    declared = json.loads(Path("m/config.json").read_text())["config"]["declared"]
    outputs = {item["name"]: item["dims"] for item in declared[0]["outputs"]}
    states = {"score": ["batch"], "states": ["batch", "sequence", 8]}
    assert outputs == (states if name == "Named" else {"output": ["batch"]})


@pytest.mark.parametrize("name", ["knows_by_closure", "knows_by_key"])
def test_module_of_which_a_copy_computes_something_else_is_refused(name: str) -> None:
    """Exports are traced from a copy and compared with a copy, in which no module is the one that the code knows."""
    call: dict[str, Any] = {"example": {"vectors": torch.randn(2, 8)}, "dims": {"vectors": ("batch", 8)}}
    for module in (f"{HERE}:{name}", getattr(own_modules, name)()):
        with pytest.raises(UsageError, match="a copy of the _Layers computes something else than the module itself"):
            export_module(module, path="m", **call)
        assert not Path("m").exists()


def test_truth_values_as_outputs() -> None:
    export_module(f"{HERE}:Flagging", path="m", **CALL)
    (answer,) = load_session("m").run([{"input_ids": [5, 3]}])
    assert bool(answer["relevant"]) == (answer["score"] > 0)


def test_declared_graphs_and_force(exported: Path, snapshot: Callable[[], Any]) -> None:
    shutil.copytree(exported, "m")
    with pytest.raises(UsageError, match="exists"):
        export_module(RANKER, {"hidden": 8}, path="m", graphs=GRAPH)
    export_module(RANKER, {"hidden": 8}, path="m", graphs=GRAPH, force=True)
    before = snapshot()
    assert json.loads(Path("m/config.json").read_text())["config"]["declared"][0]["outputs"] == [
        {"name": "score", "dims": ["batch"]}
    ]
    with pytest.raises(ParityError):
        export_module(f"{HERE}:IgnoresMask", path="m", graphs=GRAPH, force=True)
    assert snapshot() == before


def test_weights(exported: Path) -> None:
    """A checkpoint of the module, as a file or as a state dict."""
    torch.manual_seed(3)
    trained = own_modules.Ranker()
    save_file(trained.state_dict(), "trained.safetensors")
    export_module(RANKER, {"hidden": 8}, path="m", weights="trained.safetensors", graphs=GRAPH)
    stored = load_file("m/model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in trained.state_dict().items())
    trained.head.bias.data[0] = torch.nan
    with pytest.raises(ParityError, match="not finite"):
        export_module(RANKER, {"hidden": 8}, path="other", weights=trained.state_dict(), graphs=GRAPH)
    assert json.loads(Path("m/config.json").read_text())["origin"]["source"] == "trained.safetensors"


def test_several_graphs() -> None:
    """Methods of the module by name, each with its own inputs and outputs."""
    states = library.floats("states", "batch", "sequence", 8)
    encoder = library.Graph(name="encoder", method="encode", inputs=(GRAPH.inputs[0],), outputs=(states,))
    scorer = library.Graph(
        name="scorer", method="rate", inputs=(states,), outputs=(library.floats("score", "batch"),), causal=None
    )
    export_module(f"{HERE}:TwoSteps", path="m", graphs=(encoder, scorer))
    assert Path("m/encoder.onnx").exists()
    with load_session("m") as session:
        outputs: dict[str, Any] = {"input_ids": IDS.numpy()}
        for graph in session.graphs:
            outputs |= session.execute(graph, outputs)
    torch.manual_seed(0)
    module = own_modules.TwoSteps().eval()
    with torch.no_grad():
        expected = module.rate(module.encode(IDS))
    np.testing.assert_allclose(outputs["score"], expected.numpy(), rtol=1e-5, atol=1e-6)


# Wrong modules.

WRONG = {
    "IgnoresMask": "law padding-invariance",
    "BakesLength": "declared free",
    "Branches": "law batch-invariance",
    "Counts": "law eval-deterministic",
    "MixesRows": "law batch-invariance",
    "LooksAhead": "law causality",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_modules(name: str, snapshot: Callable[[], Any]) -> None:
    graph = GRAPH
    if name == "LooksAhead":
        states = library.floats("states", "batch", "sequence", 8)
        graph = library.Graph(inputs=(GRAPH.inputs[0],), outputs=(states,), causal=True)
    with pytest.raises(ParityError, match=WRONG[name]):
        export_module(f"{HERE}:{name}", path="m", graphs=graph)
    assert snapshot() == {}


def test_a_mask_that_is_declared_as_integers_is_not_checked() -> None:
    """As the guide says: no law is about integers."""
    inputs = (GRAPH.inputs[0], library.token_ids("mask", 2))
    export_module(f"{HERE}:IgnoresMask", path="m", graphs=library.Graph(inputs=inputs, outputs=GRAPH.outputs))
    laws = json.loads(Path("m/parity.json").read_text())["laws"]
    assert laws["padding-invariance"].startswith("does not apply")


# Bad inputs. Each is one line, and nothing is written.

_MODULE = own_modules.Ranker
_TIED, _NAMES = own_modules.Tied().state_dict(), ("mlp.0.weight", "again.weight")
BAD: dict[str, tuple[type[ZooError], str, dict[str, Any]]] = {
    "unknown module": (UsageError, "No module named 'no_such'", {"module": "no_such:make"}),
    "unknown attribute": (UsageError, "no attribute 'make'", {"module": f"{HERE}:make"}),
    "no reference": (UsageError, "write module:attribute", {"module": "os.system"}),
    "main": (UsageError, "no other process finds __main__", {"module": "__main__:make"}),
    "no module": (UsageError, "neither 'module:attribute' nor a torch.nn.Module", {"module": _MODULE}),
    "not callable": (UsageError, "no function or class, but of the type int", {"module": f"{HERE}:number"}),
    "fails": (UsageError, r"fails \(RuntimeError: no such thing\)", {"module": f"{HERE}:fails", "arguments": None}),
    "leaves": (UsageError, r"fails \(SystemExit: 0\)", {"module": f"{HERE}:leaves", "arguments": None}),
    "no result": (
        UsageError,
        "returns a value of type NoneType",
        {"module": f"{HERE}:returns_nothing", "arguments": None},
    ),
    "unknown argument": (UsageError, "the arguments do not fit", {"arguments": {"hiden": 8}}),
    "tensor as argument": (UsageError, "cannot be written to config.json", {"arguments": {"hidden": torch.ones(1)}}),
    "infinite argument": (UsageError, "cannot be written to config.json", {"arguments": {"hidden": float("inf")}}),
    "key that is no text": (UsageError, "the key 3 is not a string", {"arguments": {"hidden": {3: 4}}}),
    "no graphs": (UsageError, "give either graphs, or example and dims", {"graphs": None}),
    "both": (UsageError, "give either graphs, or example and dims", CALL),
    "dims alone": (UsageError, "give either graphs, or example and dims", {"dims": DIMS}),
    "other graphs": (UsageError, "must be a zoo.Graph", {"graphs": ["model"]}),
    "two outputs of one name": (UsageError, "two tensors", {"graphs": replace(GRAPH, outputs=GRAPH.outputs * 2)}),
    "a path as name": (UsageError, "bad name of graph", {"graphs": replace(GRAPH, name="../model")}),
    "no rows": (
        UsageError,
        "the first dimension of score",
        {"graphs": replace(GRAPH, outputs=(library.floats("score", 3),))},
    ),
    "no upper limit": (
        UsageError,
        "needs an upper limit",
        {"graphs": replace(GRAPH, inputs=(library.TensorSpec(name="input_ids", dims=("batch",), dtype="int64"),))},
    ),
    "unknown output": (
        ParityError,
        "returns no rating, but score, states",
        {"graphs": replace(GRAPH, outputs=(library.floats("rating", "batch"),))},
    ),
    "unknown input": (
        ParityError,
        "masks is no parameter",
        {"graphs": replace(GRAPH, inputs=(GRAPH.inputs[0], library.mask("masks")))},
    ),
    "tensor as attribute": (UsageError, "no parameter or buffer", {"module": f"{HERE}:HoldsTensor", "arguments": {}}),
    "modules in a list": (
        UsageError,
        r"modules in parts \(a list\) are not registered: HoldsList: use nn.ModuleList",
        {"module": f"{HERE}:HoldsList", "arguments": {}},
    ),
    "other state": (UsageError, "get_extra_state", {"module": f"{HERE}:SavesMore", "arguments": {}}),
    "no file": (ArtifactError, "cannot read", {"weights": "none.safetensors"}),
    "pickle": (UsageError, "no safetensors file", {"weights": "model.pt"}),
    "missing weights": (UsageError, "missing embedding.weight", {"weights": {}}),
    "unexpected weights": (UsageError, "unexpected head", {"weights": {**_MODULE().state_dict(), "head": IDS}}),
    "other shapes": (UsageError, r"float32 \(40, 9\), not float32", {"weights": _MODULE(9).state_dict()}),
    "NaN of two names": (
        UsageError,
        r"the names mlp.0.weight, again.weight of one tensor have NaN\)",
        {"module": f"{HERE}:Tied", "weights": {**_TIED, **{name: torch.full((8, 8), torch.nan) for name in _NAMES}}},
    ),
    "two values of two names": (
        UsageError,
        r"the names mlp.0.weight, again.weight of one tensor have different values\)",
        {"module": f"{HERE}:Tied", "weights": {**_TIED, "again.weight": torch.ones(8, 8)}},
    ),
    "other dtype": (UsageError, "is float16", {"weights": _MODULE().half().state_dict()}),
    "float64": (UsageError, "all parameters must have one of", {"module": _MODULE().double(), "arguments": None}),
    "seed": (UsageError, "must be an integer", {"seed": -1}),
    "place": (UsageError, "is or contains the current directory", {"path": ""}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs(case: str, snapshot: Callable[[], Any]) -> None:
    kind, message, changes = BAD[case]
    arguments = {"module": RANKER, "arguments": {"hidden": 8}, "path": "m", "graphs": GRAPH} | changes
    with pytest.raises(kind, match=message) as caught:
        export_module(**arguments)
    assert "\n" not in str(caught.value)
    assert snapshot() == {}


def test_nothing_is_cached(exported: Path) -> None:
    """A user's own code may depend on anything, so no key covers it."""
    assert key(ModelDirectory.open(exported).spec, "model", "float32", {}) == ""
