"""Sessions on OpenVINO, which keep the past of a decoder as state, beside those on ONNX Runtime.

They run where the extra ``openvino`` is installed: ``pip install -c constraints.txt openvino && pytest -n 0
tests/runtime/test_openvino.py``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from tests.exported import sign_export
from zoo.artifact import OPENVINO, Export, ModelDirectory
from zoo.contract import Graph, floats, token_ids
from zoo.errors import ArtifactError, ParityError, StoppedError, UsageError
from zoo_export import export_model
from zoo_export.comparison import Comparison
from zoo_export.parity.compare import compare
from zoo_export.parity.openvino import OpenVinoSubject, check_integers
from zoo_export.trace.make import Options
from zoo_runtime import Session, load_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
ON_OPENVINO = Options(profile=OPENVINO)
TEXTS = ["the cat", "a longer text", "x"]

pytest.importorskip("openvino", reason="needs the extra openvino")


@pytest.fixture(scope="session")
def on_both(exported_build: Exported, once: Callable[..., Path]) -> Exported:
    """Build a model with non-trivial weights, and export it for ONNX Runtime and, verified, for OpenVINO."""

    def export(name: str) -> Path:
        def make() -> Path:
            folder = sign_export(exported_build(name, noise=True, gain=3.0))
            export_model(folder, options=ON_OPENVINO)
            return folder

        return once(name, ("openvino",), make)

    return export


@pytest.fixture
def exported(on_both: Exported) -> Path:
    return on_both("gpt-tiny")


def open_both(folder: Path) -> tuple[Session, Session]:
    return load_session(folder), load_session(folder, provider=OPENVINO)


def play(session: Session, *, states: bool = False) -> list[np.ndarray]:
    """Use every method of a stepper, and return the logits."""
    chance = np.random.default_rng(0)
    logits = []

    def step(shape: tuple[int, int], mask: np.ndarray | None = None, *, every: bool = False) -> None:
        logits.append(stepper.step(chance.integers(0, 40, shape), mask, every=every).copy())

    with session.stepper(rows=3) as stepper:
        step((3, 5), None if states else np.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]))
        step((3, 1))
        stepper.take(np.array([2, 0]))
        step((2, 2), every=True)
        saved = stepper.save()
        stepper.take(np.array([1, 1, 0, 0, 1]))
        step((5, 1))
        stepper.take(np.array([4, 0, 2]))
        stepper.take(np.array([1, 0]))  # before the next step, which sees both
        other = stepper.save()
        step((2, 1))
        if not states:
            stepper.roll_back(2)
            step((2, 3))
        stepper.restore(saved)
        step((2, 3))
        stepper.restore(other)
        step((2, 1))
        stepper.take(np.array([1]))
        if not states:
            stepper.roll_back(stepper.length)
            step((1, 3))
    return logits


def check_play(folder: Path, *, states: bool = False) -> None:
    runtime, engine = open_both(folder)
    with runtime, engine:
        for expected, found in zip(play(runtime, states=states), play(engine, states=states), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_export_is_compared_and_recorded_on_openvino(exported: Path, zoo: Zoo) -> None:
    evidence = json.loads((exported / "parity.openvino.json").read_text())
    assert evidence["verified"] is True
    assert evidence["provider"] == OPENVINO
    assert evidence["versions"][OPENVINO].startswith("20")
    assert "onnxruntime" not in evidence["versions"]
    assert evidence["logits"].keys() == {"all", "faint", "perturbed"}
    assert evidence["graphs"]["model"]["placement"][OPENVINO] > 10
    assert set(evidence["graphs"]["model"]["outputs"]["logits"]) == {"all", "faint", "perturbed"}
    replayed = zoo("verify", exported, "--variant", OPENVINO, "--recorded", "--json").json
    assert replayed["runtime"] == f"openvino {evidence['versions'][OPENVINO]}"
    assert replayed["ratio"] < 1


def test_answers_are_those_of_onnx_runtime(exported: Path) -> None:
    runtime, engine = open_both(exported)
    with runtime, engine:
        for options in ({}, {"num_beams": 3}, {"temperature": 0.8, "seed": 3}):
            expected = runtime.run(TEXTS, max_new_tokens=12, **options)
            found = engine.run(TEXTS, max_new_tokens=12, **options)
            assert [row["generated_ids"] for row in found] == [row["generated_ids"] for row in expected]
        assert engine.placement()["model"][OPENVINO] > 10
        assert (engine.sessions, runtime.compiled) == ({}, {})


def test_stepper_does_what_it_does_on_onnx_runtime(exported: Path) -> None:
    check_play(exported)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gemma-tiny", "qwen3-next-tiny"])
def test_steppers_with_windows_and_states(on_both: Exported, name: str) -> None:
    check_play(on_both(name), states=name != "llama-tiny")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer-tiny", "t5-tiny", "bert-tiny"])
def test_models_with_encoders(on_both: Exported, name: str) -> None:
    runtime, engine = open_both(on_both(name))
    with runtime, engine:
        ids = [[5, 9, 7, 6], [8, 5], [7, 7, 9]]
        options = {"task": "feature-extraction"} if name == "bert-tiny" else {"max_new_tokens": 6}
        for expected, found in zip(runtime.run(ids, **options), engine.run(ids, **options), strict=True):
            assert found.keys() == expected.keys()
            numbers = {key: value for key, value in expected.items() if isinstance(value, list | float | np.ndarray)}
            assert numbers
            for key, value in numbers.items():
                np.testing.assert_allclose(found[key], value, atol=2e-5)


def test_wrong_graph_is_refused(exported: Path) -> None:
    """Its norms have the epsilon 1e-3."""
    export = Export(ModelDirectory.open(exported), OPENVINO)
    model = onnx.load_model_from_string(export.read()["model"])
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-3
    report = compare(
        export.stored,
        {"model": model.SerializeToString()},
        Comparison(provider=OPENVINO),
        declared=export.graphs,
        make_subject=OpenVinoSubject,
    )
    assert not report.passed


def test_runs_can_be_stopped(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is interrupted between its registration and its start, when OpenVINO ignores it."""
    with load_session(exported, provider=OPENVINO) as session:
        graph = session.graphs[0]
        ids = np.full((8, 30), 5)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        request = session.compiled["model"].request()
        began = threading.Event()
        real = request._request

        class Late:
            """A request that starts late."""

            def start_async(self, *args: Any, **kwargs: Any) -> None:
                began.set()
                time.sleep(0.3)
                real.start_async(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        request._request = Late()
        monkeypatch.setattr(type(session.compiled["model"]), "request", lambda self: request)
        threading.Thread(target=lambda: began.wait() and session.interrupt()).start()
        with pytest.raises(StoppedError, match="interrupted"):
            session.execute(graph, feeds)


def test_session_in_a_forked_process_and_in_threads(exported: Path) -> None:
    """A forked process would wait for OpenVINO's threads without end."""
    with load_session(exported, provider=OPENVINO) as session:
        expected = session.run(TEXTS, max_new_tokens=3)
        child = os.fork()
        if child == 0:
            try:
                session.run(TEXTS, max_new_tokens=3)
            except UsageError as error:
                os._exit("forked" not in str(error))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(session.run(TEXTS, max_new_tokens=3))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [expected] * 3


def test_refusals(exported: Path, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo("run", exported, "x", "--variant", OPENVINO).failed(
        2, f"the variant openvino runs on openvino only: {exported}: --provider openvino"
    )
    zoo("run", exported, "x", "--variant", "cpu", "--provider", OPENVINO).failed(
        2, "the variant cpu runs on onnxruntime only: --provider openvino", "--profile openvino"
    )
    zoo("run", exported, "x", "--provider", OPENVINO, "--provider-option", "KV_CACHE=u8").failed(
        2, "openvino has no property 'KV_CACHE' to set", "did you mean"
    )
    zoo("run", exported, "x", "--provider", OPENVINO, "--provider-option", "KV_CACHE_PRECISION=u7").failed(
        2, "openvino refuses KV_CACHE_PRECISION=u7"
    )
    zoo("run", exported, "x", "--provider", OPENVINO, "--memory", "mapped").failed(2, "openvino")
    with load_session(exported, provider=OPENVINO) as session, pytest.raises(UsageError, match="rows"):
        session.open_rows()
    monkeypatch.setitem(sys.modules, OPENVINO, None)
    zoo("run", exported, "x", "--provider", OPENVINO).failed(
        2, "openvino is not installed: --provider openvino: pip install attention-zoo[openvino]"
    )


def test_export_for_onnx_runtime_alone(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model("gpt-tiny")
    zoo("run", folder, "x", "--provider", OPENVINO).failed(3, "not exported for openvino", "--profile openvino")


def test_graph_that_openvino_cannot_convert(exported: Path) -> None:
    """One line names the operator, and nothing is written."""
    export = Export(ModelDirectory.open(exported), OPENVINO)
    model = onnx.load_model_from_string(export.read()["model"])
    next(node for node in model.graph.node if node.op_type == "Gelu").op_type = "Softball"
    with pytest.raises((ParityError, ArtifactError), match=r"openvino cannot open the graph .*Softball"):
        compare(
            export.stored,
            {"model": model.SerializeToString()},
            Comparison(provider=OPENVINO),
            declared=export.graphs,
            make_subject=OpenVinoSubject,
        )


@pytest.mark.parametrize(
    ("expression", "refused"),
    [
        ("m = Mul(input_ids, k)\n i = Mod(m, k)", "Mul"),
        ("a = Add(input_ids, k)\n w = Where(c, a, k)\n i = BitwiseXor(w, k)", "BitwiseXor"),
        ("i = Add(input_ids, k)", None),
        ("e = Cast<to=7>(c)\n i = Mul(e, k)", None),
        ("s = Shape(input_ids)\n i = Mul(s, k)", None),
        ("f = Cast<to=1>(input_ids)\n h = Mul(f, f)\n i = Cast<to=7>(h)", None),
    ],
)
def test_arithmetic_of_large_integers_is_refused(expression: str, refused: str | None) -> None:
    """OpenVINO has too few bits for products of ids, which only some ids show."""
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
    g (int64[batch, sequence] input_ids) => (int64[m, n] i) {{
        k = Constant<value = int64[1] {{257}}>()
        c = Less(input_ids, k)
        {expression}
    }}"""
    graph = Graph(inputs=(token_ids("input_ids", 50_000),), outputs=(floats("i", "batch", "sequence"),))
    model = ir.from_proto(onnx.parser.parse_model(text))
    if refused is None:
        check_integers(model, graph, Path("m"))
        return
    with pytest.raises(ParityError, match=f"openvino computes {refused} of integers in input_ids in too few bits"):
        check_integers(model, graph, Path("m"))


def test_integers_of_more_than_32_bits_are_refused(exported: Path) -> None:
    with load_session(exported, provider=OPENVINO) as session:
        request = session.compiled["model"].request()
        with pytest.raises(ArtifactError, match="input_ids has an integer of more than 32 bits"):
            request.run({"input_ids": np.array([[2**40]])})


def test_engines_are_measured_side_by_side(exported: Path, zoo: Zoo) -> None:
    result = zoo("bench", exported, "--engines", "--lengths", "8", "--batch", "1,2", "--seconds", "0.01", "--json").json
    assert [(case["batch"], case["length"]) for case in result["cases"]] == [(1, 8), (2, 8)]
    for case in result["cases"]:
        assert {item["variant"] for item in case["exports"]} == {"", OPENVINO}
        assert all(item["step_seconds"] > 0 for item in case["exports"])
        assert case["fastest"]["float32"] == case["exports"][0]["variant"]
        assert case["waited"] is None or 0 <= case["waited"] < 1
    zoo("bench", exported, "--engines", "--dtype", "int8").failed(2, "--dtype is not for --engines")
