"""A module built from blocks is saved without a plugin, and other processes load, call and export it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zoo as library
from tests.conftest import ROOT, Result
from tests.modules import student
from tests.modules.student import Configured, Outer, Student, stacked
from zoo.errors import UsageError
from zoo.nn import MultiHeadAttention

Zoo = Callable[..., Result]

HERE = student.__name__
STUDENT, STACKED = f"{HERE}:Student", f"{HERE}:stacked"
ARGUMENTS = {"vocab_size": 30, "num_heads": 2}
SOURCE, TARGET = torch.tensor([[5, 3, 9, 1], [7, 2, 0, 4]]), torch.tensor([[1, 8], [2, 2]])
GRAPH = library.Graph(
    inputs=(library.token_ids("source", 30, length="source_length"), library.token_ids("target", 30)),
    outputs=(library.floats("logits", "batch", "sequence", 30),),
)


@pytest.fixture
def trained() -> Student:
    """A module with weights that no seed gives."""
    torch.manual_seed(1)
    module = Student(30, num_heads=2)
    nn.init.normal_(module.embedding.weight)
    return module


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run a program in another process, with the student's module in its folder under the name ``course``."""
    shutil.copy(student.__file__, tmp_path / "course.py")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "export", ROOT / "plugins", tmp_path)))

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    yield run
    sys.modules.pop("course", None)


@pytest.mark.slow
def test_another_process_loads_and_calls_it(trained: Student, elsewhere: Any, tmp_path: Path) -> None:
    program = (
        "import torch, zoo, course\n"
        "torch.manual_seed(1)\n"
        "module = course.Student(30, num_heads=2)\n"
        "torch.nn.init.normal_(module.embedding.weight)\n"
        "print(zoo.save(module, 'mine', arguments={'vocab_size': 30, 'num_heads': 2}))\n"
    )
    done = elsewhere("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")
    stored = load_file(tmp_path / "mine" / "model.safetensors")
    assert stored.keys() == {*trained.state_dict(), "scale"} - {"head.weight"}
    assert torch.equal(stored["embedding.weight"], trained.embedding.weight)
    program = (
        "import sys, torch, zoo\n"
        "with zoo.allow_factories('course:Student'):\n"
        "    model = zoo.load('mine')\n"
        "assert type(model.original).__module__ == 'course' and not model.training\n"
        f"ids = torch.tensor({SOURCE.tolist()}), torch.tensor({TARGET.tolist()})\n"
        "assert torch.equal(model(*ids), model.original(*ids)) and model.vocab_size == 30\n"
        "assert model.head.weight is model.embedding.weight\n"
        "print(model(source=ids[0], target=ids[1])[..., 0].tolist(), model.likeliest(*ids).tolist())\n"
        "zoo.save(model, 'again')\n"
    )
    done = elsewhere("-c", program)
    assert done.returncode == 0, done.stderr
    expected = trained.eval()(SOURCE, TARGET)
    assert done.stdout == f"{expected[..., 0].tolist()} {expected[:, -1].argmax(-1).tolist()}\n"
    one, again = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("mine", "again"))
    assert one == again
    done = elsewhere("-c", "import zoo; zoo.load('mine')")
    assert (
        'mine was made by course:Student, whose code runs on this machine: use zoo.allow_factories("course:'
        in (done.stderr.splitlines()[-1])
    )


@pytest.mark.slow
def test_another_process_exports_and_verifies_it(trained: Student, elsewhere: Any, tmp_path: Path) -> None:
    """Inferred graphs are those of ``zoo export``. A course's program has the same weights as the test's."""
    program = (
        "import torch, zoo, course\n"
        "from zoo_export import infer_graph\n"
        "torch.manual_seed(1)\n"
        "module = course.Student(30, num_heads=2)\n"
        "torch.nn.init.normal_(module.embedding.weight)\n"
        f"example = {{'source': torch.tensor({SOURCE.tolist()}), 'target': torch.tensor({TARGET.tolist()})}}\n"
        "dims = {'source': ('batch', 'source_length'), 'target': ('batch', 'sequence')}\n"
        "graph = infer_graph(module, example, dims, outputs=('logits',))\n"
        "zoo.save(module, 'mine', arguments={'vocab_size': 30, 'num_heads': 2}, graphs=graph)\n"
    )
    assert elsewhere("-c", program).returncode == 0
    command = ("-c", "import sys; from zoo.cli import main; sys.exit(main(sys.argv[1:]))")
    refused = elsewhere(*command, "export", "mine", "--onnx")
    assert (refused.returncode, "add --factory course:Student" in refused.stderr) == (2, True)
    for words in (("export", "mine", "--onnx"), ("verify", "mine")):
        done = elsewhere(*command, *words, "--factory", "course:Student")
        assert "mine: model.onnx verified on cpu" in done.stdout, done.stderr
    row = json.dumps({"source": SOURCE[0].tolist(), "target": TARGET[0].tolist()})
    done = elsewhere(*command, "run", "mine", row, "--json")
    found = json.loads(done.stdout)
    logits = torch.tensor(found["results"][0]["logits"] if "results" in found else found["logits"])
    torch.testing.assert_close(logits, trained.eval()(SOURCE[:1], TARGET[:1])[0], rtol=1e-4, atol=1e-5)


def test_what_the_directory_says(trained: Student, zoo: Zoo) -> None:
    """The code is not saved, and a graph is required only where one is used."""
    library.save(trained, "mine", arguments=ARGUMENTS, tokenizer="bytes")
    assert sorted(path.name for path in Path("mine").iterdir()) == [
        "README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    config = json.loads(Path("mine/config.json").read_text())["config"]
    assert (config["factory"], config["arguments"], config["declared"]) == (STUDENT, ARGUMENTS, [])
    assert f"The module of {STUDENT}" in Path("mine/README.md").read_text()
    assert STUDENT in zoo("show", "mine").out
    zoo("export", "mine", "--onnx", "--factory", STUDENT).failed(2, "declares no graph", "zoo.save(..., graphs=")
    zoo("run", "mine", "{}").failed(3)


def test_declared_graphs_name_the_results(trained: Student) -> None:
    library.save(trained, "mine", arguments=ARGUMENTS, graphs=GRAPH)
    with library.allow_factories(STUDENT):
        model = library.load("mine")
    expected = trained.eval()(SOURCE, TARGET)
    for result in (model(SOURCE, TARGET), model(SOURCE, target=TARGET), model(source=SOURCE, target=TARGET)):
        assert torch.equal(result["logits"], expected)


def test_other_factories(zoo: Zoo) -> None:
    module = stacked(3)
    library.save(module, "stack", factory=STACKED, arguments={"depth": 3})
    library.save(Outer.Inner().half(), "inner")
    library.save(MultiHeadAttention(8, 2), "block", arguments={"hidden_size": 8, "num_heads": 2})
    with library.allow_factories(STACKED, f"{HERE}:Outer.Inner"):
        x = torch.randn(2, 4)
        assert torch.equal(library.load("stack")(x), module(x))
        assert library.load("inner").layer.weight.dtype == torch.float16


def changed(name: str, value: Any) -> Configured:
    module = Configured()
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner) if owner == "layer" else vars(module)[owner] if owner else module, leaf, value)
    return module


class Local(nn.Module):
    def __init__(self, *, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)


Local.__module__ = "__main__"


def inside() -> nn.Module:
    class Hidden(nn.Linear):
        pass

    return Hidden(2, 2)


MADE: dict[str, Any] = {"factory": f"{HERE}:made"}

BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "missing argument": (lambda: Student(30), {}, "not given: vocab_size: zoo.save: add arguments={'vocab_size': 30}"),
    "missing argument of several": (
        lambda: MultiHeadAttention(8, 2), {"arguments": {"bias": False}},
        "add arguments={'hidden_size': ..., 'num_heads': 2, 'bias': False}",
    ),
    "argument that changes no shape": (
        lambda: Student(30, num_heads=2), {"arguments": {"vocab_size": 30}},
        "self_attention.num_heads is 2, but is built as 4",
    ),
    "dropout": (
        lambda: Student(30, dropout=0.3), {"arguments": {"vocab_size": 30}}, "dropout.p is 0.3, but is built as 0.1",
    ),
    "shape": (
        lambda: Student(30), {"arguments": {"vocab_size": 31}}, "vocab_size is 30, but is built as 31",
    ),
    "deeper": (lambda: stacked(2), {"factory": STACKED, "arguments": {"depth": 1}}, "it alone has the submodule 1"),
    "flatter": (lambda: stacked(1), {"factory": STACKED, "arguments": {"depth": 2}}, "it has no submodule 1"),
    "object": (lambda: changed("settings.width", 5), {}, "settings is "),
    "list": (lambda: changed("sizes", [4, 3]), {}, "sizes is [4, 3], but is built as [4, 2]"),
    "function": (lambda: changed("activation", torch.tanh), {}, "activation is "),
    "captured value": (lambda: changed("gate", student.scaled(3.0)), {}, "gate is "),
    "class": (lambda: changed("layer", nn.Identity()), {"factory": f"{HERE}:Configured"}, "all parameters must have"),
    "added": (lambda: changed("step", 3), {}, "step was set after it was made"),
    "replaced": (lambda: changed("layer", nn.Linear(4, 4, bias=False)), {}, "it has no tensor layer.bias"),
    "modules in a list": (lambda: added("parts", [nn.Linear(2, 2)]), MADE, "holds a module that torch does not know"),
    "tensors in a dictionary": (lambda: added("parts", {"a": torch.ones(2)}), MADE, "a tensor that torch does not"),
    "order": (lambda: reordered(), {"factory": f"{HERE}:ordered"}, "is in another place in the order"),
    "dtype": (lambda: added("parts", torch.bfloat16), MADE, "parts is torch.bfloat16, but is built as None"),
    "deep": (lambda: added("parts", nested(40, 2)), {"factory": f"{HERE}:nest"}, "parts is "),
    "constant of a function": (lambda: added("parts", lambda x: x * 2), {"factory": f"{HERE}:doubler"}, "parts is "),
    "name of the wrapper": (lambda: named("config"), MADE, "a loaded model uses the name config itself"),
    "lazy": (lambda: Lazy(), {"factory": f"{HERE}:Configured"}, "has no shape yet: zoo.save: call the module once"),
    "meta": (lambda: Configured().to("meta"), {}, "is on the meta device"),
    "half a character": (Configured, {"arguments": {"width": "\ud800"}}, "is no Unicode text"),
    "hook": (lambda: hooked(after=True), {}, "the forward hooks of layer are others (1, but 0 as built)"),
    "hook before": (lambda: hooked(after=False), {}, "the forward pre-hooks of layer are others (1, but 0"),
    "untied": (
        lambda: untied(), {"arguments": {"vocab_size": 30}},
        "head.weight is the tensor head.weight, but is built as the tensor embedding.weight",
    ),
    "main": (lambda: Local(size=2), {"arguments": {"size": 2}}, "move the class to a module, such as my_module.py"),
    "inside a function": (inside, {}, "a class inside a function"),
    "container": (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "add factory='my_module:my_function'"),
    "unknown factory": (Configured, {"factory": f"{HERE}:none"}, "has no attribute 'none'"),
    "bad factory": (Configured, {"factory": "none"}, "write module:attribute"),
    "unknown argument": (Configured, {"arguments": {"widht": 4}}, "the arguments do not fit"),
    "tensor as argument": (Configured, {"arguments": {"width": torch.ones(1)}}, "cannot be written to config.json"),
    "no graph": (Configured, {"graphs": ["model"]}, "must be a zoo.Graph"),
    "compiled": (lambda: torch.compile(Configured()), {}, "save the original: model._orig_mod"),
    "compiled model of zoo": (
        lambda: torch.compile(library.create_model("gpt-tiny")), {}, "save the original: model._orig_mod",
    ),
    "no module": (lambda: Configured, {}, "a value of type type is no torch.nn.Module"),
    "model of zoo": (lambda: library.create_model("gpt-tiny"), {"arguments": {}}, "are for modules of your own code"),
    "two dtypes": (lambda: two_dtypes(), {}, "all parameters must have one of"),
}  # fmt: skip


def added(name: str, value: Any) -> nn.Module:
    module = student.made()
    setattr(module, name, value)
    return module


def named(name: str) -> nn.Module:
    module = student.made()
    module.add_module(name, nn.Linear(2, 2))
    return module


def reordered() -> nn.Module:
    module = student.ordered()
    assert isinstance(module, nn.ModuleDict)
    module["a"] = module.pop("a")
    return module


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)


def nested(depth: int, value: int) -> dict[str, Any]:
    return student.nested(depth, value)


def hooked(*, after: bool) -> Configured:
    module = Configured()
    if after:
        module.layer.register_forward_hook(lambda layer, given, result: result * 5)
    else:
        module.layer.register_forward_pre_hook(lambda layer, given: (given[0] * 5,))
    return module


def untied() -> Student:
    module = Student(30)
    module.head.weight = nn.Parameter(module.embedding.weight.detach().clone())
    return module


def two_dtypes() -> Outer.Inner:
    module = Outer.Inner()
    module.layer.bias.data = module.layer.bias.data.half()
    return module


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_saved(case: str, snapshot: Callable[[], Any]) -> None:
    """One line says what is missing, and nothing is written."""
    make, options, message = BAD[case]
    with pytest.raises(UsageError) as caught:
        library.save(make(), "mine", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot() == {}


def test_an_existing_directory_is_kept(trained: Student, snapshot: Callable[[], Any]) -> None:
    library.save(trained, "mine", arguments=ARGUMENTS)
    before = snapshot()
    with pytest.raises(UsageError, match="exists"):
        library.save(trained, "mine", arguments=ARGUMENTS)
    with pytest.raises(UsageError, match="but is built as"):
        library.save(trained, "mine", arguments={"vocab_size": 30}, force=True)
    assert snapshot() == before
    library.save(trained, "mine", arguments=ARGUMENTS, force=True, name="other")
    assert json.loads(Path("mine/config.json").read_text())["name"] == "other"


def test_modules_of_many_kinds_are_saved(tmp_path: Path) -> None:
    """Recurrent layers keep lists and weak references of their weights; parametrizations make classes."""
    torch.manual_seed(2)
    module = student.recurrent()
    library.save(module, "mine", factory=f"{HERE}:recurrent")
    with library.allow_factories(f"{HERE}:recurrent"):
        loaded = library.load("mine")
    given = torch.randn(2, 5, 4)
    assert torch.equal(loaded(given), module.eval()(given))


def test_a_loaded_module_is_compared_again(snapshot: Callable[[], Any]) -> None:
    library.save(Configured(), "mine")
    with library.allow_factories(f"{HERE}:Configured"):
        loaded = library.load("mine")
    loaded.sizes = [1, 1]
    assert loaded.original.sizes == [1, 1]
    before = snapshot()
    with pytest.raises(UsageError, match=r"sizes is \[1, 1\], but is built as"):
        library.save(loaded, "mine", force=True)
    assert snapshot() == before
