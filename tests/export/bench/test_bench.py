"""Benchmarks: the measured calls, equality of outputs, and limits derived from declarations."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from zoo.errors import ParityError, UsageError
from zoo.models import persist
from zoo.probe.inputs import empty_past
from zoo.registry import registry
from zoo_export.bench import bench_model, torch_backend
from zoo_export.bench.cases import BenchCase, OnnxBackend, feeds_of, make_cases
from zoo_export.bench.limits import Reading, bytes_read, closed_form, necessary_flops, weight_bytes
from zoo_export.bench.measure import check_outputs, in_turns
from zoo_export.bench.plot import plot_bench
from zoo_runtime import load_session

Exported = Callable[..., Path]

QUICK: dict[str, Any] = {"seconds": 0.005, "compiled": False}
WITHOUT_TORCH = """
import sys
from zoo.cli import main
status = main(["bench", sys.argv[1], "--no-torch", "--lengths", "3", "--seconds", "0.005", "--json"])
assert status == 0, status
assert "torch" not in sys.modules
"""


def numbers(value: Any) -> list[float]:
    """Yield every number in plain data."""
    if isinstance(value, dict | list):
        return [found for item in (value.values() if isinstance(value, dict) else value) for found in numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("gpt-tiny", [("model", "prefill"), ("model", "decode")]),
        ("bert-tiny", [("model", "encode")]),
        ("vit-tiny", [("model", "encode")]),
        ("transformer-tiny", [("encoder", "encode"), ("decoder", "prefill"), ("decoder", "decode")]),
    ],
)
def test_every_phase_of_every_graph_is_measured(
    name: str, phases: list[tuple[str, str]], exported_model: Exported
) -> None:
    result = bench_model(exported_model(name), batches=[1, 2], lengths=[5], **QUICK)
    assert (result["model"], result["provider"], result["left_out"]) == (name, "cpu", {})
    assert {"onnxruntime", "torch", "zoo", "python"} <= set(result["versions"])
    wanted = [
        (graph, phase, batch, 5) for graph in dict(phases) for batch in (1, 2) for g, phase in phases if g == graph
    ]
    assert [(c["graph"], c["phase"], c["batch"], c["length"]) for c in result["cases"]] == wanted
    waited = [case.pop("waited") for case in result["cases"]]  # exactly 0 on an idle machine
    assert all(part is None or 0 <= part < 1 for part in waited)
    found = numbers(result["cases"])
    assert len(found) > 20
    assert all(math.isfinite(number) and number > 0 for number in found)
    for case in result["cases"]:
        assert list(case["backends"]) == ["onnxruntime", "torch"]
        tokens = case["batch"] * (1 if case["phase"] == "decode" else 5)
        for backend in case["backends"].values():
            assert backend["best_seconds"] <= backend["seconds"]
            assert backend["tokens_per_second"] * backend["seconds"] == pytest.approx(tokens)
            assert backend["of_limit"] * backend["seconds"] == pytest.approx(case["limit"]["seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
def test_compiled_torch_is_measured(name: str, exported_model: Exported) -> None:
    """Its outputs are compared with eager torch first."""
    result = bench_model(exported_model(name), lengths=[5], seconds=0.005)
    if "no compiler" in str(result["left_out"]) or "InvalidCxxCompiler" in str(result["left_out"]):
        pytest.skip("no C++ compiler here")
    assert result["left_out"] == {}
    assert all("torch.compile" in case["backends"] for case in result["cases"])


@pytest.mark.slow
def test_compile_failures_are_reported(
    exported_model: Exported, monkeypatch: pytest.MonkeyPatch, zoo: Callable[..., Any]
) -> None:
    def broken(module: object, **_: object) -> Callable[..., Any]:
        def call(*_: object) -> None:
            raise RuntimeError("no compiler anywhere\nor more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    done = zoo("bench", exported_model("gpt-tiny"), "--lengths", 4, "--seconds", 0.005, "--json")
    reason = "model prefill 1 x 4: RuntimeError: no compiler anywhere"
    assert (done.status, done.json["left_out"]) == (0, {"torch.compile": reason})
    assert f"warning: torch.compile not measured: {reason}\n" in done.err
    assert all(list(case["backends"]) == ["onnxruntime", "torch"] for case in done.json["cases"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
def test_wrong_results_are_not_timed(name: str, exported_model: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch is wrong, which is detected as well."""

    def altered(stored: Any) -> torch.nn.Module:
        model = persist.load_directory(stored)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1 if parameter.ndim > 1 else 1)
        return model

    monkeypatch.setattr(torch_backend, "load_directory", altered)
    with pytest.raises(ParityError, match="differs from torch's"):
        bench_model(exported_model(name), lengths=[5], **QUICK)


def test_outputs_are_compared_by_size_shape_and_finiteness() -> None:
    wanted = np.array([[1.0, -2.0, 3.0]])
    check_outputs("what", [wanted * (1 + 9e-4)], [wanted], 1e-3)
    for found in (wanted * (1 + 1.1e-3), wanted[0], wanted * np.nan, np.zeros_like(wanted)):
        with pytest.raises(ParityError, match="what"):
            check_outputs("what", [found], [wanted], 1e-3)


def test_repeated_decode_calls_use_the_same_token(exported_model: Exported) -> None:
    """Its logits equal those of one pass over all tokens by the session's executor."""
    with load_session(exported_model("gpt-tiny")) as session:
        case = BenchCase(session.graphs[0], "decode", 2, 6)
        feeds = feeds_of(session, case)
        assert {name: value.shape for name, value in feeds.items()} == {"input_ids": (2, 7), "attention_mask": (2, 7)}
        call = OnnxBackend(session)(case, feeds)
        first, second = (np.array(call()[0]) for _ in range(2))
        past = empty_past(case.graph, 2, session.dtype)
        whole = session.execute(case.graph, {**feeds, **past})["logits"][:, -1]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, whole, rtol=1e-4, atol=1e-5)


def test_invalid_lengths_and_variants_are_rejected(exported_model: Exported) -> None:
    """A decoder needs one more position for the token after its prompt."""
    gpt, bert = exported_model("gpt-tiny"), exported_model("bert-tiny")
    with pytest.raises(UsageError, match="32 positions, and decoding needs one more: length 32: choose at most 31"):
        bench_model(gpt, lengths=[4, 32], **QUICK)
    with pytest.raises(UsageError, match="the model has 32 positions: length 33: choose at most 32"):
        bench_model(bert, lengths=[33], **QUICK)
    with load_session(gpt) as session:
        assert {case.length for case in make_cases(session, [1], None)} == {31}
        assert make_cases(session, [1], [31])
    with load_session(bert) as session:
        assert {case.length for case in make_cases(session, [1], None)} == {32}


@pytest.mark.parametrize("settings", [[], ["num_kv_heads=2", "tie_embeddings=false"]])
def test_flops_equal_the_closed_form(settings: list[str]) -> None:
    """A model of several graphs has a closed form only for their sum."""
    gpt = registry().resolve("gpt-tiny", settings)
    for phase, batch, length in (("prefill", 1, 9), ("prefill", 3, 1), ("decode", 2, 30)):
        case = BenchCase(gpt.graphs[0], phase, batch, length)
        assert closed_form(gpt, case) == torch_backend.count_flops(gpt, case)
    pair = registry().resolve("transformer-tiny")
    assert pair.cost is not None
    length = pair.config.max_seq_len
    cases = [BenchCase(pair.graphs[0], "encode", 1, length), BenchCase(pair.graphs[1], "prefill", 1, length)]
    assert closed_form(pair, cases[0]) is None
    # The encoder also projects the keys and values that the decoder attends to: each is counted once.
    assert sum(torch_backend.count_flops(pair, case) for case in cases) == length * pair.cost.flops


@pytest.mark.parametrize("count", [closed_form, torch_backend.count_flops])
@pytest.mark.parametrize("batch", [1, 3])
def test_unused_logits_are_not_counted(count: Any, batch: int) -> None:
    gpt = registry().resolve("gpt-tiny")
    inputs = [SimpleNamespace(name="input_ids"), SimpleNamespace(name="logits_to_keep")]
    session: Any = SimpleNamespace(
        stored=SimpleNamespace(spec=gpt), sessions={"model": SimpleNamespace(get_inputs=lambda: inputs)}
    )
    case = BenchCase(gpt.graphs[0], "prefill", batch, 9)
    logits = 2 * gpt.config.hidden_size * gpt.config.vocab_size
    assert necessary_flops(session, case, count) == count(gpt, case) - batch * 8 * logits
    del inputs[1]
    assert necessary_flops(session, case, count) == count(gpt, case)


def test_logits_use_the_target_vocabulary() -> None:
    """If the target has its own vocabulary."""
    pair = registry().resolve("transformer-tiny", ["target_vocab_size=300"])
    inputs = [SimpleNamespace(name="logits_to_keep")]
    session: Any = SimpleNamespace(
        stored=SimpleNamespace(spec=pair), sessions={"decoder": SimpleNamespace(get_inputs=lambda: inputs)}
    )
    case, count = BenchCase(pair.graphs[1], "prefill", 1, 9), torch_backend.count_flops
    logits = 2 * pair.config.hidden_size * 300
    assert necessary_flops(session, case, count) == count(pair, case) - 8 * logits


def test_bytes_count_weights_and_caches(exported_model: Exported) -> None:
    """The position table is excluded, since one row is read; the token table is included as the tied head."""
    folder = exported_model("gpt-tiny")
    weights = load_file(folder / "model.safetensors")
    read = sum(value.nbytes for name, value in weights.items() if name != "position_embedding.weight")
    assert 0 <= weight_bytes((folder / "model.onnx").read_bytes()) - read < 200  # the graph's own constants
    with load_session(folder) as session:
        graph = session.graphs[0]
        sizes = {
            length: bytes_read(session, case, feeds_of(session, case))
            for length in (3, 9)
            for case in [BenchCase(graph, "decode", 2, length)]
        }
    config = registry().resolve("gpt-tiny").config
    assert sizes[9] - sizes[3] == 2 * 6 * config.num_layers * 2 * config.hidden_size * 4


def test_calls_take_turns() -> None:
    order: list[str] = []
    times = in_turns({name: lambda name=name: order.append(name) or () for name in "abc"}, 0.2)
    assert [len(found.turns) for found in times.values()] == [10, 10, 10]
    changes = [name for place, name in enumerate(order) if place == 0 or order[place - 1] != name]
    assert changes == list("abc") * 10
    assert len(order) > 100
    assert all(0 < found.best <= found.median for found in times.values())


def test_slow_calls_get_three_turns() -> None:
    calls: list[None] = []

    def call() -> tuple[()]:
        time.sleep(0.001)
        calls.append(None)
        return ()

    assert len(in_turns({"a": call}, 1e-6)["a"].turns) == len(calls) == 3


@pytest.mark.slow
def test_unknown_limits_are_not_reported(exported_model: Exported, zoo: Callable[..., Any], tmp_path: Path) -> None:
    """Without torch, FLOPs of models with several graphs are unknown, but the bytes of decode phases are known."""
    folder = exported_model("transformer-tiny")
    arguments = ("bench", folder, "--lengths", 4, "--seconds", 0.005, "--no-torch")
    result = zoo(*arguments, "--json").json
    known = [(case["phase"], case["limit"]["bound"]) for case in result["cases"]]
    assert known == [("encode", None), ("prefill", None), ("decode", "memory")]
    of_limit = [case["backends"]["onnxruntime"]["of_limit"] for case in result["cases"]]
    assert of_limit[:2] == [None, None]
    assert of_limit[2] > 0
    assert sum("limit: " in line for line in zoo(*arguments).out.splitlines()) == 1
    if find_spec("matplotlib") is not None:
        plot_bench(result).write(tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.slow
def test_torch_is_not_imported_without_need(exported_model: Exported, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(exported_model("gpt-tiny"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "zoo.bench/1"
    for case in result["cases"]:
        assert list(case["backends"]) == ["onnxruntime"]
        assert case["backends"]["onnxruntime"]["times_torch"] is None
        assert case["limit"]["flops"] > 0


def test_reading_is_as_fast_as_the_faster_operator() -> None:
    """Both read the same bytes: at least as many as asked, by less than a column more."""
    reading = Reading(1_000_000, "cpu", threads=1)
    assert reading.size - 1024 < 1_000_000 <= reading.size
    for call in reading.calls.values():
        call()
    slow, fast = reading.calls
    assert reading.speed({slow: 2.0, fast: 0.5}) == reading.speed({slow: 0.5, fast: 2.0}) == 2 * reading.size


def test_variants_of_openvino_are_measured_beside_other_engines(
    exported_model: Exported, zoo: Callable[..., Any]
) -> None:
    result = zoo("bench", exported_model("gpt-tiny"), "--variant", "openvino-int8")
    result.failed(2, "--variant openvino-int8", "give --engines instead")


def test_table_has_a_line_per_backend_and_limit(exported_model: Exported, zoo: Callable[..., Any]) -> None:
    done = zoo(
        "bench", exported_model("gpt-tiny"), "--lengths", "4,5", "--batch", "2", "--seconds", 0.005, "--no-compile"
    )
    assert done.status == 0
    title, empty, header, *rows, end, past = done.out.splitlines()
    assert title.startswith("gpt-tiny: float32 on cpu")
    assert empty == end == ""
    assert past == "past: 8.2 kB for 2 x 4, 10.2 kB for 2 x 5"  # 2 layers, 64 keys and 64 values of 4 bytes
    assert header.split()[:2] == ["GRAPH", "PHASE"]
    assert len(rows) == 3 * 4
    assert sum("1.00x" in row and " torch " in row for row in rows) == 4
    assert sum("limit: " in row for row in rows) == 4
    assert all(line.startswith("warning: threads waited") for line in done.err.splitlines())


@pytest.mark.parametrize(("waited", "warned"), [(None, 0), (0.09, 0), (0.4, 1)])
def test_busy_machine_causes_a_warning(
    waited: float | None, warned: int, zoo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = dict.fromkeys(("model", "variant", "dtype", "provider", "threads", "cpu"), "")
    result = {**facts, "left_out": {}, "cases": [{"waited": waited}]}
    monkeypatch.setattr("zoo_export.bench.bench_model", lambda *_, **__: result)
    monkeypatch.setattr("zoo_export.bench.engines.bench_engines", lambda *_, **__: result)
    for options in ((), ("--engines",)):
        done = zoo("bench", "folder", "--json", *options)
        assert done.status == 0
        assert done.err.count("warning: threads waited for a free core for 40% of the time") == warned


def test_invalid_plot_is_rejected_before_measuring(
    exported_model: Exported, zoo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = exported_model("gpt-tiny")
    monkeypatch.setattr("zoo_export.bench.bench_model", lambda *_, **__: pytest.fail("it was measured"))
    zoo("bench", folder, "--plot", "a.gif").failed(2, "unsupported figure format: a.gif: name it *.png or *.svg")
    Path("a.svg").write_text("mine")
    zoo("bench", folder, "--plot", "a.svg").failed(2, "already exists: a.svg: use --force to replace it")
    Path("b.svg").mkdir()
    zoo("bench", folder, "--plot", "b.svg", "--force").failed(2, "exists and is not a file: b.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    zoo("bench", folder, "--plot", "c.png").failed(2, "attention-zoo[plot]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "b.svg"]
    assert Path("a.svg").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("A.SVG", b"<?xml")])
def test_plot_is_written(name: str, start: bytes, exported_model: Exported, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra plot, is not installed")
    result = bench_model(exported_model("transformer-tiny"), lengths=[4, 5], **QUICK)
    path = tmp_path / name
    path.write_text("before")
    plot_bench(result).write(path, force=True)
    assert path.read_bytes().startswith(start)
    assert [item.name for item in tmp_path.iterdir()] == [name]
