"""Scores of ``zoo evaluate`` beside those of scikit-learn and scipy on the outputs of the module."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zoo as library
from tests.conftest import Result
from zoo.tokenizers.files.load import read_tokenizer
from zoo_export.cli.evaluate import METRICS
from zoo_export.scoring.answers import exact_match, token_f1

Zoo = Callable[..., Result]
SMALL = ("--tokenizer", "bytes", "--set", "hidden_size=16", "--set", "num_layers=1", "--set", "num_heads=2",
         "--set", "max_seq_len=48", "--set", "batch_size=4")  # fmt: skip
WORDS = ("good", "bad", "fine", "old", "a", "film", "of", "note", "an")


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(count)]


def trained(zoo: Zoo, task: str, rows: Sequence[dict[str, Any]], *options: str, steps: int = 3) -> Any:
    """Train a model on rows, and return it."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = zoo("train", "bert-tiny", "--task", task, "--data", "rows.jsonl", "-o", "m", *SMALL, "--max-steps",
               str(steps), "--set", "learning_rate=0.01", *options)  # fmt: skip
    assert said.status == 0, said.err
    return library.load("m")


def evaluated(zoo: Zoo, *options: str) -> dict[str, Any]:
    """Return the scores of the PyTorch model."""
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch", "--json", *options)
    assert said.status == 0, said.err
    (found,) = said.json["scores"]
    return dict(found)


def outputs(model: Any, *values: str) -> Any:
    """Run a model on one text or pair."""
    tokenizer = read_tokenizer("m/tokenizer.json")
    encoded = tokenizer.encode(*values)
    with torch.no_grad():
        found = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids]))
    return (next(iter(found.values())) if isinstance(found, dict) else found), encoded


def logits(model: Any, rows: Sequence[dict[str, Any]]) -> Tensor:
    return torch.cat([outputs(model, row["text"])[0] for row in rows])


def test_classes(zoo: Zoo) -> None:
    from sklearn import metrics

    rows = [{"text": text, "label": text.split()[0]} for text in texts(30)]
    model = trained(zoo, "text-classification", rows, steps=12)
    found = logits(model, rows).argmax(1)
    wanted = [model.config.labels.index(row["label"]) for row in rows]
    scores = evaluated(zoo)
    assert scores["f1"] == pytest.approx(metrics.f1_score(wanted, found, average="macro", zero_division=0))
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(wanted, found))
    assert 0 < scores["accuracy"] < 1


def test_several_classes(zoo: Zoo) -> None:
    from sklearn import metrics

    rows = [{"text": text, "label": ["any", *sorted(set(text.split()))]} for text in texts(30)]
    model = trained(zoo, "text-classification", rows, steps=12)
    found = logits(model, rows).sigmoid() > 0.5
    wanted = np.array([[name in row["label"] for name in model.config.labels] for row in rows])
    scores = evaluated(zoo)
    for average in ("micro", "macro"):
        expected = metrics.f1_score(wanted, found, average=average, zero_division=0)
        assert scores[f"f1_{average}"] == pytest.approx(expected)
    assert scores["f1_micro"] > scores["f1_macro"] > 0


def test_numbers(zoo: Zoo) -> None:
    from scipy import stats
    from sklearn import metrics

    rows = [{"text": text, "label": len(text) / 10} for text in texts(20)]
    model = trained(zoo, "text-classification", rows, "--set", "num_classes=1", "--set", "problem_type=regression")
    found = logits(model, rows)[:, 0].numpy()
    wanted = [row["label"] for row in rows]
    scores = evaluated(zoo)
    assert scores["mean_squared_error"] == pytest.approx(metrics.mean_squared_error(wanted, found), rel=1e-4)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(wanted, found)[0], rel=1e-4)
    assert scores["spearman"] == pytest.approx(stats.spearmanr(wanted, found)[0], rel=1e-4)


@pytest.mark.parametrize("scale", [1, 5])
def test_embeddings(zoo: Zoo, scale: float) -> None:
    from scipy import stats

    rows = [
        {"text": one, "pair": other, "label": scale * len(one) / 30}
        for one, other in zip(texts(24)[:12], texts(24)[12:], strict=True)
    ]
    model = trained(zoo, "sentence-embedding", rows)
    found = [
        torch.cosine_similarity(*(outputs(model, row[name])[0][0] for name in ("text", "pair")), dim=0).item()
        for row in rows
    ]
    wanted = [row["label"] for row in rows]
    scores = evaluated(zoo)
    assert scores["spearman"] == pytest.approx(stats.spearmanr(wanted, found)[0], rel=1e-4)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(wanted, found)[0], rel=1e-4)


@pytest.mark.slow
def test_answers_to_questions(zoo: Zoo) -> None:
    """After training by heart all answers are right; one that is not in the data lowers the mean."""
    rows = [
        {"text": "what", "pair": f"the {word} is here", "label": {"start": 4, "text": word}}
        for word in ("film", "note", "good", "wine")
    ]
    trained(zoo, "question-answering", rows, steps=100)
    scores = evaluated(zoo)
    assert (scores["accuracy"], scores["exact_match"], scores["f1"]) == (1, 1, 1)
    several = {"answer_start": [7, 0], "text": ["m is here", "the film"]}
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, [*rows[1:], {**rows[0], "label": several}])))
    scores = evaluated(zoo)
    assert scores["accuracy"] == 0.75
    assert (scores["exact_match"], scores["f1"]) == (1, 1)  # "the film" without the article
    Path("rows.jsonl").write_text(
        "\n".join(map(json.dumps, [*rows[1:], {**rows[0], "label": {"start": 4, "text": "film is"}}]))
    )
    scores = evaluated(zoo)
    assert (scores["exact_match"], scores["f1"]) == (0.75, pytest.approx((3 + 2 / 3) / 4))


@pytest.mark.parametrize(
    ("found", "wanted", "exact", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1, 1),
        ("in Paris, France", "Paris", 0, 0.5),
        ("", "", 1, 1),
        ("", "Paris", 0, 0),
        ("a cat and a cat", "cat", 0, 0.5),
        ("Lyon", "Paris", 0, 0),
    ],
)
def test_answers_are_compared_as_for_squad(found: str, wanted: str, exact: float, f1: float) -> None:
    """F1 = 2 P R / (P + R) of words, without case, punctuation and articles (Rajpurkar et al. 2016, section 6.1)."""
    assert exact_match(found, wanted) == exact
    assert token_f1(found, wanted) == pytest.approx(f1)


@pytest.mark.slow
def test_sequences_match_greedy_search(zoo: Zoo) -> None:
    """The PyTorch model's exact match is that of what the export generates."""
    small = ("--set", "hidden_size=32", "--set", "num_layers=1", "--set", "batch_size=8", "--max-steps", "150")
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": c, "target": c * 2}) for c in "abcdefgh"))
    data = ("--data", "rows.jsonl", "--tokenizer", "bytes", "--set", "max_length=8")
    said = zoo("train", "transformer-tiny", *data, "-o", "m", *small, "--set", "learning_rate=2e-3")
    assert said.status == 0, said.err
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": c, "target": c + "a"}) for c in "abcdefgh"))
    assert zoo("export", "m", "--onnx").status == 0
    one, other = zoo("evaluate", "m", "--data", "rows.jsonl", "--json").json["scores"]
    assert one["exact_match"] == other["exact_match"] == 1 / 8
    assert (other["word_error_rate"], other["character_error_rate"]) == (7 / 8, 7 / 16)  # "bb" for "ba", and so on
    assert 0 < other["chrf"] < 100
    chosen = zoo("evaluate", "m", "--data", "rows.jsonl", "--json", "--metric", "chrf,exact_match", "--metric", "loss")
    torch_row, onnx_row = chosen.json["scores"]
    assert torch_row == {name: one[name] for name in ("variant", "targets", "chrf", "exact_match", "loss")}
    assert onnx_row == {name: other[name] for name in ("variant", "targets", "chrf", "exact_match", "loss")}
    _, only = zoo("evaluate", "m", "--data", "rows.jsonl", "--json", "--metric", "chrf").json["scores"]
    assert only == {name: other[name] for name in ("variant", "targets", "chrf")}
    assert {*one, *other} <= {"variant", "targets", *METRICS}
    run = ("evaluate", "m", "--data", "rows.jsonl", "--metric")
    zoo(*run, "blue").failed(2, "no metric 'blue'", "'bleu'", "known: loss,")
    zoo(*run, "f1").failed(2, "f1 is not defined for this model", "chrf")


OPTIONS = {
    "cosine": ("sentence-embedding", ("loss=cosine-similarity",)),
    "triplet": ("sentence-embedding", ("loss=triplet", "margin=0.9")),
    "in-batch-negatives": ("sentence-embedding", ("scale=3",)),
    "masking": ("fill-mask", ("rate=0.4",)),
    "parts of texts": ("fill-mask", ("max_length=8",)),
    "all tokens": ("token-classification", ("all_tokens=true",)),
}
"""Tasks, with options that change the loss of evaluations."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "triplet" else pytest.mark.slow)
                                  for name in OPTIONS])  # fmt: skip
def test_loss_is_that_of_the_evaluations_in_training(zoo: Zoo, name: str) -> None:
    task, options = OPTIONS[name]
    rows: list[dict[str, Any]] = [
        {"text": text, "pair": f"{text} note", "negative": "bad old", "label": len(text) / 40} for text in texts(24)
    ]
    if task == "fill-mask":
        rows = [{"text": row["text"]} for row in rows]
    elif task == "token-classification":
        rows = [{"text": text.split(), "label": text.split()} for text in texts(24)]
    elif name == "in-batch-negatives":
        rows = [{key: row[key] for key in ("text", "pair")} for row in rows]
    given = [part for option in (*options, "evaluate_every=3") for part in ("--set", option)]
    trained(zoo, task, rows, "--validation", "rows.jsonl", *given)
    logged = [json.loads(line) for line in Path("m/metrics.jsonl").read_text().splitlines()][-1]["evaluation"]["loss"]
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch", "--metric", "loss", "--json")
    assert said.json["scores"][0]["loss"] == pytest.approx(logged, rel=1e-5)
    assert (
        f"note: options as in the model's training: {options[0].replace('=', ' ').replace('true', 'True')}" in said.err
    )


def test_blocks_are_those_of_the_training(zoo: Zoo) -> None:
    """Blocks of 24 tokens of a model with 48 positions have the loss of the evaluations in training."""
    rows = [{"text": text} for text in texts(23)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("--data", "rows.jsonl", "--validation", "rows.jsonl", *SMALL, "--set", "max_length=24")
    said = zoo("train", "gpt-tiny", "-o", "m", *data, "--max-steps", "3", "--set", "evaluate_every=3")
    assert said.status == 0, said.err
    logged = [json.loads(line) for line in Path("m/metrics.jsonl").read_text().splitlines()][-1]["evaluation"]["loss"]
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", "torch", "--metric", "loss", "--json")
    (found,) = said.json["scores"]
    assert found["loss"] == pytest.approx(logged, rel=1e-5)
    assert found["targets"] % 24 == 0
    assert found["targets"] % 48  # the number of positions
    assert "note: options as in the model's training: max_length 24\n" in said.err
    tokens = json.loads(Path("m/training.json").read_text())["rows"]["tokens"]
    left = tokens - 1 - found["targets"]
    assert 0 < left < 24
    assert f"of {tokens} tokens: {left} left out at the end, less than a block of 24\n" in said.err

    Path("zoo.toml").write_text("schema = 1\n[recipes.short]\nsettings = { max_length = 5 }\n")
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--recipe", "short", "--metric", "loss", "--json")
    assert said.json["scores"][0]["targets"] == (tokens - 1) // 5 * 5


def test_data_that_fills_no_block_has_a_remedy(zoo: Zoo) -> None:
    """A block of 24 tokens needs 25: each with the one that follows it."""
    remedies = "--set max_length=23", "max_length = 23 in the settings of a --recipe"
    what = "the data has 24 tokens, but a block needs 25: give more data, or shorten the blocks with"
    Path("rows.jsonl").write_text(json.dumps({"text": "x" * 23}))
    data = ("--data", "rows.jsonl", *SMALL, "--max-steps", "1", "--set", "batch_size=1")
    zoo("train", "gpt-tiny", "-o", "m", *data, "--set", "max_length=24").failed(3, f"{what} {remedies[0]}\n")
    assert zoo("train", "gpt-tiny", "-o", "m", *data, "--set", "max_length=23").status == 0
    library.save(library.create_model("gpt-tiny", max_seq_len=24), "n", tokenizer="bytes")
    evaluate = ("evaluate", "n", "--data", "rows.jsonl", "--variant", "torch", "--metric", "loss")
    zoo(*evaluate).failed(3, f"{what} {remedies[1]}\n")
    Path("zoo.toml").write_text("schema = 1\n[recipes.short]\nsettings = { max_length = 23 }\n")
    assert zoo(*evaluate, "--recipe", "short").status == 0
