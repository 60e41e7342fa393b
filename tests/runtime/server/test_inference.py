"""The Open Inference Protocol, with the client of Triton, and with raw requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.runtime.server.conftest import KEPT, POSITIONS, SECONDS, Server
from zoo.contract import Graph
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.server.http.inference.graphs import GraphRunner
from zoo_runtime.server.http.inference.tensors import RequestTensor, decode, encode
from zoo_runtime.server.models import ModelPlace, ModelSettings, Served

Exported = Callable[..., Path]
Arrays = Mapping[str, np.ndarray[Any, Any]]
TYPES = {"int64": "INT64", "float32": "FP32"}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def triton(server: Server) -> Iterator[Any]:
    module = pytest.importorskip("tritonclient.http")
    with module.InferenceServerClient(
        server.url.removeprefix("http://"), network_timeout=SECONDS, connection_timeout=SECONDS
    ) as client:
        yield client


@pytest.fixture(scope="module")
def session(encoder: Path) -> Iterator[Session]:
    with load_session(encoder, unverified=True) as opened:
        yield opened


def feeds_of(graph: Graph, rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return random inputs of a graph without a past."""
    random = np.random.default_rng(seed)
    sizes = dict.fromkeys(graph.dim_names(), length) | {graph.rows[0]: rows, str(graph.past_length): 0}
    return {
        tensor.name: np.ones(tensor.shape(sizes), np.int64)
        if tensor.is_mask
        else random.integers(tensor.upper or 2, size=tensor.shape(sizes))
        if not tensor.is_float
        else random.normal(size=tensor.shape(sizes)).astype(np.float32)
        for tensor in graph.input_tensors()
    }


def inputs_of(arrays: Arrays, *, binary: bool) -> list[Any]:
    """Return arrays as inputs of Triton's client."""
    from tritonclient.http import InferInput

    found = []
    for name, array in arrays.items():
        tensor = InferInput(name, list(array.shape), TYPES[array.dtype.name])
        tensor.set_data_from_numpy(array, binary_data=binary)
        found.append(tensor)
    return found


@pytest.mark.parametrize("binary", [True, False])
def test_outputs_equal_the_session(triton: Any, session: Session, encoder: Path, binary: bool) -> None:
    """To the bit, with all outputs, or with some of them, in either form."""
    from tritonclient.http import InferRequestedOutput

    graph = session.graphs[0]
    feeds = feeds_of(graph, 3, 7)
    wanted = session.execute(graph, feeds)
    names = [tensor.name for tensor in graph.output_tensors()]
    found = triton.infer(encoder.name, inputs_of(feeds, binary=binary), request_id="4")
    assert found.get_response()["id"] == "4"
    assert [output["name"] for output in found.get_response()["outputs"]] == names
    for name in names:
        assert np.array_equal(found.as_numpy(name), wanted[name])
        asked = [InferRequestedOutput(name, binary_data=binary)]
        one = triton.infer(encoder.name, inputs_of(feeds, binary=binary), outputs=asked, model_version="1")
        assert [output["name"] for output in one.get_response()["outputs"]] == [name]
        assert np.array_equal(one.as_numpy(name), wanted[name])


def test_graphs_of_an_encoder_decoder(triton: Any, translator: Path) -> None:
    """They are models of their own. The decoder starts without a past, and continues with the one that it returns."""
    with load_session(translator, unverified=True) as session:
        first, second = session.graphs
        feeds = feeds_of(first, 2, 5)
        states = session.execute(first, feeds)
        name = f"{translator.name}.{first.name}"
        found = triton.infer(name, inputs_of(feeds, binary=True))
        known: dict[str, Any] = {output: found.as_numpy(output) for output in states}
        for output, array in states.items():
            assert np.array_equal(known[output], array)
        pasts = {tensor.name for tensor in second.past_tensors()}
        start = {name: array for name, array in feeds_of(second, 2, 5).items() if name not in pasts}
        start |= {name: array for name, array in known.items() if name in start}
        start |= {name: array[:, :2] for name, array in start.items() if name.startswith("decoder_")}
        name = f"{translator.name}.{second.name}"
        done = triton.infer(name, inputs_of(start, binary=True))
        wanted = session.execute(second, start)
        assert all(np.array_equal(done.as_numpy(output), array) for output, array in wanted.items())
        pairs = second.past_pairs()
        more = start | {"decoder_input_ids": np.array([[5], [6]])}
        if "decoder_attention_mask" in more:
            more["decoder_attention_mask"] = np.ones((2, 3), np.int64)
        more |= {past.name: done.as_numpy(present.name) for past, present in pairs}
        wanted = session.execute(second, more)
        done = triton.infer(name, inputs_of(more, binary=True))
        assert np.array_equal(done.as_numpy("logits"), wanted["logits"])


def test_graph_for_serving(triton: Any, writer: Path) -> None:
    """The graph that a decoder declares, not the one with rows of its own."""
    with load_session(writer, variant="serving", unverified=True) as session:
        start = feeds_of(session.graphs[0], 2, 6)
        start = {name: array for name, array in start.items() if not name.startswith("past")}
        wanted = session.execute(session.graphs[0], start)
        found = triton.infer("writer", inputs_of(start, binary=True))
        assert np.array_equal(found.as_numpy("logits"), wanted["logits"])


def test_example_of_the_guide(triton: Any, server: Server, writer: Path) -> None:
    """The program of docs/howto/serve.md."""
    page = (ROOT / "docs" / "howto" / "serve.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (program,) = [text for text in programs if "tritonclient" in text]
    names: dict[str, Any] = {}
    exec(program.replace("127.0.0.1:8765", server.url.removeprefix("http://")).replace("gpt-tiny", "writer"), names)
    with load_session(writer, variant="serving", unverified=True) as session:
        assert np.array_equal(names["logits"], session.execute(session.graphs[0], names["feeds"])["logits"])
    names["client"].close()


def test_metadata(triton: Any, session: Session, encoder: Path, reader: Path, translator: Path) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    for name in (encoder.name, reader.name, "writer", f"{translator.name}.decoder"):
        assert triton.is_model_ready(name)
        assert triton.is_model_ready(name, "1")
    assert not triton.is_model_ready(encoder.name, "2")
    assert not triton.is_model_ready(translator.name)
    found = triton.get_model_metadata(encoder.name)
    assert (found["name"], found["versions"], found["platform"]) == (encoder.name, ["1"], "onnxruntime_onnx")
    graph = session.graphs[0]
    outputs = session.execute(graph, feeds_of(graph, 1, 4))
    for tensor in found["outputs"]:
        assert TYPES[outputs[tensor["name"]].dtype.name] == tensor["datatype"]
        shape = zip(tensor["shape"], outputs[tensor["name"]].shape, strict=True)
        assert all(declared in (-1, actual) for declared, actual in shape)
    assert {tensor["name"] for tensor in found["inputs"]} == {tensor.name for tensor in graph.input_tensors()}


def asked(encoder: Path, http: httpx.Client, **fields: Any) -> httpx.Response:
    graph_inputs = http.get(f"/v2/models/{encoder.name}").json()["inputs"]
    inputs = [
        {"name": tensor["name"], "datatype": tensor["datatype"], "shape": [1, 2], "data": [1, 1]}
        for tensor in graph_inputs
    ]
    changed = fields.pop("first", {})
    inputs[0] = inputs[0] | changed
    body = {"inputs": inputs} | fields
    return http.post(f"/v2/models/{encoder.name}/infer", json=body)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"first": {"data": [1]}}, "do not fit the shape"),
        ({"first": {"data": [1, 2, 3]}}, "do not fit the shape"),
        ({"first": {"data": [1.5, 2]}}, "not numbers of the type INT64"),
        ({"first": {"data": [True, 2]}}, "not numbers of the type INT64"),
        ({"first": {"data": [[1, False]]}}, "not numbers of the type INT64"),
        ({"first": {"data": ["a", "b"]}}, "not numbers of the type INT64"),
        ({"first": {"data": [[1], [2, 3]]}}, "not numbers of the type INT64"),
        ({"first": {"data": [1, 10**30]}}, "not numbers of the type INT64"),
        ({"first": {"data": [1, 10**9]}}, "must have integers from 0"),
        ({"first": {"data": [1, -1]}}, "must have integers from 0"),
        ({"first": {"data": None}}, "needs either data or binary_data_size"),
        ({"first": {"data": None, "parameters": {"binary_data_size": 16}}}, "0 bytes instead of 16"),
        ({"first": {"shape": [10**15, 10**15]}}, "do not fit the shape"),
        ({"first": {"shape": [0, 2**64], "data": []}}, "do not fit the shape"),
        ({"first": {"shape": [0, 5], "data": []}}, "in another input"),
        ({"first": {"shape": [2]}}, "must have 2 dimensions"),
        ({"first": {"shape": [2, 1]}}, "in another input"),
        ({"first": {"shape": [-1, 2]}}, "inputs[0]"),
        ({"first": {"datatype": "FP32"}}, "must have the datatype INT64"),
        ({"first": {"datatype": "BYTES"}}, "inputs[0]"),
        ({"first": {"name": "x"}}, "unknown input 'x', known: input_ids"),
        ({"first": {"name": "token_type_ids"}}, "given twice"),
        ({"inputs": []}, "inputs"),
        ({"outputs": [{"name": "x"}]}, "unknown output 'x'"),
        ({"outputs": [{"name": "last_hidden_state"}] * 2}, "an output is given twice"),
        ({"parameters": {"sequence_id": 3}}, "unknown field 'parameters.sequence_id'"),
        ({"extra": 3}, "unknown field 'extra'"),
    ],
)
def test_wrong_request(http: httpx.Client, encoder: Path, fields: dict[str, Any], reason: str) -> None:
    assert asked(encoder, http).status_code == 200
    found = asked(encoder, http, **fields)
    assert found.status_code == 400, found.text
    assert found.json().keys() == {"error"}
    assert reason in found.json()["error"]


def test_missing_inputs_and_long_ones(http: httpx.Client, encoder: Path) -> None:
    url = f"/v2/models/{encoder.name}/infer"
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
    found = http.post(url, json={"inputs": [ids]})
    assert (found.status_code, found.json()["error"].startswith("the input ")) == (400, True)
    length = POSITIONS * 20
    long = [
        {"name": tensor["name"], "datatype": "INT64", "shape": [1, length], "data": [0] * length}
        for tensor in http.get(f"/v2/models/{encoder.name}").json()["inputs"]
    ]
    found = http.post(url, json={"inputs": long})
    assert found.status_code == 400
    assert "do not fit in the" in found.json()["error"]


def test_wrong_framing(http: httpx.Client, encoder: Path) -> None:
    url = f"/v2/models/{encoder.name}/infer"
    for length in ("x", "-1", "99999", "9" * 30, "²"):
        headers = {"inference-header-content-length": length.encode()}
        found = http.post(url, content=b'{"inputs": []}', headers=headers)  # type: ignore[arg-type]
        assert found.status_code == 400
        assert "Inference-Header-Content-Length" in found.json()["error"]
    twice = [("inference-header-content-length", "14")] * 2
    found = http.post(url, content=b'{"inputs": []}', headers=twice)
    assert (found.status_code, "is given twice" in found.json()["error"]) == (400, True)
    graph_inputs = http.get(f"/v2/models/{encoder.name}").json()["inputs"]
    inputs = [{"name": one["name"], "datatype": "INT64", "shape": [1, 1], "data": [1]} for one in graph_inputs]
    text = json.dumps({"inputs": inputs}).encode()
    found = http.post(url, content=text + b"rest", headers={"inference-header-content-length": str(len(text))})
    assert (found.status_code, "4 bytes after the JSON" in found.json()["error"]) == (400, True)
    assert http.post(url, content=text, headers={"content-type": "text/plain"}).status_code == 415
    assert http.post(url, content=b"x" * 30_000).status_code == 413


def test_unknown_names(http: httpx.Client, encoder: Path, translator: Path) -> None:
    for path in ("/v2/models/none", f"/v2/models/{encoder.name}/versions/7", f"/v2/models/{translator.name}",
                 "/v2/nothing"):  # fmt: skip
        found = http.get(path)
        assert found.status_code == 404
        assert isinstance(found.json()["error"], str)
    assert f"{translator.name}.encoder" in http.get(f"/v2/models/{translator.name}").json()["error"]
    assert http.get(f"/v2/models/{encoder.name}/infer").status_code == 405


@pytest.mark.parametrize(
    ("datatype", "values"),
    [("BOOL", [True, False]), ("INT8", [-128, 127]), ("INT32", [-5, 7]), ("INT64", [-(2**63), 2**63 - 1]),
     ("FP16", [0.5, -65504.0]), ("FP32", [1.5, 1e-40]), ("FP64", [1e300, -0.1])],
)  # fmt: skip
def test_datatypes_survive_both_forms(datatype: str, values: list[Any]) -> None:
    """A tensor that is decoded, encoded as bytes, and decoded again."""
    given = RequestTensor(name="a", shape=[2, 1], datatype=datatype, data=values)  # type: ignore[arg-type]
    array = decode([given], b"")["a"]
    assert array.ravel().tolist() == np.array(values, array.dtype).tolist()
    for binary in (True, False):
        content, length = encode({}, [("a", array, binary)])
        described = json.loads(content[:length])["outputs"][0]
        assert (described["datatype"], described["shape"]) == (datatype, [2, 1])
        again = decode([RequestTensor.model_validate(described)], content[length or len(content) :])["a"]
        assert again.dtype == array.dtype
        assert np.array_equal(again, array)


@pytest.mark.slow
def test_graphs_need_no_options_of_a_task(exported_copy: Exported) -> None:
    """Zero-shot classification needs labels, and tensors do not."""
    folder = exported_copy("clip-tiny")
    served = Served(ModelPlace("clip", folder, {"unverified": True}), ModelSettings())
    try:
        for graph in served.session.graphs:
            GraphRunner(served, graph)
    finally:
        served.close()
