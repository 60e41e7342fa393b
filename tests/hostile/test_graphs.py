"""Graphs that fail, or that ask for any amount of time or memory, end a command in one line with status 3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper
from onnx.helper import make_node

from tests.exported import exported_build, exported_with, once, one_thread, signed_export

__all__ = ["exported_build", "exported_with", "once", "one_thread", "signed_export"]

Altered = Callable[..., Path]


@pytest.fixture
def altered(exported_model: Callable[..., Path], seal: Callable[[Path], None], tmp_path: Path) -> Altered:
    """Copy a model, and add to its logits a result of more nodes, which read the ``old`` logits.

    The result is the last output. ``constants`` are initialisers by name.
    """

    def alter(nodes: Sequence[onnx.NodeProto], **constants: np.ndarray) -> Path:
        model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "gpt-tiny"))
        file = onnx.load(model / "model.onnx", load_external_data=False)
        for node in file.graph.node:
            node.output[:] = ["old" if name == "logits" else name for name in node.output]
        least = make_node("ReduceMin", [nodes[-1].output[0]], ["least"], keepdims=0)
        file.graph.node.extend([*nodes, least, make_node("Add", ["old", "least"], ["logits"])])
        file.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
        (model / "model.onnx").write_bytes(file.SerializeToString())
        seal(model)
        return model

    return alter


def command(model: Path, name: str = "run") -> list[str]:
    options = {"run": ["hi", "--unverified", "--option", "max_new_tokens=1"], "verify": []}
    return [sys.executable, "-m", "zoo", name, str(model), *options[name]]


def refused(model: Path, *message: str, name: str = "run", status: int = 3, **variables: str) -> None:
    """Run or verify a model; check that the only line besides warnings has these parts."""
    done = subprocess.run(
        command(model, name),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    *warnings, line = done.stderr.splitlines()
    assert done.returncode == status, done.stderr
    assert all(warning.startswith("warning: ") for warning in warnings)
    for part in ("error: ", *message):
        assert part in line


def test_failing_node(altered: Altered) -> None:
    pad = make_node("Pad", ["two", "sizes"], ["padded"])
    refused(altered([pad], two=np.ones(2, np.float32), sizes=np.array([-50, -50])), "cannot run the graph", "/gpt-tiny")


@pytest.mark.slow
def test_endless_loop(altered: Altered) -> None:
    body = onnx.parser.parse_graph(
        "b (int64 i, bool go, float[a, b, c] x) => (bool more, float[a, b, c] y) { more = Identity(go) y = Sin(x) }"
    )
    loop = make_node("Loop", ["trips", "go", "old"], ["x"], body=body)
    model = altered([loop], trips=np.array(2**62), go=np.array(True))
    for name in ("run", "verify"):
        refused(model, "took longer than 2 s: ", "/gpt-tiny: raise ZOO", name=name, ZOO_MAX_GRAPH_SECONDS="2")


@pytest.mark.slow
def test_output_of_another_rank(altered: Altered, seal: Callable[[Path], None]) -> None:
    """Without what onnx_ir logs about shapes that it cannot infer."""
    model = altered([make_node("Neg", ["old"], ["x"])])
    file = onnx.load(model / "model.onnx", load_external_data=False)
    file.graph.node[-1].CopyFrom(make_node("Identity", ["least"], ["logits"]))
    (model / "model.onnx").write_bytes(file.SerializeToString())
    seal(model)
    refused(model, "logits of graph 'model' has shape ()", name="verify", status=4)


@pytest.fixture
def slow(altered: Altered) -> Path:
    """A model that ONNX Runtime loads for minutes without looking at the flag that ends a load."""
    names = ["old", *map("x{}".format, range(30_000))]
    return altered([make_node("Neg", [old], [new]) for old, new in pairwise(names)])


def test_load_without_end(slow: Path) -> None:
    refused(slow, "took longer than 2 s", "model.onnx: raise ZOO_MAX_GRAPH_SECONDS", ZOO_MAX_GRAPH_SECONDS="2")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at the files that a process has mapped")
def test_signal_during_a_load(slow: Path) -> None:
    with subprocess.Popen(command(slow), stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and "onnxruntime" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4)
        process.terminate()
        timer = threading.Timer(60, process.kill)
        timer.start()
        _, err = process.communicate()
        timer.cancel()
    assert (process.returncode, err) == (143, "terminated\n")


@pytest.mark.slow_after(1)
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@pytest.mark.parametrize("kind", ["shape", "doubled", "text", "constant"])
def test_memory(altered: Altered, kind: str) -> None:
    """One large tensor, one that doubles, a string that does, and constants that the optimiser computes on loading."""
    constants = {
        "shape": {"s": np.array([60000, 60000])},
        "doubled": {},
        "text": {"s": np.array(["1" * 10], object)},
        "constant": {"s": np.ones(1000, np.float32)},
    }[kind]
    names = [next(iter(constants), "old"), *map("x{}".format, range(30))]
    if kind == "shape":
        nodes = [make_node("ConstantOfShape", ["s"], ["large"])]
    elif kind == "text":
        nodes = [make_node("StringConcat", [old, old], [new]) for old, new in pairwise(names)]
        nodes.append(make_node("Cast", [names[-1]], ["number"], to=1))
    else:
        nodes = [make_node("Concat", [old, old], [new], axis=0) for old, new in pairwise(names)]
    refused(
        altered(nodes, **constants),
        "out of memory",
        "/gpt-tiny",
        "see ZOO_MAX_GRAPH_BYTES",
        ZOO_MAX_GRAPH_BYTES=str(2**28),
    )
