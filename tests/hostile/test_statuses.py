"""Bad artefacts and values have their documented statuses: no internal errors, and no blame for built-in plugins."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import zoo as library
from tests.conftest import Result
from tests.exported import exported_build, exported_with, once, one_thread, signed_export
from zoo_runtime import load_session, open_session
from zoo_runtime.generation.bias import bias_settings

__all__ = ["exported_build", "exported_with", "once", "one_thread", "signed_export"]

Change = Callable[[onnx.ModelProto], object]


def external(model: onnx.ModelProto) -> onnx.TensorProto:
    """Return a tensor that lies in the file of weights."""
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def place(key: str, value: str) -> Change:
    """Change a part of the place of a tensor."""

    def change(model: onnx.ModelProto) -> None:
        for entry in external(model).external_data:
            if entry.key == key:
                entry.value = value

    return change


def endless(model: onnx.ModelProto) -> None:
    """Let a function call itself."""
    function = model.functions[0]
    function.node.add(op_type=function.name, domain=function.domain, input=function.input, output=["again"])


CHANGES: dict[str, Change] = {
    "unknown type": lambda model: setattr(external(model), "data_type", 99),
    "offset abc": place("offset", "abc"),
    "endless function": endless,
    "no type": lambda model: setattr(external(model), "data_type", 0),
    "offset -1": place("offset", "-1"),
    "offset of 5000 digits": place("offset", "9" * 5000),
    "offset 2**63": place("offset", str(2**63)),
    "length abc": place("length", "abc"),
    "length 0": place("length", "0"),
    "another folder": place("location", "../model.safetensors"),
    "absolute": place("location", "/etc/passwd"),
    "NUL": place("location", "a\0b"),
    "another file": place("location", "config.json"),
    "negative size": lambda model: external(model).dims.__setitem__(0, -1),
    "huge size": lambda model: external(model).dims.__setitem__(0, 2**62),
    "no graph": lambda model: model.ClearField("graph"),
    "no nodes": lambda model: model.graph.ClearField("node"),
    "no opset": lambda model: model.ClearField("opset_import"),
    "a later opset": lambda model: setattr(model.opset_import[0], "version", 99),
    "a later version": lambda model: setattr(model, "ir_version", 99),
    "a tensor twice": lambda model: model.graph.initializer.add().CopyFrom(model.graph.initializer[0]),
    "no inputs": lambda model: model.graph.ClearField("input"),
    "no outputs": lambda model: model.graph.ClearField("output"),
    "no functions": lambda model: model.ClearField("functions"),
    "unknown operator": lambda model: setattr(model.graph.node[0], "op_type", "Nothing"),
    "input of no type": lambda model: model.graph.input[0].ClearField("type"),
    "input of an unknown type": lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 99),
}


def changed(change: Change) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        model = onnx.load_model_from_string(data)
        change(model)
        return model.SerializeToString()

    return apply


GRAPHS: dict[str, Callable[[bytes], bytes]] = {
    "not UTF-8": lambda data: data.replace(b"input_ids", b"input\xff\xfeds"),
    **{name: changed(change) for name, change in CHANGES.items()},
    "dimension not UTF-8": lambda data: data.replace(b"\x12\x05batch", b"\x12\x05ba\xffch"),
    "metadata not UTF-8": lambda data: data.replace(b"zoo.evidence", b"zoo.\xffvidence"),
    "empty": lambda data: b"",
    "text": lambda data: b"hello",
    "truncated": lambda data: data[: len(data) // 2],
}


def change_graph(model: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace the graph, and its digest in the evidence."""
    graph, evidence = model / "model.onnx", model / "parity.json"
    before = graph.read_bytes()
    graph.write_bytes(change(before))
    assert graph.read_bytes() != before
    facts = json.loads(evidence.read_text())
    facts["files"]["model.onnx"] = hashlib.sha256(graph.read_bytes()).hexdigest()
    evidence.write_text(json.dumps(facts))


def assert_documented(result: Result, statuses: set[int]) -> None:
    assert result.status in statuses, result
    assert "internal error" not in result.err, result.err
    assert result.err.count("\n") <= 1, result.err
    assert "plugin '" not in result.err, result.err


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("case", GRAPHS)
def test_graphs(
    case: str, zoo: Callable[..., Result], exported_model: Callable[..., Path], seal, tmp_path: Path
) -> None:
    """Whoever changes a graph can change the digests too."""
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    change_graph(model, GRAPHS[case])
    seal(model)
    bad = {0, 3} if case in ("metadata not UTF-8", "a tensor twice", "length 0", "another file", "no type") else {3}
    assert_documented(zoo("run", model, "text", "--unverified"), bad)
    assert_documented(zoo("publish", model, "out", "--layout", "standalone"), {0, 3, 4})
    assert_documented(zoo("diff", model), {0, 3, 4})
    assert_documented(zoo("relink", model), {0, 3})
    assert_documented(zoo("verify", model), {0, 3, 4})


@pytest.mark.parametrize(
    "case", ["not UTF-8", "dimension not UTF-8", "unknown type", "offset abc", "no inputs", "unknown operator"]
)
def test_graph_that_violates_the_standard(
    case: str, zoo, exported_model: Callable[..., Path], seal, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    change_graph(model, GRAPHS[case])
    seal(model)
    for command in ("relink", "diff"):
        zoo(command, model).failed(
            3, "not a valid ONNX graph (", "model/model.onnx: export again with zoo export --force"
        )


@pytest.mark.parametrize("case", ["not UTF-8", "dimension not UTF-8"])
def test_run_of_names_that_are_not_unicode(
    case: str, zoo, exported_model: Callable[..., Path], seal, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    change_graph(model, GRAPHS[case])
    seal(model)
    zoo("run", model, "text", "--unverified").failed(3, "names in the graph are not UTF-8: ")


def test_renamed_tensor(zoo, copy_of: Callable[..., Path], seal) -> None:
    model = copy_of("gpt-tiny")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'token_embedding.weight":{', b'token_embed_ing.weight":{'))
    seal(model)
    zoo("publish", model, "out", "--layout", "hub").failed(3, "missing token_embedding.weight; unexpected token_embed_")
    assert not Path("out").exists()


@pytest.mark.parametrize("text", ["x", "5", "[3]", '[["a", "b"]]', "[" * 10**5])
def test_parts_of_a_tensor(text: str, zoo, exported_model: Callable[..., Path], seal, tmp_path: Path) -> None:
    """A tensor may list those that it spans in its metadata."""
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    change_graph(model, changed(lambda graph: external(graph).metadata_props.add(key="zoo.parts", value=text)))
    seal(model)
    zoo("relink", model).failed(3, "of the ONNX graph has the zoo.parts")


@pytest.mark.parametrize("text", ["x", "5", "[1]", '{"batch": "1"}', '{"batch": 0}', "[" * 10**5])
def test_fixed_sizes(text: str, zoo, exported_model: Callable[..., Path], seal, tmp_path: Path) -> None:
    """The metadata list the dimensions that have one size."""
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    change_graph(model, changed(lambda graph: graph.metadata_props.add(key="zoo.fixed", value=text)))
    seal(model)
    zoo("diff", model).failed(3, "the metadata of the ONNX graph has the sizes")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opzet": 18}, "unknown key 'opzet' for Options"),
        ({"opset": "18"}, "opset must be int or none, got '18'"),
        ({"fix": ["nothing=1"]}, "has no free dimension 'nothing'"),
        ({"profile": "serving"}, "the options are those of another variant, serving"),
        ({"opset": 9}, "opset 9 is not supported"),
        ({"profile": "nothing"}, "profile must be"),
        ([], "options must be an object, got []"),
        (None, "options must be an object, got None"),
    ],
)
def test_options_in_the_evidence(
    options: object, message: str, zoo, exported_model: Callable[..., Path], seal, tmp_path: Path
) -> None:
    """The file is wrong, not the command."""
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    evidence = model / "parity.json"
    evidence.write_text(json.dumps(json.loads(evidence.read_text()) | {"options": options}))
    seal(model)
    zoo("verify", model, "--retrace").failed(3, message, "model/parity.json")


def bomb(depth: int, calls: int) -> bytes:
    """Return a graph of functions, each of which calls the next one several times."""
    names = [f"d.f{number}" for number in range(depth)] + ["Identity"]
    functions = []
    for number in range(depth):
        body = " ".join(f"t{call + 1} = {names[number + 1]}(t{call})" for call in range(calls))
        head = f'<domain: "d", opset_import: ["": 18, "d": 1]> f{number} (t0) => (t{calls})'
        functions.append(f"{head} {{ {body} }}")
    head = '<ir_version: 9, opset_import: ["": 18, "d": 1]> g (float[n] x) => (float[n] y) { y = d.f0 (x) }'
    return onnx.parser.parse_model("\n".join([head, *functions])).SerializeToString()


@pytest.mark.parametrize(
    ("depth", "calls", "message"),
    [
        (40, 2, "functions of the graph expand to too many nodes: at most 200,000 are allowed.*ZOO_MAX_GRAPH_NODES"),
        (3, 60, "functions of the graph expand to too many nodes"),
        (10_000, 1, "functions of the graph call each other more than 64 deep"),
    ],
)
def test_functions_that_expand(depth: int, calls: int, message: str, tmp_path: Path) -> None:
    """ONNX Runtime takes exponential time, or overflows its stack, which ends the process."""
    graph = bomb(depth, calls)
    (tmp_path / "model.onnx").write_bytes(graph)
    for given in (graph, tmp_path / "model.onnx"):
        with pytest.raises(library.ArtifactError, match=message):
            open_session(given)


def test_functions_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    open_session(bomb(4, 3), threads=1)  # 1 + 3 + 9 + 27 + 81 nodes
    monkeypatch.setenv("ZOO_MAX_GRAPH_NODES", "121")
    open_session(bomb(4, 3), threads=1)
    monkeypatch.setenv("ZOO_MAX_GRAPH_NODES", "120")
    with pytest.raises(library.ArtifactError, match="at most 120 are allowed"):
        open_session(bomb(4, 3), threads=1)


def test_special_token_that_is_not_unicode(zoo) -> None:
    Path("text.txt").write_text("hello world\n" * 9)
    zoo("tokenizer", "train", "text.txt", "-o", "t.json", "--vocab-size", 300, "--special", "<\udcff>").failed(
        2, "a special token is not valid Unicode: --special"
    )


BYTES = os.fsdecode(b"\xff")
"""A name of a file that is not UTF-8."""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="file systems refuse such names")


@linux_only
def test_outputs_with_names_that_are_not_utf8(zoo) -> None:
    """The name is escaped where a file of the model contains it."""
    Path("text.txt").write_text("hello world\n" * 90)
    done = zoo("train", "gpt-tiny", "--data", "text.txt", "-o", BYTES, "--set", "max_steps=1")
    assert done.status == 0, done.err
    assert "# \\udcff" in Path(BYTES, "README.md").read_text(encoding="utf-8")
    assert zoo("show", BYTES).status == 0
    zoo("export", BYTES, "--onnx").failed(2, "reads only paths that are UTF-8: \\udcff", "rename it")


@linux_only
def test_inputs_with_names_that_are_not_utf8(zoo) -> None:
    """A training run records the names of its inputs."""
    Path(f"{BYTES}.txt").write_text("hello world\n" * 90)
    done = zoo("train", "gpt-tiny", "--data", f"{BYTES}.txt", "-o", "model")
    done.failed(2, "the name of the file is not UTF-8: \\udcff.txt")
    assert not Path("model").exists()


def test_host_that_cannot_be_encoded(zoo, exported_model: Callable[..., Path]) -> None:
    """The codec for international names of hosts limits the parts between dots."""
    for host in ("127..1", f"{'a' * 64}.example"):
        done = zoo("serve", exported_model("gpt-tiny"), "--host", host, "--port", 0)
        assert done.status == 2
        assert "error: cannot listen (not the name of a host): " in done.err


@pytest.mark.parametrize("command", [("show", "{}"), ("build", "gpt-tiny", "-o", "{}"), ("verify", "{}"), ("{}",)])
def test_arguments_that_no_process_can_have(command: tuple[str, ...], zoo) -> None:
    zoo(*(part.format("a\ud800") for part in command)).failed(2, "an argument is not valid Unicode: 'a\\ud800'")


@pytest.mark.parametrize(("text", "reason"), [(r'"\ud800"=1', "is not valid Unicode"), (r'"\x"=1', "has the text")])
def test_quoted_text_of_a_bias(text: str, reason: str, zoo, exported_model: Callable[..., Path]) -> None:
    zoo("run", exported_model("gpt-tiny"), "text", "--logit-bias", text).failed(2, "logit_bias", reason)


def test_paths_with_nul(zoo, copy_of) -> None:
    zoo("build", "gpt-tiny", "-o", "a\0b").failed(2, "an argument cannot contain a NUL character")
    zoo("show", "a\0b").failed(2, "an argument cannot contain a NUL character")
    with pytest.raises(library.UsageError, match="a path cannot contain a NUL character"):
        library.save(library.create_model("gpt-tiny"), "a\0b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a\ud800"}, "regex is not valid Unicode"),
        ({"grammar": 'start: "\udfff"'}, "grammar is not valid Unicode"),
        ({"stop": ("x", "\ud800")}, "stop is not valid Unicode"),
        ({"json_schema": "[" * 10**5}, "not JSON"),
        ({"logit_bias": {-1: 3}}, "logit_bias has the key -1"),
        ({"logit_bias": {(1, -2): 3}}, r"logit_bias has the key \(1, -2\)"),
        ({"logit_bias": {True: 3}}, "logit_bias has the key True"),
    ],
)
def test_options_of_generation(options: dict[str, Any], message: str, exported_model: Callable[..., Path]) -> None:
    pytest.importorskip("llguidance")
    with (
        load_session(exported_model("gpt-tiny"), threads=1) as session,
        pytest.raises(library.UsageError, match=message),
    ):
        session.run("text", **options)


def test_text_of_a_negative_number_has_a_bias() -> None:
    """Texts are not token ids."""
    assert bias_settings({"-1": 2.0, 3: 1.0}) == ('"-1"=2.0', "3=1.0")


def test_values_that_a_built_in_model_refuses(zoo) -> None:
    """The model is not to blame."""
    refused = zoo("build", "vit-tiny", "--set", "layer_scale=1e308").failed(2, "cannot build vit-tiny")
    assert "plugin" not in refused
    zoo("build", "vit-tiny", "--set", "num_channels=1000000000").failed(2, "num_channels must be at most 4096")


@pytest.mark.slow
def test_models_larger_than_the_memory(zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are refused before any of it is allocated."""
    zoo("build", "gpt-tiny", "--set", "hidden_size=4194304").failed(2, "parameters take", "ZOO_MAX_MODEL_BYTES")
    monkeypatch.setenv("ZOO_MAX_MODEL_BYTES", "100000")
    zoo("build", "gpt-tiny").failed(2, "124,928 parameters take 499,712 bytes: at most 100,000 are allowed", "gpt-tiny")
    code = "import torch, zoo\nwith torch.device('meta'):\n    zoo.create_model('gpt-tiny')"
    subprocess.run([sys.executable, "-c", code], check=True)
