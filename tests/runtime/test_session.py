"""Sessions: they run on the requested provider or fail with one line, without importing torch."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from tests.exported import LIVELY, sign_export
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.plugins import ZooWarning
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.placement import placement
from zoo_runtime.onnx_runtime.providers import loading_problem, open_session

Exported = Callable[..., Path]
ROWS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=7), min_size=1, max_size=9)
"""Each text fits in 32 bytes."""

RUN_WITHOUT_TORCH = """
import sys
import zoo_runtime
with zoo_runtime.load_session(sys.argv[1]) as session:
    result = session.run("time flies", max_new_tokens=2)
assert session.task == "text-generation" and len(result["generated_ids"]) == 2, result
heavy = {"torch", "onnx", "onnx_ir", "onnxscript", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""

START = """
import sys
from zoo.cli import main
main(["run", sys.argv[1], "time flies", "--max-new-tokens", "2"])
unused = set(sys.argv[2:]) & set(sys.modules)
assert not unused, unused
"""
UNUSED = ("torch", "onnx", "transformers", "psutil", "ml_dtypes", "importlib.metadata", "email", "subprocess",
          "zoo.plugins.isolation", "zoo.training.settings", "zoo.plots", "zoo.tokenizers.chat.rendering",
          "zoo_runtime.batch", "zoo_runtime.files.results", "zoo_runtime.openvino")  # fmt: skip
"""Modules that a single text on the command line does not need; their imports took a third of its start."""


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(1000)], ids=["empty", "text", "zeros"])
def test_invalid_graph_files_are_rejected(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(garbage)
    with pytest.raises(ArtifactError, match=r"onnxruntime cannot load the graph .*model\.onnx"):
        open_session(path)
    with pytest.raises(ArtifactError, match="onnxruntime cannot load the graph"):
        open_session(garbage)


def test_missing_graph_and_weights_are_rejected(exported_copy: Callable[..., Path], tmp_path: Path) -> None:
    folder = exported_copy("bert-tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        open_session(folder / "model.onnx")
    with pytest.raises(ArtifactError, match=r"absent\.onnx"):
        open_session(tmp_path / "absent.onnx")


@pytest.mark.parametrize("optimize", [True, False], ids=["optimised", "as it is"])
def test_placement_names_the_provider_of_every_node(exported_model: Callable[..., Path], optimize: bool) -> None:
    session = open_session(exported_model("bert-tiny") / "model.onnx", placements=True, optimize=optimize)
    placed = placement(session)
    assert set(placed) == {"CPUExecutionProvider"}
    assert placed["CPUExecutionProvider"] > 20
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_bytes_find_their_weights_and_equal_the_file(exported_model: Callable[..., Path]) -> None:
    folder = exported_model("bert-tiny")
    feeds = {
        "input_ids": np.array([[1, 2, 3]]),
        "attention_mask": np.array([[1, 1, 1]]),
        "token_type_ids": np.array([[0, 1, 0]]),
    }
    by_path = open_session(folder / "model.onnx").run(None, feeds)
    by_bytes = open_session((folder / "model.onnx").read_bytes(), weights=folder).run(None, feeds)
    for one, other in zip(by_path, by_bytes, strict=True):
        np.testing.assert_array_equal(one, other)


def test_unavailable_cuda_is_one_error_without_output(capfd: pytest.CaptureFixture[str]) -> None:
    problem = loading_problem("cuda")
    if problem is None:
        pytest.skip("CUDA loads here")
    with pytest.raises(UsageError) as caught:
        open_session(_identity(), provider="cuda")
    message = str(caught.value)
    assert message == problem
    assert message.count("\n") == 0
    assert "CUDAExecutionProvider" in message
    assert "provider='cuda'" in message
    assert message.endswith("pip install onnxruntime-gpu[cuda,cudnn]")
    assert capfd.readouterr().out == ""


def test_opening_and_failing_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert loading_problem("cpu") is None
    open_session(_identity())
    with pytest.raises(ArtifactError):
        open_session(b"garbage")
    assert capfd.readouterr() == ("", "")


def test_running_a_model_does_not_import_torch(exported_model: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_WITHOUT_TORCH, str(exported_model("gpt-tiny"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_first_answer_imports_nothing_that_it_does_not_need(
    exported_model: Callable[..., Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", START, str(exported_model("gpt-tiny")), *UNUSED]
    environment = {**os.environ, "ZOO_PLUGINS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr


# Results depend only on the input.


@settings(deadline=None, max_examples=40)
@given(texts=ROWS, batch_size=st.integers(1, 10))
def test_embeddings_do_not_depend_on_the_batch(exported_model: Exported, texts: list[str], batch_size: int) -> None:
    session = _kept(exported_model("bert-tiny"))
    together = session.run(texts, task="sentence-embedding", batch_size=batch_size)
    for text, result in zip(texts, together, strict=True):
        alone = session.run(text, task="sentence-embedding")
        assert result["tokens"] == alone["tokens"] == len(text.encode())
        np.testing.assert_allclose(result["embedding"], alone["embedding"], rtol=0, atol=2e-6)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(texts=ROWS, batch_size=st.integers(1, 10), sample=st.booleans())
def test_generated_texts_do_not_depend_on_the_batch(
    exported_with: Exported, texts: list[str], batch_size: int, sample: bool
) -> None:
    """A sampled text also depends on its number: alone, the same prompt gives another text unless it was the first."""
    session = _kept(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]), unverified=True)
    options: dict[str, Any] = {"max_new_tokens": 4} | ({"temperature": 1.0, "seed": 3} if sample else {})
    together = session.run(texts, batch_size=batch_size, **options)
    wanted = session.run(texts, batch_size=1, **options)
    assert [result["generated_ids"] for result in together] == [result["generated_ids"] for result in wanted]
    assert together[0]["generated_ids"] == session.run(texts[0], **options)["generated_ids"]


@settings(deadline=None, max_examples=10)
@given(texts=ROWS)
def test_features_and_their_padding(exported_model: Exported, texts: list[str]) -> None:
    """One vector per token, none for padding."""
    session = _kept(exported_model("bert-tiny"))
    for text, result in zip(texts, session.run(texts), strict=True):
        np.testing.assert_allclose(
            result["last_hidden_state"], session.run(text)["last_hidden_state"], rtol=0, atol=1e-5
        )
        assert len(result["last_hidden_state"]) == len(text.encode())


@pytest.mark.parametrize("options", [{"memory": "mapped"}, {"threads": 1}], ids=str)
def test_threads_memory_and_batches_do_not_change_results(exported_model: Exported, options: dict[str, Any]) -> None:
    texts = ["time flies", "x", "an arrow"]
    with load_session(exported_model("bert-tiny")) as one, load_session(exported_model("bert-tiny"), **options) as two:
        for a, b in zip(one.run(texts), two.run(texts), strict=True):
            np.testing.assert_allclose(a["last_hidden_state"], b["last_hidden_state"], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_rows_are_read_one_window_ahead(exported_model: Exported) -> None:
    """No more than needed for the requested results."""
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for number in range(10_000):
            read += 1
            yield f"{number}"

    with load_session(exported_model("bert-tiny")) as session:
        answers = session.map(texts(), task="sentence-embedding", batch_size=256)
        assert read == 0
        ahead = 0
        for done, answer in enumerate(answers, 1):
            assert answer.error is None
            assert (answer.number, answer.input) == (done, str(done - 1))
            ahead = max(ahead, read - done)
    assert read == done == 10_000
    assert ahead <= 1024


def test_bad_input_does_not_affect_others(exported_model: Exported) -> None:
    with load_session(exported_model("bert-tiny")) as session:
        answers = list(session.map(["a", "", "b", 7, [1, True], "y" * 33], batch_size=1))
        assert [answer.error is None for answer in answers] == [True, False, True, False, False, False]
        with pytest.raises(ArtifactError, match="empty input: input 2"):
            session.run(["a", ""])
        ids = [np.int64(97)]
        np.testing.assert_array_equal(session.run(ids)["last_hidden_state"], session.run("a")["last_hidden_state"])
        assert session.run([]) == []
        with pytest.raises(UsageError, match="batch_size must be a whole number of at least 1, got 0"):
            session.run("a", batch_size=0)
        with pytest.raises(UsageError, match="feature-extraction does not support streaming"):
            session.stream("a")


# Lifetime and sharing.


def test_closed_session_cannot_run(exported_model: Exported) -> None:
    with load_session(exported_model("gpt-tiny")) as session:
        assert "on cpu" in repr(session)
        runner = session.runner()
    session.close()
    assert "closed" in repr(session)
    for use in (
        lambda: session.run("x"),
        lambda: session.run([]),
        lambda: session.map(["x"]),
        lambda: session.stream("x"),
        lambda: list(session.pieces(runner, "x")),
        lambda: session.placement(),
        lambda: session.sessions,
    ):
        with pytest.raises(UsageError, match="the session is closed"):
            use()


def test_stream_ends_with_its_session(exported_model: Exported) -> None:
    session = load_session(exported_model("gpt-tiny"), threads=1)
    pieces = session.stream("hello", max_new_tokens=20)
    next(pieces)
    session.close()
    with pytest.raises(UsageError, match="the session is closed"):
        next(pieces)


def test_threads_share_a_session(exported_with: Exported, exported_model: Exported) -> None:
    """Each thread has the results of a single thread, and stdout is unchanged."""
    stdout, texts = sys.stdout, [f"time flies {n}" for n in range(24)]
    with load_session(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]), unverified=True) as gpt:
        wanted = [gpt.run(text, max_new_tokens=6) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda text: gpt.run(text, max_new_tokens=6), texts)) == wanted
            assert ["".join(pieces) for pieces in pool.map(lambda text: list(gpt.stream(text, max_new_tokens=6)), texts)
                    ] == [result["generated"] for result in wanted]  # fmt: skip
    assert sys.stdout is stdout
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(load_session, [exported_model("bert-tiny")] * 8))
    assert sys.stdout is stdout
    first, *others = (session.run("x")["last_hidden_state"] for session in opened)
    for other in others:
        np.testing.assert_array_equal(other, first)


FORK = """
import multiprocessing, os, sys, threading
import zoo, zoo_runtime

session = zoo_runtime.load_session(sys.argv[1], threads=2, unverified=True)
wanted = session.run("time flies", max_new_tokens=4)
runner = session.runner(max_new_tokens=4)

def work(use):
    if use == "runner":
        assert next(session.answer(runner, [zoo_answer])).result == wanted
    elif use == "threads":
        found = []
        threads = [threading.Thread(target=lambda: found.append(session.run("time flies", max_new_tokens=4)))
                   for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert found == [wanted] * 4
    elif use == "close":
        session.close()
    elif use == "again":
        child = multiprocessing.get_context("fork").Process(target=work, args=("threads",))
        child.start(); child.join(); assert child.exitcode == 0

from zoo_runtime import Answer
zoo_answer = Answer(1, "time flies")
for use in ("runner", "threads", "close", "nothing", "again"):
    child = multiprocessing.get_context("fork").Process(target=work, args=(use,))
    child.start()
    child.join(30)
    assert child.exitcode == 0, (use, child.exitcode)
    assert session.run("time flies", max_new_tokens=4) == wanted
print("done")
"""


def test_forked_process_reopens_the_session(exported_with: Exported) -> None:
    command = [sys.executable, "-c", FORK, str(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# Choice of export and provider.


def test_auto_warns_when_using_the_cpu(exported_model: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    """Library calls print nothing."""
    problem = loading_problem("cuda")
    capfd.readouterr()
    told = "verified on cpu, but running on cuda" if problem is None else f"running on the CPU ({problem})"
    with (
        pytest.warns(ZooWarning, match=re.escape(told)),
        load_session(exported_model("bert-tiny"), provider="auto") as session,
    ):
        assert session.provider == ("cuda" if problem is None else "cpu")
        assert session.run("x")["tokens"] == 1
    assert capfd.readouterr() == ("", "")


def test_unavailable_provider_is_not_replaced(exported_model: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    problem = loading_problem("cuda")
    if problem is None:
        pytest.skip("CUDA loads here")
    capfd.readouterr()
    with pytest.raises(UsageError) as caught:
        load_session(exported_model("bert-tiny"), provider="cuda")
    assert str(caught.value) == problem
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": "cdua"}, "unknown provider 'cdua': did you mean 'cuda'"),
        ({"threads": 0}, "threads must be a whole number from 1 to 1024, got 0"),
        ({"threads": 99_999_999_999}, "threads must be a whole number from 1 to 1024, got 99999999999"),
        ({"memory": "maped"}, "unknown memory 'maped': did you mean 'mapped'"),
        ({"dtype": "int9"}, "this model is not available in 'int9': .*: did you mean 'int8' or 'int4'"),
        ({"variant": "cpus"}, "unknown variant 'cpus': .*: did you mean 'cpu'"),
        ({"variant": "cpu", "dtype": "int8"}, "give only one of them"),
    ],
)
def test_unknown_exports_are_rejected(exported_model: Exported, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_session(exported_model("bert-tiny"), **options)


def test_provider_options_are_checked(exported_model: Exported, zoo: Callable[..., Any]) -> None:
    """ONNX Runtime ignores unknown options of the CPU provider, which has none."""
    folder = exported_model("bert-tiny")
    for options, message in (
        ({"use_arena": "0"}, "CPUExecutionProvider has no option 'use_arena': provider_options: none are available"),
        ({"device_id": "1"}, "device_id cannot be set: provider_options: .* CUDA_VISIBLE_DEVICES"),
    ):
        with pytest.raises(UsageError, match=message):
            load_session(folder, provider_options=options)
    zoo("run", folder, "x", "--provider-option", "use_arena=0").failed(2, "'use_arena': --provider-option")
    zoo("run", folder, "x", "--provider-option", "use_arena").failed(2, "'use_arena' is not KEY=VALUE")


@pytest.mark.parametrize(("threads", "spins"), [(None, "1"), (1, "1"), (1024, "0")])
def test_threads_beyond_the_cores_do_not_spin(exported_model: Exported, threads: int | None, spins: str) -> None:
    """A run of 1024 threads that busy-wait takes minutes on a few cores."""
    session = open_session(exported_model("bert-tiny") / "model.onnx", threads=threads)
    assert session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == spins


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"dtype": "int8"}, "quantize {} --dtype int8"),
        ({"dtype": "int4"}, "quantize {} --dtype int4"),
        ({"dtype": "float16"}, "quantize {} --dtype float16"),
        ({"dtype": "bfloat16"}, "quantize {} --dtype bfloat16"),
        ({"dtype": torch.float16}, "quantize {} --dtype float16"),
        ({"variant": "cpu"}, "export {} --onnx --profile cpu"),
        ({"variant": "generate"}, "export {} --onnx --generate"),
    ],
)
def test_missing_export_names_its_command(exported_model: Exported, options: dict[str, Any], command: str) -> None:
    folder = exported_model("bert-tiny")
    with pytest.raises(ArtifactError, match=f"zoo {command.format(folder)}$"):
        load_session(folder, **options)
    assert load_session(folder, dtype="float32").export.variant == ""
    assert load_session(folder, dtype=torch.float32).export.variant == ""
    assert load_session(folder, variant="").export.variant == ""


@pytest.mark.slow
def test_best_export_for_the_provider_is_chosen(exported_copy: Exported, seal: Callable[[Path], None]) -> None:
    """The provider's own if verified, otherwise the portable one."""

    def discredit(name: str) -> None:
        evidence = json.loads((folder / name).read_text())
        evidence["verified"] = False
        (folder / name).write_text(json.dumps(evidence))
        seal(folder)

    def taken(**options: Any) -> str:
        with load_session(folder, **options) as session:
            assert len(session.run("time", max_new_tokens=2)["generated_ids"]) == 2
            return session.export.variant

    folder = exported_copy("gpt-tiny")
    assert taken() == ""
    sign_export(folder, options=Options(profile="cpu"))
    assert taken() == taken(dtype="float32") == taken(variant="cpu") == "cpu"
    assert taken(variant="") == ""
    discredit("parity.cpu.json")
    assert taken() == taken(unverified=True) == ""
    with pytest.raises(ParityError, match="not verified"):
        taken(variant="cpu")
    assert taken(variant="cpu", unverified=True) == "cpu"
    discredit("parity.json")
    with pytest.raises(ParityError, match="not verified"):
        taken()
    assert taken(unverified=True) == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_dtype_selects_its_export(exported_copy: Exported, zoo: Callable[..., Any], dtype: str) -> None:
    folder = exported_copy("gpt-tiny")
    assert zoo("quantize", folder, "--dtype", dtype).status == 0
    with load_session(folder, dtype=dtype) as session, load_session(folder) as plain:
        assert (session.export.variant, plain.export.variant) == (dtype, "")
        assert session.run("time", max_new_tokens=1)["tokens"] == 4


# Non-finite weights.

TASKS = [
    pytest.param("bert-tiny", (), {}, "feature-extraction", id="features"),
    pytest.param("bert-tiny", (), {}, "sentence-embedding", id="pooled features"),
    pytest.param("bert-tiny", ("task=fill-mask",), {"noise": True}, "fill-mask", id="masks"),
    pytest.param("gpt-tiny", (), {}, "text-generation", id="generation"),
    pytest.param("gpt-tiny", (), {}, "beams", id="beams"),
    pytest.param("bert-tiny", ("task=sentence-embedding",), {}, "sentence-embedding", id="embedding",
                 marks=pytest.mark.slow),
    pytest.param("bert-tiny", ("task=text-classification", "num_classes=3"), {"noise": True}, "text-classification",
                 id="classes", marks=pytest.mark.slow),
    pytest.param("bert-tiny", ("task=token-classification",), {}, "token-classification", id="classes of tokens",
                 marks=pytest.mark.slow),
    pytest.param("bert-tiny", ("task=replaced-token-detection",), {}, "replaced-token-detection", id="replaced tokens",
                 marks=pytest.mark.slow),
    pytest.param("transformer-tiny", (), {}, "text2text-generation", id="translation", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "changes", "options", "task"), TASKS)
def test_non_finite_weights_are_reported(
    exported_model: Exported, tmp_path: Path, seal: Any, name: str, changes: Any, options: Any, task: str, value: float
) -> None:
    folder = tmp_path / "model"
    subprocess.run(["cp", "-r", exported_model(name, *changes, **options), folder], check=True)
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    poison = np.full((len(data) - start) // 4, value, np.float32)
    (folder / "model.safetensors").write_bytes(data[:start] + poison.tobytes())
    seal(folder)
    chosen = {"num_beams": 2} if task == "beams" else {"task": task}
    with load_session(folder, unverified=True) as session:
        answers = list(session.map(["a <mask>", "b <mask>"], **chosen))
        assert [answer.number for answer in answers] == [1, 2]
        for answer in answers:
            assert isinstance(answer.error, ArtifactError), answer
            assert re.search("output contains NaN or infinity|logits of new token 1 are not finite", str(answer.error))
            assert f"input {answer.number}" in str(answer.error)
            assert answer.result == {}


_SESSIONS: dict[Path, Any] = {}


def _kept(folder: Path, **options: Any) -> Any:
    """Keep one session for all examples of a property."""
    if folder not in _SESSIONS:
        _SESSIONS[folder] = load_session(folder, **options)
    return _SESSIONS[folder]


def _identity() -> bytes:
    """Build a graph with one node."""
    from onnx import parser

    text = '<ir_version: 10, opset_import: ["": 20]> probe (float[1] x) => (float[1] y) { y = Identity(x) }'
    data: bytes = parser.parse_model(text).SerializeToString()
    return data


def test_type_without_a_kernel_is_reported() -> None:
    text = '<ir_version: 10, opset_import: ["" : 23]> g (bfloat16[n] x) => (bfloat16[n] y) { [log] y = Log (x) }'
    with pytest.raises(ArtifactError, match="onnxruntime has no kernel on cpu for Log with the types of node 'log'"):
        open_session(parser.parse_model(text).SerializeToString())
