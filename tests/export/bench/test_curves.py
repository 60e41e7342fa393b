"""Curves: parsing of lengths, measurements in separate processes, and the fitted growth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo import plugins
from zoo.artifact import Export, ModelDirectory
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.registry import registry
from zoo_export.bench import curves, points
from zoo_export.bench.curves import below_from, bench_curves, growth
from zoo_export.bench.plot import plot_bench
from zoo_export.bench.points import MEASURED, OUT_OF_MEMORY, measure_point
from zoo_export.cli.bench import command
from zoo_export.cli.curves import growth_rows, table_rows
from zoo_export.comparison import Comparison
from zoo_export.parity.compare import compare
from zoo_export.parity.evidence import write_export
from zoo_export.parity.report import Report
from zoo_export.trace.make import make_graphs

Exported = Callable[..., Path]

TINY = """schema = 1
[models.curve-full]
base = "bert-tiny"
config = { vocab_size = 20, max_seq_len = 64, hidden_size = 8, num_layers = 1, num_heads = 2 }
[models.curve-linformer]
base = "curve-full"
config = { attention = "linformer", attention_rank = 4 }
"""
"""Models whose verification takes a second."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure two presets at two lengths."""
    folder = tmp_path_factory.mktemp("curves")
    (folder / "zoo.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.chdir(folder)
        plugins.select(plugins.Selection(third_party=False))
        found = bench_curves(["curve-*"], [8, 16], baseline="curve-linformer", threads=1, seconds=0.01)
        plugins.select(plugins.Selection())
        assert [path.name for path in folder.iterdir()] == ["zoo.toml"]
    return found


def lengths(text: str) -> list[int]:
    """Parse a text as ``--lengths`` does."""
    return command.make_context("bench", ["--lengths", text]).params["lengths"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("128..1024", [128, 256, 512, 1024]),
        ("128..1000", [128, 256, 512, 1000]),
        ("3..3", [3]),
        ("1..2", [1, 2]),
        ("500,128,128", [500, 128]),
    ],
)
def test_range_doubles_up_to_its_end(text: str, wanted: list[int]) -> None:
    assert lengths(text) == wanted


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_ranges_grow_by_at_most_a_factor_of_two(first: int, last: int) -> None:
    if first > last:
        with pytest.raises(UsageError, match=f"the range {first}..{last} is empty: --lengths: write {last}..{first}"):
            lengths(f"{first}..{last}")
        return
    found = lengths(f"{first}..{last}")
    assert (found[0], found[-1]) == (first, last)
    assert all(one < other <= 2 * one for one, other in pairwise(found))
    assert all(other == 2 * one for one, other in pairwise(found[:-1]))


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--lengths", "0..8"], ("'0..8' is not a range of positive numbers", "--lengths", "write 1,8 or 128..16384")),
        (["--lengths", "..8"], ("'..8' is not a range",)),
        (["--lengths", "1..2..3"], ("'1..2..3' is not a range",)),
        (["--lengths", "1.5..8"], ("'1.5..8' is not a range",)),
        (["--lengths", "some..more"], ("'some..more' is not a range",)),
        (["--lengths", "8..4"], ("the range 8..4 is empty", "write 4..8")),
        (["absent-*", "--lengths", "8..16"], ("no preset matches 'absent-*'", "zoo list")),
        (["gpt-tin", "--lengths", "8..16"], ("unknown model 'gpt-tin'", "did you mean 'gpt-tiny'")),
        (["vit-tiny", "--lengths", "8..16"], ("inputs have a fixed length: vit-tiny",)),
        (["gpt-tiny", "--lengths", "8..129"], ("the model has 128 positions: gpt-tiny, length 129", "at most 128")),
        (
            ["gpt-tiny", "--lengths", "8..9", "--baseline", "gpt"],
            ("baseline 'gpt' is not among the models", "known: gpt-tiny"),
        ),
        (["gpt-tiny", "bert-tiny"], ("curves need lengths", "--lengths 128..16384")),
        ([], ("nothing to measure", "--lengths 128..16384")),
        (["gpt-tiny", "--lengths", "8..9", "--batch", "2"], ("--batch is not for curves",)),
        (["gpt-tiny", "--lengths", "8..9", "--no-torch"], ("--torch is not for curves",)),
        (["folder", "--baseline", "gpt-tiny"], ("--baseline is only for curves",)),
        (["gpt-tiny", "--lengths", "8..9", "--plot", "a.gif"], ("unsupported figure format: a.gif",)),
    ],
)
def test_invalid_requests_are_rejected_before_measuring(
    arguments: list[str], fragments: tuple[str, ...], zoo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "_prepare", lambda *_: pytest.fail("it was built"))
    zoo("bench", *arguments).failed(2, *fragments)


@given(st.floats(-1, 4), st.floats(1e-6, 1e6), st.integers(1, 100))
def test_growth_of_power_laws_is_exact(power: float, factor: float, start: int) -> None:
    values = {start << number: factor * (start << number) ** power for number in range(5)}
    assert growth(values) == pytest.approx(power, abs=1e-6)


def test_growth_is_fitted_to_the_last_octaves() -> None:
    """Constant costs of short texts have no influence."""
    values = {128 << number: max(1.0, 4.0**number / 16) for number in range(7)}
    assert growth(values) == pytest.approx(2)
    assert growth({128: 1.0}) is growth({}) is None
    assert growth({128: 1.0, 2048: 2.0}) is None


def test_below_from_ignores_temporary_crossings() -> None:
    other = {1: 1.0, 2: 4.0, 4: 16.0, 8: 64.0}
    assert below_from({1: 3.0, 2: 6.0, 4: 12.0, 8: 24.0}, other) == 4
    assert below_from({1: 0.5, 2: 5.0, 4: 12.0, 8: 24.0}, other) == 4  # a single crossing may be noise
    assert below_from({1: 0.5, 2: 1.0, 4: 1.0, 8: 64.0}, other) is None
    assert below_from(other, other) is below_from({}, other) is None
    assert below_from({4: 1.0, 16: 1.0}, other) == 4  # common lengths


@pytest.mark.slow
def test_points_are_compared_with_the_baseline(result: dict[str, Any]) -> None:
    assert (result["baseline"], result["lengths"]) == ("curve-linformer", [8, 16])
    assert result["compared_to"] == {"curve-full": 16, "curve-linformer": 16}
    assert [model["name"] for model in result["models"]] == ["curve-linformer", "curve-full"]
    for model in result["models"]:
        assert [point["length"] for point in model["points"]] == [8, 16]
        for point in model["points"]:
            assert point["failure"] is None
            assert 0 < point["best_seconds"] <= point["seconds"]
            assert point["runs"] >= 1
            assert point["memory"] is None or point["memory"] >= 0
        assert math.isfinite(model["time_growth"])
    first, second = result["models"]
    assert [point["time_ratio"] for point in first["points"]] == [1, 1]
    for own, other in zip(second["points"], first["points"], strict=True):
        assert own["time_ratio"] * other["best_seconds"] == pytest.approx(own["best_seconds"])


@pytest.mark.slow
def test_memory_is_the_peak_of_the_run(exported_build: Exported) -> None:
    """At more than 1,000 tokens, the score matrices dominate memory."""
    model = exported_build("bert-tiny", "max_seq_len=2048", "num_layers=1")
    stored = ModelDirectory.open(model)
    graphs = make_graphs(stored)
    report = compare(stored, graphs, Comparison(longest=5))
    assert max(point["length"] for point in report.evidence["grid"]["points"]) == 5
    write_export(Export(stored), graphs, report.evidence)
    scores = 4 * 4 * 1200**2
    found = measure_point(model, 1200, seconds=0.001, threads=1, memory=10e9)
    assert found["failure"] is None
    assert scores < found["memory"] < 6 * scores
    # The process has memory in reserve, which 2,048 tokens exceed: it reports the failure, and this one continues.
    found = measure_point(model, 2048, seconds=0.001, threads=1, memory=scores / 3)
    assert found == {"length": 2048, "failure": OUT_OF_MEMORY, **dict.fromkeys(MEASURED)}


def test_killed_process_gives_a_failed_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process kills itself, as the system does when memory runs out."""
    code = "import os, signal\ndef run_point(name, request):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "deadly.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(points, "__name__", "deadly")
    found = measure_point(tmp_path, 8, seconds=0.01, threads=1, memory=math.inf)
    assert found == {"length": 8, "failure": "ended the process with SIGKILL", **dict.fromkeys(MEASURED)}


@pytest.mark.parametrize(
    ("fails", "tried", "reasons"),
    [
        (
            99,
            [4, 8, 16],
            [None, None, None, "skipped, because it may need 6.4e-05 GB of memory; the limit is 3.3e-05 GB"],
        ),
        (8, [4, 8], [None, OUT_OF_MEMORY, *["skipped, because 8 tokens failed"] * 2]),
    ],
)
def test_lengths_beyond_memory_are_skipped(
    fails: int, tried: list[int], reasons: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is assumed to grow with the square of the length."""
    found = []

    def measured(_: Path, length: int, **limits: Any) -> dict[str, Any]:
        found.append(length)
        values = (
            dict.fromkeys(MEASURED) if length == fails else {**dict.fromkeys(MEASURED, 1.0), "memory": 1000 * length}
        )
        return {"length": length, "failure": OUT_OF_MEMORY if length == fails else None, **values}

    monkeypatch.setattr(curves, "measure_point", measured)
    monkeypatch.setattr(curves, "_prepare", lambda *_: Path())
    result = bench_curves(["bert-tiny"], [4, 8, 16, 32], max_memory=33_000)
    assert found == tried
    assert [point["failure"] for point in result["models"][0]["points"]] == reasons


def test_directory_is_measured_as_exported(exported_model: Exported, copy_of: Callable[..., Path]) -> None:
    folder = str(exported_model("bert-tiny"))
    result = bench_curves([folder], [4], seconds=0.001)
    assert (result["baseline"], result["compared_to"]) == (folder, {folder: None})
    assert result["models"][0]["points"][0]["best_seconds"] > 0
    copy_of("bert-tiny")
    with pytest.raises(ArtifactError, match="bert-tiny"):  # it was not exported
        bench_curves(["./bert-tiny"], [4])


def test_unverified_graph_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "make_graphs", lambda _: {})
    monkeypatch.setattr(curves, "compare", lambda *_, **__: Report({}, ["it differs"]))
    monkeypatch.setattr(curves, "measure_point", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(ParityError, match="not equal to the model: it differs: bert-tiny: nothing was measured"):
        bench_curves(["bert-tiny"], [4])


@pytest.mark.slow
def test_tables_have_a_row_per_length_and_list_failures(result: dict[str, Any]) -> None:
    first, second = result["models"]
    points = [{**point, "memory": 3_000_000, "memory_ratio": 1.5} for point in second["points"]]
    points[1] |= {**dict.fromkeys(MEASURED), "failure": OUT_OF_MEMORY, "time_ratio": None, "memory_ratio": None}
    shown = {**result, "models": [first, {**second, "points": points, "faster_from": 16, "smaller_from": None}]}
    header, *rows = table_rows(shown, "MS")
    assert header == ("MS", "curve-linformer", "curve-full")
    assert [row[0] for row in rows] == ["8", "16"]
    assert len(rows[0][1].split()) == 1
    number, ratio = rows[0][2].split()
    assert float(number) == pytest.approx(points[0]["best_seconds"] * 1e3, rel=0.01)
    assert float(ratio.strip("(x)")) == pytest.approx(points[0]["time_ratio"], rel=0.06)
    assert [row[2].split() for row in table_rows(shown, "MB")] == [["curve-full"], ["3", "(1.5x)"], ["-"]]
    header, *rows = growth_rows(shown)
    assert header[3:] == ("FASTER FROM", "SMALLER FROM")
    assert [(row[0], *row[3:]) for row in rows] == [
        ("curve-linformer", "baseline", "baseline"),
        ("curve-full", "16", "never"),
    ]


@pytest.mark.slow
def test_command_prints_json_or_tables_and_plots(
    result: dict[str, Any], zoo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def measured(names: Any, lengths: Any, **options: Any) -> dict[str, Any]:
        given.append((tuple(names), list(lengths)))
        return result

    monkeypatch.setattr(curves, "bench_curves", measured)
    plot = ("--plot", "a.svg") if find_spec("matplotlib") else ()
    done = zoo("bench", "--lengths", "8..40", "--json", *plot)
    assert given == [(("layer-*",), [8, 16, 32, 40])]
    assert done.json == {"schema": "zoo.bench-curves/1", **json.loads(json.dumps(result))}
    if plot:
        drawing = Path("a.svg").read_text()
        assert all(text in drawing for text in ("curve-full", "curve-linformer", "n^1", "n^2", "tokens, n"))
        zoo("bench", "--lengths", "8..40", *plot).failed(2, "already exists: a.svg")
        before = Path("a.svg").read_bytes()
        plot_bench(result).write("a.svg", force=True)
        assert Path("a.svg").read_bytes() == before
    lines = zoo("bench", "bert-tiny", "--lengths", "8,16").out.splitlines()
    assert lines[1] == "presets: graphs verified against their models on up to 16 tokens"
    assert sum(line.split()[:1] in (["MS"], ["MB"], ["MODEL"]) for line in lines) == 3


def test_layer_presets_have_equal_width() -> None:
    """Every preset is one layer that reads bytes."""
    layers = [registry().resolve(preset) for preset in registry().names() if preset.startswith("layer-")]
    assert curves.FULL in [layer.name for layer in layers]
    for layer in layers:
        config = layer.config
        wanted = {"hidden_size": 256, "max_seq_len": 16384, "vocab_size": 260}
        if layer.name == "layer-convolution":
            wanted |= {"kernel_sizes": (3,), "num_filters": 256}
        elif layer.name == "layer-recurrent":
            wanted |= {"num_layers": 1, "embedding_size": 256, "bidirectional": False}
        else:
            wanted |= {"num_layers": 1, "num_heads": 4, "intermediate_size": 1024}
        assert {key: getattr(config, key) for key in wanted} == wanted, layer.name
