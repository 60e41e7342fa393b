"""Classifiers and sentence embeddings of GPT and Llama: which token is read, and exports of trained models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import zoo as library
from tests.checkpoints.moves import FAMILIES, make
from zoo.artifact import ModelDirectory
from zoo.checkpoints import import_checkpoint
from zoo.models import create

Zoo = Callable[..., Any]
PAD = 3
PRESETS = ("gpt-tiny", "llama-tiny")


def build(preset: str, **config: Any) -> torch.nn.Module:
    return library.create_model(preset, pad_token_id=PAD, **config).double()


def padded(side: str, rows: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    fill = [[PAD] * (width - len(row)) for row in rows]
    ids = [[*more, *row] if side == "left" else [*row, *more] for row, more in zip(rows, fill, strict=True)]
    input_ids = torch.tensor(ids)
    return {"input_ids": input_ids, "attention_mask": input_ids.ne(PAD).long()}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_last_token_is_found_on_either_side(preset: str, side: str) -> None:
    rows = [[9, 8, 7, 6, 5], [11, 12], [20, 21, 22, 23]]
    classifier = build(preset, task="text-classification", num_classes=3)
    encoder = build(preset, task="sentence-embedding")
    feeds = padded(side, rows)
    logits, vectors = classifier(**feeds), encoder(**feeds)["sentence_embedding"]
    for row, ids in enumerate(rows):
        alone = torch.tensor([ids])
        assert_close(logits[row], classifier(alone)[0], rtol=0, atol=1e-12)
        last = encoder(alone)["last_hidden_state"][0, -1]
        assert_close(vectors[row], last / last.norm(), rtol=0, atol=1e-12)


@torch.inference_mode()
def test_classifier_skips_padding_tokens_inside_the_mask() -> None:
    """As in transformers, which does not look at the mask. A row without any other token reads its first."""
    model = build("gpt-tiny", task="text-classification")
    ids = torch.tensor([[9, 8, 7, PAD, PAD], [PAD] * 5])
    found = model(ids, torch.ones_like(ids))
    assert_close(found[0], model(ids[:1, :3])[0], rtol=0, atol=1e-12)
    assert_close(found[1], model(ids[1:, :1])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", ["text-classification", "sentence-embedding"])
def test_cost_counts_every_parameter(preset: str, task: str) -> None:
    for tied in (True, False):
        model = library.create_model(preset, task=task, num_classes=5, tie_embeddings=tied)
        assert model.config.cost().parameters == create.count_parameters(model)


def test_one_row_is_compared_without_a_padding_token(tmp_path: Path) -> None:
    """The original takes no more than one."""
    make(FAMILIES["gpt2"], "ForSequenceClassification", tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_last_token_pooling_survives_a_round_trip(tmp_path: Path, zoo: Zoo, name: str) -> None:
    """As the files of sentence-transformers."""
    kind = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    make(FAMILIES[name], kind, tmp_path / "hub")
    chosen = ("--task", "sentence-embedding", "--set", "normalize=false")
    assert zoo("import", tmp_path / "hub", *chosen, "-o", "ours").status == 0
    assert zoo("publish", "ours", "out", "--layout", "hub", "--model-type", name).status == 0
    assert json.loads(Path("out/1_Pooling/config.json").read_text())["pooling_mode_lasttoken"] is True
    assert [part["name"] for part in json.loads(Path("out/modules.json").read_text())] == ["0", "1"]
    assert zoo("import", "out", "-o", "again").status == 0
    first, second = (ModelDirectory.open(path) for path in ("ours", "again"))
    assert first.spec.config == second.spec.config
    assert first.weight_digests() == second.weight_digests()


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("task", "row"),
    [("text-classification", {"label": "good"}), ("sentence-embedding", {"pair": "warm and funny"})],
)
def test_trained_models_are_exported_and_run(zoo: Zoo, preset: str, task: str, row: dict[str, str]) -> None:
    rows = [{"text": f"text {number}", **row} for number in range(8)]
    if "label" in row:
        rows[0]["label"] = "bad"
    Path("rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    fast = ("--data", "rows.jsonl", "--tokenizer", "bytes", "--max-steps", 2, "--set", "batch_size=4")
    assert zoo("train", preset, "--task", task, *fast, "-o", "m").status == 0
    assert zoo("export", "m", "--onnx").status == 0
    (found,) = zoo("run", "m", "warm", "--json").json["results"]
    assert found["label"] in ("bad", "good") if "label" in row else len(found["embedding"]) == 64
