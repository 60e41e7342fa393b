"""Runs of graphs end early: by another thread, after a time, and by Ctrl-C. Nothing ends the process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from zoo.errors import ArtifactError, StoppedError, UsageError
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.onnx_runtime.stopping import Call
from zoo_runtime.onnx_runtime.values import run_session

Exported = Callable[..., Path]
LOOP = """
<ir_version: 9, opset_import: ["": 18]>
loop (float[n] x, int64 trips, bool go) => (float[n] y) {
    y = Loop (trips, go, x) <body = body (int64 i, bool c, float[n] v) => (bool more, float[n] w) {
        more = Identity (c)
        w = Identity (v)
    }>
}
"""
ENDLESS = {"x": np.zeros(1, np.float32), "trips": np.array(2**62), "go": np.array(True)}


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """A graph that repeats as often as an input says."""
    path = tmp_path / "loop.onnx"
    onnx.save(onnx.parser.parse_model(LOOP), path)
    return path


def bomb(depth: int) -> bytes:
    """Return a graph of functions, each of which calls the next one twice."""
    functions = "".join(
        f'<domain: "d", opset_import: ["": 18, "d": 1]> f{n} (a) => (c) {{ b = {call}(a) c = {call}(b) }}\n'
        for n in range(depth)
        for call in [f"d.f{n + 1}" if n + 1 < depth else "Identity"]
    )
    head = '<ir_version: 9, opset_import: ["": 18, "d": 1]> g (float[n] x) => (float[n] y) { y = d.f0 (x) }\n'
    return onnx.parser.parse_model(head + functions).SerializeToString()


def test_run_ends_after_a_time_and_the_session_still_works(loop: Path) -> None:
    session = open_session(loop, threads=1)
    for _ in range(2):
        with pytest.raises(StoppedError, match=r"^took longer than 0\.1 s: a model$"), Call(0.1, "a model"):
            run_session(session, ["y"], ENDLESS)
        assert run_session(session, ["y"], ENDLESS | {"trips": np.array(3)}) == [np.zeros(1)]


def test_outer_calls_end_inner_ones(loop: Path) -> None:
    session = open_session(loop, threads=1)
    with pytest.raises(StoppedError), Call(0.1), Call(3600):
        run_session(session, ["y"], ENDLESS)


def test_another_thread_ends_a_run(loop: Path) -> None:
    session, call = open_session(loop, threads=1), Call()
    timer = threading.Timer(0.1, call.stop)
    timer.start()
    with pytest.raises(StoppedError, match="interrupted"), call:
        run_session(session, ["y"], ENDLESS)
    timer.join()


@pytest.mark.slow
def test_every_run_has_a_limit(loop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a graph, too."""
    monkeypatch.setenv("ZOO_MAX_GRAPH_SECONDS", "1")
    session = open_session(loop, threads=1)
    with pytest.raises(StoppedError, match="took longer than 1 s: raise ZOO_MAX_GRAPH_SECONDS"):
        run_session(session, ["y"], ENDLESS)
    large = loop.with_name("large.onnx")
    large.write_bytes(bomb(15))
    with pytest.raises(StoppedError, match=r"took longer than 1 s: .*large\.onnx: raise ZOO_MAX_GRAPH_SECONDS"):
        open_session(large, threads=1)
    monkeypatch.setenv("ZOO_MAX_GRAPH_SECONDS", "soon")
    with pytest.raises(UsageError, match="must be a positive whole number of seconds, got 'soon'"):
        run_session(session, ["y"], ENDLESS)


INTERRUPTED = """
import signal, sys, numpy as np
from zoo import signals
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.onnx_runtime.values import run_session
if sys.argv[2:]:  # as a command does
    signals.catch()
    signals.interrupt()
session = open_session(sys.argv[1], threads=1)
feeds = {"x": np.zeros(1, np.float32), "trips": np.array(2**62), "go": np.array(True)}
for _ in range(2):
    print("ready", flush=True)
    try:
        run_session(session, ["y"], feeds)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
run_session(session, ["y"], feeds | {"trips": np.array(1)})
assert signal.set_wakeup_fd(-1) == -1
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
@pytest.mark.parametrize(("arguments", "number"), [((), signal.SIGINT), (("command",), signal.SIGTERM)])
def test_signal_ends_a_run(loop: Path, arguments: tuple[str, ...], number: int) -> None:
    """As a ``KeyboardInterrupt``, though Python cannot handle a signal during a run."""
    command = [sys.executable, "-c", INTERRUPTED, str(loop), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            process.send_signal(number)
            assert process.stdout.readline() == "interrupted\n"
        _, err = process.communicate()
        timer.cancel()
    assert process.returncode == 0, err


def test_session_is_stopped(exported_model: Exported) -> None:
    """By its timeout, or from another thread. Other calls are unaffected."""
    many = ["time flies"] * 100_000
    with load_session(exported_model("gpt-tiny"), threads=1) as session:
        wanted = session.run("x", max_new_tokens=2)
        with pytest.raises(StoppedError, match=r"took longer than 0\.2 s: .*gpt-tiny"):
            session.run(many, max_new_tokens=2, timeout=0.2)
        assert session.run("x", max_new_tokens=2, timeout=60) == wanted
        timer = threading.Timer(0.2, session.interrupt)
        timer.start()
        with pytest.raises(StoppedError, match=r"interrupted: .*gpt-tiny"):
            session.run(many, max_new_tokens=2)
        timer.join()
        session.interrupt()  # nothing runs
        assert session.run("x", max_new_tokens=2) == wanted
        graph, feeds = session.graphs[0], {"input_ids": np.ones((1, 2), int), "attention_mask": np.ones((1, 2), int)}
        with pytest.raises(StoppedError, match="took longer than 0 s"):
            session.execute(graph, feeds, timeout=0)
        for timeout in ("1", True, -1, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="timeout must be a number of seconds"):
                session.run("x", timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": "2"}, "threads must be a whole number from 1 to 1024, got '2'"),
        ({"threads": True}, "threads must be a whole number from 1 to 1024, got True"),
        ({"threads": 1.5}, "threads must be a whole number from 1 to 1024, got 1.5"),
        ({"threads": 100_000}, "threads must be a whole number from 1 to 1024, got 100000"),
        ({"variant": 3}, "variant must be a string, got 3"),
        ({"task": 3}, "task must be a string, got 3"),
        ({"provider": 3}, "provider must be a string, got 3"),
        ({"provider": None}, "unknown provider None"),
        ({"memory": ["fast"]}, "memory must be a string"),
        ({"memory": None}, "unknown memory None"),
        ({"truncate": "128"}, "truncate must be True, False, None or a number of tokens, got '128'"),
        ({"truncate": np.ones(2)}, "truncate must be True, False, None or a number of tokens, got array"),
        ({"chat": "false"}, "chat must be True or False, got 'false'"),
        ({"unverified": np.ones(2)}, "unverified must be True or False, got array"),
        ({"special_tokens": None}, "special_tokens must be True or False, got None"),
        ({"provider_options": {"device_id": 1}}, "provider_options must be a mapping of strings to strings"),
        ({"tokenizer": 3}, "tokenizer must be a path, got 3"),
        ({"tokenizer": "a\0b"}, r"tokenizer must be a path, got 'a\\x00b'"),
        ({"tokenizer": b"bytes"}, "tokenizer must be a path, got b'bytes'"),
    ],
)
def test_arguments_of_wrong_types(exported_model: Exported, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_session(exported_model("gpt-tiny"), **arguments)


@pytest.mark.parametrize("directory", [3, None, b"model", "a\0b", ["model"]])
def test_directory_is_a_path(directory: Any) -> None:
    with pytest.raises(UsageError, match="directory must be a path, got "):
        load_session(directory)


class Unprintable:
    """A value without a ``repr``."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [Unprintable(), -(10**5000), "a" * 100_000], ids=["no repr", "integer", "text"])
def test_messages_about_odd_values_are_short(value: object, exported_model: Exported) -> None:
    with pytest.raises(UsageError, match="threads must be a whole number from 1 to 1024, got ") as caught:
        load_session(exported_model("gpt-tiny"), threads=value)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300
    with load_session(exported_model("gpt-tiny"), threads=1) as session:
        with pytest.raises(UsageError) as caught:
            session.run("x", max_new_tokens=value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 5000])
def test_names_that_no_file_can_have(name: str, exported_model: Exported) -> None:
    """A name that is too long is an error of the artefact."""
    with pytest.raises(ArtifactError, match=r"cannot read \(File name too long\): a") as caught:
        load_session(name)
    assert len(str(caught.value)) <= 4000
    with pytest.raises(ArtifactError, match=r"cannot read \(File name too long\): a"):
        load_session(exported_model("gpt-tiny"), tokenizer=name)


@pytest.mark.parametrize("size", [1.5, "2", True, 0, -1])
def test_batch_size_is_a_whole_number(exported_model: Exported, size: Any) -> None:
    message = "batch_size must be a whole number of at least 1, got "
    with load_session(exported_model("gpt-tiny"), threads=1) as session, pytest.raises(UsageError, match=message):
        session.run("x", batch_size=size)


def test_task_of_a_run_is_a_name(exported_model: Exported) -> None:
    with (
        load_session(exported_model("gpt-tiny"), threads=1) as session,
        pytest.raises(UsageError, match="task must be a string, got 3"),
    ):
        session.run("x", task=3)  # type: ignore[arg-type]


def test_inputs_that_contradict_each_other(exported_model: Exported) -> None:
    """Are refused in one line, those that only ONNX Runtime refuses too."""
    with load_session(exported_model("gpt-tiny"), threads=1) as session:
        (graph,) = session.graphs
        ids, mask = np.ones((2, 3), np.int64), np.ones((2, 3), np.int64)
        past = {tensor.name: np.zeros((2, 2, 4, 32), np.float32) for tensor in graph.past_tensors()}
        sound = {"input_ids": ids, "attention_mask": mask}
        assert session.execute(graph, sound)["logits"].shape[:2] == (2, 3)
        for feeds, kind, message in (
            ({"input_ids": ids}, UsageError, "missing input attention_mask: graph model"),
            (sound | {"input_ids": ids[0]}, ArtifactError, "input_ids must have 2 dimensions, got 1: graph model"),
            (sound | {"attention_mask": mask[:1]}, ArtifactError, "batch of attention_mask is 1, but 2 in another"),
            (sound | {"attention_mask": mask[:, :2]}, ArtifactError, "attention_mask must have the shape"),
            (sound | past, ArtifactError, "must have the shape"),
            (sound | {"input_ids": ids * 10**6}, ArtifactError, "input_ids must have integers from 0 to"),
            (sound | {"input_ids": -ids}, ArtifactError, "input_ids must have integers from 0 to"),
            (sound | {"input_ids": ids * 1.5}, ArtifactError, "input_ids must have integers, got float64"),
            (sound | {"input_ids": ids.astype(str)}, ArtifactError, "input_ids must have integers, got <U21"),
            (sound | {"input_ids": ids.astype(np.uint64) - 2}, ArtifactError, "input_ids must have integers from 0"),
            (sound | {"attention_mask": 2 * mask}, ArtifactError, "attention_mask must have integers from 0 to 1"),
            (sound | {name: value.astype(str) for name, value in past.items()}, ArtifactError, "must have numbers"),
        ):
            with pytest.raises(kind, match=message) as caught:
                session.execute(graph, feeds)
            assert "\n" not in str(caught.value)


TRUNCATED = """
import os, sys, zoo, zoo_runtime
with zoo_runtime.load_session(sys.argv[1], memory=sys.argv[2], threads=1) as session:
    session.run("hello", max_new_tokens=2)
    os.truncate(os.path.join(sys.argv[1], "model.safetensors"), 20_000)
    for use in (lambda: session.run("hello"), lambda: next(session.stream("hello"))):
        try:
            use()
        except zoo.ArtifactError as error:
            print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="maps files")
@pytest.mark.parametrize("memory", ["fast", "mapped"])
def test_truncated_weights_do_not_end_the_process(exported_model: Exported, memory: str, tmp_path: Path) -> None:
    """Reading a page that a mapped file no longer has is a SIGBUS."""
    model = shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model")
    command = [sys.executable, "-c", TRUNCATED, str(model), memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has been truncated while the session was open") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="overwrites a mapped file")
@pytest.mark.parametrize("memory", ["fast", "mapped"])
def test_altered_weights_do_not_change_answers(exported_model: Exported, memory: Any, tmp_path: Path) -> None:
    """A file that is written to is refused until it has its contents again; one that is replaced is not noticed."""
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    with load_session(model, memory=memory, threads=1) as session:
        wanted = session.run("hello", max_new_tokens=2)
        with weights.open("r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
        for _ in range(2):
            with pytest.raises(ArtifactError, match=r"has been altered while the session was open: .*\.safetensors"):
                session.run("hello")
        weights.write_bytes(whole)
        assert session.run("hello", max_new_tokens=2) == wanted
        weights.touch()
        assert session.run("hello", max_new_tokens=2) == wanted
        weights.unlink()
        weights.write_bytes(b"another file")
        assert session.run("hello", max_new_tokens=2) == wanted


FORKED = """
import os, sys, zoo_runtime
opened = zoo_runtime.open_session(os.path.join(sys.argv[1], "model.onnx"), threads=2)
session = zoo_runtime.load_session(sys.argv[1], threads=2)
session.run("hello", max_new_tokens=2)
child = os.fork()
if not child:
    if sys.argv[2] == "run":
        session.run("hello", max_new_tokens=2, timeout=60)
    elif sys.argv[2] == "delete":
        del session, opened
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("use", ["nothing", "run", "delete"])
def test_forked_process_exits(exported_model: Exported, use: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(exported_model("gpt-tiny")), use]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
