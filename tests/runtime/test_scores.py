"""A third-party task, command and presets that score texts, against torch in float64."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import zoo as library
from tests.exported import sign_export
from zoo.errors import ArtifactError, UsageError
from zoo.registry import registry
from zoo_runtime import load_session

Zoo = Callable[..., Any]
TEXTS = ["time flies", "an arrow", "Zoë\N{SNOWMAN} zoo", "x", "time flies like an arrow"]
START = 258


@pytest.fixture(autouse=True)
def plugin(third_party: Callable[[str], None]) -> None:
    third_party("scores")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a model whose logits are far from uniform."""

    def save(gain: float = 6, **options: Any) -> Path:
        model = library.create_model("gpt-tiny", num_layers=1, max_seq_len=32, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(gain)
        return library.save(model, tmp_path_factory.mktemp("models") / "gpt", tokenizer="bytes")

    return save


@pytest.fixture(scope="module")
def started(make: Callable[..., Path]) -> Path:
    """Make a verified export that declares a start token."""
    folder = make(bos_token_id=START)
    sign_export(folder)
    return folder


@pytest.fixture
def plain(make: Callable[..., Path], zoo: Zoo) -> Path:
    """Make an unverified export without a start token; the graph is the same."""
    folder = make()
    assert zoo("export", folder, "--onnx", "--graph-only").status == 0
    return folder


def log_probabilities(folder: Path, ids: list[int]) -> list[float]:
    """Compute the log-probability of each token but the first with torch in float64, one prefix at a time."""
    model = library.load(folder).double()
    with torch.no_grad():
        return [
            float(model(torch.tensor([ids[:place]]))[0, -1].log_softmax(-1)[ids[place]]) for place in range(1, len(ids))
        ]


def test_scores_equal_the_model(started: Path) -> None:
    """For the float32 graph, in a batch of different lengths."""
    with load_session(started) as session:
        results = session.run(TEXTS, task="perplexity")
    for text, result in zip(TEXTS, results, strict=True):
        wanted = log_probabilities(started, [START, *text.encode()])
        assert [score["token"] for score in result["scores"]] == list(text.encode())
        assert [score["log_probability"] for score in result["scores"]] == pytest.approx(wanted, abs=1e-4)
        assert result["tokens"] == len(wanted)
        assert result["log_probability"] == pytest.approx(sum(wanted), abs=1e-3)
        assert result["perplexity"] == pytest.approx(math.exp(-sum(wanted) / len(wanted)), rel=1e-4)
        assert result["bits_per_byte"] == pytest.approx(-sum(wanted) / math.log(2) / len(text.encode()), rel=1e-4)
    assert results[0]["scores"][0]["text"] == "t"
    assert len({round(result["perplexity"]) for result in results}) == len(TEXTS)


@pytest.mark.slow
def test_without_a_start_token_the_first_token_is_not_scored(plain: Path) -> None:
    with load_session(plain, unverified=True) as session:
        alone, started = (session.run("time", task="perplexity", **options) for options in ({}, {"start": START}))
        ids = session.run(list(b"time"), task="perplexity")
        with pytest.raises(ArtifactError, match=r"has only one token, and none before it: input 1: .* start=ID"):
            session.run("x", task="perplexity")
        for start in (-1, 260):
            with pytest.raises(UsageError, match=f"start {start} is outside the vocabulary of 260"):
                session.run("x", task="perplexity", start=start)
    wanted = log_probabilities(plain, list(b"time"))
    assert [score["log_probability"] for score in alone["scores"]] == pytest.approx(wanted, abs=1e-4)
    assert (alone["tokens"], alone["bits_per_byte"], started["tokens"]) == (3, None, 4)
    assert started["bits_per_byte"] > 0
    assert ids == alone


def test_start_token_is_not_duplicated(started: Path) -> None:
    with load_session(started) as session:
        one, other = (session.run(ids, task="perplexity") for ids in ([START, 5, 6], [5, 6]))
        longest = session.run([7] * 32, task="perplexity")
    assert one == other
    assert longest["tokens"] == 32


@pytest.mark.slow
def test_every_graph_of_a_model_can_be_used(make: Callable[..., Path], zoo: Zoo) -> None:
    folder = make(bos_token_id=START)
    for options in ((), ("--profile", "cpu")):
        assert zoo("export", folder, "--onnx", *options).status == 0
    found = [
        zoo("run", folder, "time flies", "--task", "perplexity", "--variant", variant, "--json").json["results"][0]
        for variant in ("", "cpu")
    ]
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=1e-5)


@pytest.mark.slow
def test_task_runs_from_the_command_line(started: Path, plain: Path, zoo: Zoo) -> None:
    done = zoo("run", started, *TEXTS, "--task", "perplexity", "--json").json
    assert done["task"] == "perplexity"
    assert [set(result) for result in done["results"]] == [
        {"text", "tokens", "perplexity", "bits_per_byte", "log_probability", "scores"}
    ] * len(TEXTS)
    lines = zoo("run", started, *TEXTS, "--task", "perplexity").out.splitlines()
    for line, result in zip(lines, done["results"], strict=True):
        start = f"{result['text']!r}: perplexity {result['perplexity']:.2f} over {result['tokens']} tokens, "
        assert line == f"{start}{result['bits_per_byte']:.4f} bits per byte"
    one = ("run", plain, "x", "--unverified", "--task", "perplexity", "--option")
    assert zoo(*one, f"start={START}", "--json").json["results"][0]["tokens"] == 1
    zoo(*one, "begin=1").failed(2, "unknown key 'begin'")


@pytest.mark.slow
def test_task_requires_a_generative_model(tmp_path: Path, zoo: Zoo) -> None:
    library.save(library.create_model("bert-tiny", num_layers=1), tmp_path / "bert", tokenizer="bytes")
    assert zoo("export", "bert", "--onnx", "--graph-only").status == 0
    failed = zoo("run", "bert", "x", "--task", "perplexity", "--unverified")
    failed.failed(2, "task 'perplexity' is not for models of the task feature-extraction")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scores-gpt-tiny", "scores-llama-tiny"])
def test_preset_is_exported_and_ranks_texts(zoo: Zoo, name: str) -> None:
    assert zoo("export", name, "--onnx").status == 0
    rows = zoo("rank", name, *TEXTS, "--json").json["results"]
    sums = {text: sum(log_probabilities(Path(name), [START, *text.encode()])) for text in TEXTS}
    for row in rows:
        assert math.log(row["perplexity"]) * len(row["text"].encode()) == pytest.approx(-sums[row["text"]], rel=1e-5)


@pytest.mark.slow
def test_broken_model_is_reported(make: Callable[..., Path], zoo: Zoo) -> None:
    folder = make(gain=1e4)
    assert zoo("export", folder, "--onnx", "--graph-only").status == 0
    failed = zoo("run", folder, "time flies", "--task", "perplexity", "--unverified")
    failed.failed(3, "has no finite perplexity: input 1: look at the weights")


def test_texts_are_ordered_by_perplexity(started: Path, zoo: Zoo) -> None:
    wanted = {}
    for text in TEXTS:
        scores = log_probabilities(started, [START, *text.encode()])
        wanted[text] = math.exp(-sum(scores) / len(scores))
    found = zoo("rank", started, *TEXTS, "--json").json
    assert found["schema"] == "zoo.rank/1"
    assert [row["text"] for row in found["results"]] == sorted(TEXTS, key=wanted.__getitem__)
    assert [row["perplexity"] for row in found["results"]] == pytest.approx(sorted(wanted.values()), rel=1e-4)
    lines = zoo("rank", started, *TEXTS).out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [repr(row["text"]) for row in found["results"]]
    assert "\x1b" not in zoo("rank", started, "\x1b[31mred").out


@pytest.mark.slow
def test_command_errors_are_zoo_errors(started: Path, plain: Path, zoo: Zoo) -> None:
    zoo("rank", started, "time", "").failed(3, "empty input: input 2")
    zoo("rank", started, "x", "--start", "999").failed(2, "start 999 is outside the vocabulary of 260")
    zoo("rank", plain, "x").failed(4, "not verified")
    zoo("rank", "nothing", "x").failed(3, "no such directory: nothing")
    zoo("rank", started).failed(2, "TEXT")
    assert zoo("rank", started, "time", "--start", "7").out != zoo("rank", started, "time").out


def test_command_is_a_click_command(started: Path) -> None:
    """Its author can test it without zoo's command line."""
    command = importlib.import_module("zoo_scores.command").rank
    assert CliRunner().invoke(command, [str(started), "time"]).stdout.endswith("  'time'\n")
    assert isinstance(CliRunner().invoke(command, ["nothing", "x"]).exception, ArtifactError)


def test_command_requires_its_plugin(zoo: Zoo) -> None:
    assert "rank  Order texts by their perplexity." in zoo("--help").out
    refused = zoo("--disable-plugin", "scores", "rank", "nothing", "x")
    refused.failed(5, "No such command 'rank'", "plugin 'scores' (zoo-scores 1.0) is disabled")


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "gpt-small"])
def test_presets_equal_built_in_ones_with_a_start_token(name: str) -> None:
    base, found = registry().resolve(name).config.to_dict(), registry().resolve(f"scores-{name}").config.to_dict()
    changed = {key for key in base if base[key] != found[key]}
    assert changed <= {"bos_token_id"}
    assert 0 <= found["bos_token_id"] < base["vocab_size"]
