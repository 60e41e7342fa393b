"""Model repositories of Triton, parsed with its own schema, and served by it where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.exported import LIVELY
from zoo_export.publish import copies, triton
from zoo_runtime import load_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
Arrays = dict[str, Any]
Infer = Callable[[str, Arrays], Arrays]

LAYOUT = ("--layout", "triton")
SERVER = "ZOO_TRITONSERVER"
"""Environment variable: a command that runs tritonserver with the backends onnxruntime and python."""
TYPES = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_INT64": np.int64}
SIZES = {"batch": 2, "sequence": 5, "encoder_sequence": 4, "past_sequence": 3, "images": 2, "texts": 3}
MODELS = {
    "gpt-tiny": ["gpt-tiny"],
    "bert-tiny": ["bert-tiny", "bert-tiny_tokenizer", "bert-tiny_text"],
    "transformer-tiny": ["transformer-tiny_encoder", "transformer-tiny_decoder"],
    "clip-tiny": ["clip-tiny_text", "clip-tiny_image", "clip-tiny_similarity"],
    "vit-tiny": ["vit-tiny"],
    "mamba2-tiny": ["mamba2-tiny"],
}


def parse(path: Path) -> Any:
    """Parse a configuration with Triton's own schema."""
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="pip install --no-deps tritonclient")
    from google.protobuf import text_format

    return text_format.Parse(path.read_text(), schema.ModelConfig())


def full_dims(tensor: Any, batched: bool) -> list[int]:
    """Return the shape that Triton passes to a model, -1 for a free size."""
    dims = list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
    return [-1, *dims] if batched else dims


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_configuration_describes_the_graph(exported_model: Exported, zoo: Zoo, name: str) -> None:
    """ONNX Runtime computes the same as for the export, on inputs that are made from the configuration."""
    source = exported_model(name)
    made = zoo("publish", source, "repository", *LAYOUT, "--json").json
    assert made["models"] == MODELS[name]
    with load_session(source) as session:
        graphs = {graph.name: graph for graph in session.graphs}
        for model in (model for model in made["models"] if Path("repository", model, "1/model.onnx").exists()):
            config = parse(Path("repository", model, "config.pbtxt"))
            assert (config.name, config.backend) == (model, "onnxruntime")
            graph = graphs[model.removeprefix(f"{name}_") if "_" in model else "model"]
            batched = len(graph.rows) == 1
            assert config.max_batch_size == (triton.MAX_BATCH if batched else 0)
            assert config.HasField("dynamic_batching") == batched
            copy = ort.InferenceSession(f"repository/{model}/1/model.onnx", providers=["CPUExecutionProvider"])
            for tensors, items in ((config.input, copy.get_inputs()), (config.output, copy.get_outputs())):
                declared = {tensor.name: full_dims(tensor, batched) for tensor in tensors}
                shapes = {item.name: [-1 if isinstance(dim, str) else dim for dim in item.shape] for item in items}
                assert declared == shapes
            feeds = _feeds(config, graph, batched)
            wanted = session.execute(graph, feeds)
            for value, output in zip(copy.run(None, feeds), copy.get_outputs(), strict=True):
                np.testing.assert_array_equal(value, wanted[output.name])


def _feeds(config: Any, graph: Any, batched: bool) -> Arrays:
    """Make inputs with the types and ranks of a configuration, and the declared sizes."""
    from tritonclient.grpc import model_config_pb2 as schema

    rng, feeds = np.random.default_rng(0), {}
    for tensor, declared in zip(config.input, graph.input_tensors(), strict=True):
        dtype, shape = TYPES[schema.DataType.Name(tensor.data_type)], declared.shape(SIZES)
        assert len(shape) == len(full_dims(tensor, batched))
        feeds[tensor.name] = np.ones(shape, dtype) if dtype is np.int64 else rng.standard_normal(shape).astype(dtype)
    return feeds


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_precisions(exported_copy: Exported, zoo: Zoo, precision: str) -> None:
    """The graphs of quantised decoders get the declared inputs."""
    model = exported_copy("gpt-tiny")
    assert zoo("quantize", model, "--dtype", precision).status == 0
    assert zoo("publish", model, "repository", *LAYOUT, "--variant", precision).status == 0
    config = parse(Path("repository/gpt-tiny/config.pbtxt"))
    past = 10 if precision == "float16" else 11  # TYPE_FP16, TYPE_FP32
    assert [tensor.data_type for tensor in config.input][2:] == [past] * 4
    copy = ort.InferenceSession("repository/gpt-tiny/1/model.onnx", providers=["CPUExecutionProvider"])
    assert [item.name for item in copy.get_inputs()] == [tensor.name for tensor in config.input]
    assert Path(f"repository/parity.{precision}.json").is_file()


def test_weights_may_lie_in_separate_files(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_LARGEST", 1000)
    assert zoo("publish", exported_model("gpt-tiny"), "repository", *LAYOUT).status == 0
    assert Path("repository/gpt-tiny/1/model.onnx_data").stat().st_size > 400_000
    assert ort.InferenceSession("repository/gpt-tiny/1/model.onnx")


@pytest.mark.slow
def test_fixed_sizes(zoo: Zoo) -> None:
    assert zoo("export", "bert-tiny", "--onnx", "--fix", "batch=2", "--fix", "sequence=8").status == 0
    result = zoo("publish", "bert-tiny", "repository", *LAYOUT, "--json")
    assert result.json["models"] == ["bert-tiny"]  # a tokenizer would have to fill exactly two rows
    config = parse(Path("repository/bert-tiny/config.pbtxt"))
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)
    assert {tuple(tensor.dims) for tensor in config.input} == {(2, 8)}


def test_scalars_of_a_batch_are_reshaped() -> None:
    """A tensor (batch) has no further dimensions, which Triton can only express by a reshape."""
    from zoo.contract import Graph, floats, token_ids

    graph = Graph(inputs=(token_ids("input_ids", 9),), outputs=(floats("score", "batch"),))
    (score,) = triton._config("m", graph, "float32", {})["output"]
    assert (score["dims"], score["reshape"]) == ([1], {"shape": []})


def test_ensemble_connects_text_to_outputs(exported_model: Exported, zoo: Zoo) -> None:
    assert zoo("publish", exported_model("bert-tiny"), "repository", *LAYOUT).status == 0
    tokenizer, model, ensemble = (
        parse(Path(f"repository/bert-tiny{suffix}/config.pbtxt")) for suffix in ("_tokenizer", "", "_text")
    )
    assert (tokenizer.backend, ensemble.platform) == ("python", "ensemble")
    assert [(item.name, item.data_type, list(item.dims)) for item in ensemble.input] == [("text", 13, [1])]
    assert list(ensemble.input) == list(tokenizer.input)
    facts = [
        [(item.name, item.data_type, list(item.dims)) for item in items] for items in (tokenizer.output, model.input)
    ]
    assert facts[0] == facts[1]
    assert list(ensemble.output) == list(model.output)
    first, second = ensemble.ensemble_scheduling.step
    assert (first.model_name, second.model_name) == ("bert-tiny_tokenizer", "bert-tiny")
    assert dict(second.input_map) == {item.name: item.name for item in model.input} == dict(first.output_map)
    assert dict(second.output_map) == {item.name: item.name for item in model.output}


def test_models_that_do_not_fit_are_refused(exported_model: Exported, zoo: Zoo) -> None:
    source = exported_model("gpt-tiny")
    command = ("publish", source, "repository", *LAYOUT)
    zoo(*command, "--variant", "cpu").failed(2, "no inputs for the variant cpu", "int8")
    zoo(*command, "--variant", "int8").failed(3, "not exported for int8", "zoo quantize")
    zoo(*command, "--max-shard-size", "1MB").failed(2, "--max-shard-size is for")
    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    zoo("publish", "model", *command[2:]).failed(3, "not exported yet")
    assert zoo("export", "model", "--onnx", "--graph-only").status == 0
    zoo("publish", "model", *command[2:]).failed(4, "not verified")
    assert not Path("repository").exists()
    assert zoo(*command).status == 0
    zoo(*command).failed(2, "already exists", "use --force")
    assert zoo(*command, "--force").status == 0
    Path("repository/gpt-tiny/1/notes").write_text("mine")
    zoo(*command, "--force").failed(2, "gpt-tiny/1/notes")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path], Infer]]:
    """Serve a repository with Triton, and return a function that runs one of its models."""
    command = os.environ.get(SERVER)
    if not command:
        pytest.skip(f"needs tritonserver with the backends onnxruntime and python, see {SERVER}")
    processes: list[subprocess.Popen[bytes]] = []

    def start(repository: Path) -> Infer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = (tmp_path / "triton.log").open("wb")
        options = ["--http-port", str(port), "--allow-grpc", "false", "--allow-metrics", "false"]
        options += ["--disable-auto-complete-config", "--model-repository", str(repository.absolute())]
        processes.append(subprocess.Popen([command, *options], stdout=log, stderr=subprocess.STDOUT))
        url = f"http://127.0.0.1:{port}/v2/"
        for _ in range(600):
            assert processes[-1].poll() is None, (tmp_path / "triton.log").read_text()
            try:
                urllib.request.urlopen(url + "health/ready", timeout=30).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        return lambda model, feeds: infer(f"{url}models/{model}/infer", feeds)

    yield start
    for process in processes:
        process.terminate()
        process.wait()


def infer(url: str, feeds: Arrays) -> Arrays:
    """Send a request of the Open Inference Protocol. A list is one of texts."""
    names = {"int64": "INT64", "float32": "FP32"}
    inputs = [
        {"name": name, "shape": [len(value), 1], "datatype": "BYTES", "data": value}
        if isinstance(value, list)
        else {"name": name, "shape": value.shape, "datatype": names[str(value.dtype)], "data": value.ravel().tolist()}
        for name, value in feeds.items()
    ]
    request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode())
    with urllib.request.urlopen(request, timeout=300) as response:
        outputs = json.load(response)["outputs"]
    types = {value: key for key, value in names.items()}
    return {item["name"]: np.array(item["data"], types[item["datatype"]]).reshape(item["shape"]) for item in outputs}


@pytest.mark.slow
def test_triton_generates_what_zoo_does(exported_model: Exported, zoo: Zoo, serve: Callable[[Path], Infer]) -> None:
    """The past is passed on by the client, and is empty at first. Requests may share a batch."""
    source = exported_model("gpt-tiny", **LIVELY["gpt-tiny"])
    assert zoo("publish", source, "repository", *LAYOUT).status == 0
    ask = serve(Path("repository"))
    prompts = [list(text.encode()) for text in ("Once", "Tea?", "What", "1+1=")]

    def generate(ids: list[int]) -> list[int]:
        past = {f"past_key_values.{layer}.{part}": np.zeros((1, 4, 0, 16), np.float32)
                for layer in (0, 1) for part in ("key", "value")}  # fmt: skip
        new, found = np.array([ids]), []
        for step in range(8):
            mask = np.ones((1, len(ids) + step), np.int64)
            outputs = ask(source.name, {"input_ids": new, "attention_mask": mask, **past})
            found.append(int(outputs["logits"][0, -1].argmax()))
            past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
            new = np.array([found[-1:]])
        return found

    with load_session(source) as session, ThreadPoolExecutor(len(prompts)) as pool:
        wanted = [result["generated_ids"] for result in session.run(prompts, max_new_tokens=8)]
        assert list(pool.map(generate, prompts)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer-tiny", "clip-tiny", "vit-tiny"])
def test_triton_computes_what_zoo_does(
    exported_model: Exported, zoo: Zoo, serve: Callable[[Path], Infer], name: str
) -> None:
    source = exported_model(name)
    models = zoo("publish", source, "repository", *LAYOUT, "--json").json["models"]
    ask = serve(Path("repository"))
    with load_session(source) as session:
        for model, graph in zip(models, session.graphs, strict=True):
            config = parse(Path("repository", model, "config.pbtxt"))
            feeds = _feeds(config, graph, len(graph.rows) == 1)
            wanted, found = session.execute(graph, feeds), ask(model, feeds)
            assert found.keys() == wanted.keys()
            for output, value in found.items():
                np.testing.assert_allclose(value, wanted[output], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_triton_reads_texts_as_zoo_does(exported_model: Exported, zoo: Zoo, serve: Callable[[Path], Infer]) -> None:
    source = exported_model("bert-tiny", "task=feature-extraction", noise=True)
    assert zoo("publish", source, "repository", *LAYOUT).status == 0
    ask, texts = serve(Path("repository")), ["a text", "Где?"]
    found = ask(f"{source.name}_text", {"text": texts})["last_hidden_state"]
    with load_session(source) as session:
        for row, result in zip(found, session.run(texts), strict=True):
            wanted = np.array(result["last_hidden_state"])
            np.testing.assert_allclose(row[: len(wanted)], wanted, atol=1e-5)
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(f"{source.name}_text", {"text": ["too long" * 20]})
    assert "160 tokens exceed the model's 32 positions" in error.value.read().decode()


def test_published_tokenizer_is_a_copy(exported_model: Exported, zoo: Zoo) -> None:
    """Only the model's own files, and code without zoo."""
    source = exported_model("bert-tiny")
    assert zoo("publish", source, "repository", *LAYOUT).status == 0
    folder = Path("repository/bert-tiny_tokenizer/1")
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "zoo" not in [line.split()[1].partition(".")[0] for line in (folder / "model.py").read_text().splitlines()
                         if line.startswith(("import ", "from "))]  # fmt: skip
    shutil.rmtree("repository")
