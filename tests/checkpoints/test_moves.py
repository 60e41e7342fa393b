"""Checkpoints of every class become models of every task that fits, equal to transformers on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.testing import assert_close
from transformers import BartModel

import zoo as library
from tests.checkpoints.moves import FAMILIES, TASKS, make, measure
from zoo.checkpoints import import_checkpoint

Zoo = Callable[..., Any]

FIRST = (
    ("bert", "ForPreTraining"),
    ("roberta", "ForMaskedLM"),
    ("electra", "ForSequenceClassification"),
    ("llama", "ForCausalLM"),
    ("t5 1.1", "ForConditionalGeneration"),
    ("deit", "ForImageClassificationWithTeacher"),
)
OTHERS = [(name, kind) for name, family in FAMILIES.items() for kind in family.classes if (name, kind) not in FIRST]
SKIPPED = ("pooler.", "decoder.bias", "final_logits_bias")
"""An untrained pooler of a model without a head, and the second name of a bias."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "kind"), [*FIRST, *OTHERS])
def test_every_task_equals_transformers(tmp_path: Path, name: str, kind: str) -> None:
    """The same tensors are kept and initialised; outputs are equal once those initialised have the same values."""
    make(FAMILIES[name], kind, tmp_path / "hub")
    for task in TASKS[FAMILIES[name].tasks]:
        move = measure(FAMILIES[name], tmp_path / "hub", task, tmp_path / task)
        assert move.unequal == (), task
        assert move.new == move.theirs, task
        assert all(any(part in left for part in SKIPPED) for left in move.left_out), (task, move.left_out)
        assert move.difference < 1e-13, task


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A file with both pre-training heads, as bert-base-uncased has them."""
    make(FAMILIES["bert"], "ForPreTraining", tmp_path / "hub")
    return tmp_path / "hub"


HEADS = "cls.predictions.bias, cls.seq_relationship.weight, cls.seq_relationship.bias"


def test_import_lists_the_replaced_tensors(pretrained: Path, zoo: Zoo) -> None:
    """In the output, in config.json and on the card; and again in JSON."""
    command = ("import", pretrained, "--task", "text-classification", "--set", "labels=bad,good,none")
    lines = zoo(*command, "-o", "judge").out.splitlines()
    assert lines[1] == "new: classifier.weight, classifier.bias"
    assert lines[2].startswith("dropped: cls.predictions.transform.dense.weight, ")
    assert lines[2].endswith(HEADS)
    assert "compared with BertForPreTraining of transformers: difference" in lines[3]
    description = json.loads(Path("judge/config.json").read_text())
    assert description["config"]["labels"] == ["bad", "good", "none"]
    assert description["origin"]["seed"] == 0
    assert description["origin"]["changes"][:2] == ["fresh classifier.weight", "fresh classifier.bias"]
    assert description["origin"]["changes"][-1] == "without cls.seq_relationship.bias"
    assert "fresh classifier.weight" in Path("judge/README.md").read_text()
    found = zoo(*command, "-o", "other", "--seed", 1, "--json").json
    assert found["new"] == ["classifier.weight", "classifier.bias"]
    assert len(found["dropped"]) == 7
    first, second = library.load("judge"), library.load("other")
    assert torch.equal(first.pooler.weight, second.pooler.weight)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)


def test_strict_refuses_a_replaced_head(pretrained: Path, zoo: Zoo) -> None:
    said = zoo("import", pretrained, "--task", "fill-mask", "--strict", "-o", "x").failed(2, "leave out --strict")
    assert "cls.seq_relationship.weight, cls.seq_relationship.bias would be dropped: " in said
    assert "would be new" not in said
    assert zoo("import", pretrained, "--task", "pretraining", "--strict", "-o", "same").status == 0
    zoo("adapt", "same", "--task", "question-answering", "--strict", "-o", "x").failed(
        2, "span.weight, span.bias would be new; pooler.weight, pooler.bias, masked_lm"
    )
    assert not Path("x").exists()


def test_a_pooler_is_left_out_on_request(pretrained: Path, zoo: Zoo) -> None:
    chosen = ("--task", "text-classification", "--set", "pooler=false")
    assert "bert.pooler.dense.weight" in zoo("import", pretrained, *chosen, "-o", "x").out
    assert not library.load("x").config.pooler


def damage(folder: Path, **changes: Any) -> None:
    """Replace tensors of a checkpoint, or remove them by None."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path, {"format": "pt"})


def test_the_whole_file_must_fit_its_own_class(pretrained: Path, zoo: Zoo) -> None:
    """A damaged trunk, a head of another size and unknown modules are listed in one line, also for another task."""
    damage(
        pretrained,
        **{
            "bert.encoder.layer.1.output.dense.bias": None,
            "bert.embeddings.LayerNorm.bias": torch.zeros(7),
            "cls.seq_relationship.weight": torch.zeros(5, 30),
            "adapter.up": torch.zeros(2),
        },
    )
    zoo("import", pretrained, "--task", "question-answering", "-o", "x").failed(
        3,
        "missing bert.encoder.layer.1.output.dense.bias; ",
        "bert.embeddings.LayerNorm.bias has shape (7,), but the configuration requires (30,)",
        "cls.seq_relationship.weight has shape (5, 30), but the configuration requires (2, 30)",
        "unexpected adapter.up",
    )
    assert not Path("x").exists()


def test_trunk_settings_are_those_of_the_file(pretrained: Path, zoo: Zoo) -> None:
    for setting, message in (("num_layers=3", "missing bert.encoder.layer.2"), ("max_seq_len=9", "has shape (23, 30)")):
        zoo("import", pretrained, "--task", "fill-mask", "--set", setting, "-o", "x").failed(3, message)
    zoo("import", pretrained, "--task", "fill-masks", "-o", "x").failed(2, "--task", "did you mean 'fill-mask'?")
    assert not Path("x").exists()


def test_labels_must_agree_with_their_number(tmp_path: Path, zoo: Zoo) -> None:
    make(FAMILIES["bert"], "ForSequenceClassification", tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    config |= {"id2label": {"0": "bad", "1": "good", "2": "none"}, "num_labels": 4}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    zoo("import", tmp_path / "hub", "-o", "x").failed(2, "id2label has 3 classes, but num_labels is 4")
    assert not Path("x").exists()


def test_a_class_count_replaces_the_head_of_the_same_task(tmp_path: Path, zoo: Zoo) -> None:
    make(FAMILIES["roberta"], "ForSequenceClassification", tmp_path / "hub")
    task = ("--task", "text-classification")
    assert zoo("import", tmp_path / "hub", *task, "--strict", "-o", "same").status == 0
    found = zoo("import", tmp_path / "hub", *task, "--set", "num_classes=2", "-o", "two", "--json").json
    assert found["new"] == ["classifier.weight", "classifier.bias"]
    assert found["dropped"] == ["classifier.out_proj.weight", "classifier.out_proj.bias"]
    assert torch.equal(library.load("two").pooler.weight, library.load("same").pooler.weight)


def test_a_head_of_one_class_does_not_hinder_another_task(tmp_path: Path, zoo: Zoo) -> None:
    """A missing problem type concerns only the model that keeps the head."""
    make(FAMILIES["roberta"], "ForTokenClassification", tmp_path / "hub", classes=1)
    zoo("import", tmp_path / "hub", "-o", "x").failed(2, "no problem_type is stated")
    zoo("import", tmp_path / "hub", "--task", "token-classification", "-o", "x").failed(2, "no problem_type is stated")
    assert zoo("import", tmp_path / "hub", "--task", "fill-mask", "-o", "x").status == 0


@torch.inference_mode()
def test_the_encoder_of_bart_embeds_sentences(tmp_path: Path) -> None:
    """transformers has no class for it alone."""
    make(FAMILIES["bart"], "ForConditionalGeneration", tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", task="sentence-embedding", verify=True)
    assert imported.comparison.exact < 1e-12
    ours, theirs = library.load(tmp_path / "ours").double(), BartModel.from_pretrained(tmp_path / "hub").double()
    ids = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 1, 1]])
    mask = ids.ne(1).long()
    found = ours.encode(ids, mask)["sentence_embedding"]
    states = theirs(input_ids=ids, attention_mask=mask).encoder_last_hidden_state
    wanted = torch.stack([states[0].mean(0), states[1, :3].mean(0)])
    assert_close(found, wanted / wanted.norm(dim=-1, keepdim=True), rtol=0, atol=1e-12)


def test_an_encoder_does_not_get_a_decoder(tmp_path: Path, zoo: Zoo) -> None:
    """The decoder's tensors are dropped, since a new decoder would be untrained."""
    make(FAMILIES["t5"], "ForConditionalGeneration", tmp_path / "hub")
    lines = zoo("import", tmp_path / "hub", "--task", "sentence-embedding", "-o", "encoder", "--no-verify").out
    assert "decoder.block.*.layer.*.SelfAttention.q.weight, " in lines
    assert lines.count("SelfAttention.q.weight") == 1
    assert len(json.loads(Path("encoder/config.json").read_text())["origin"]["changes"]) < 15
    for task in ("text2text-generation", "text-classification"):
        zoo("adapt", "encoder", "--task", task, "-o", "x").failed(2, f"has no decoder, which {task} needs: encoder")
    assert not Path("x").exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(pretrained: Path, zoo: Zoo) -> None:
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(62)}, unk_token="w0"))
    tokenizer.save(str(pretrained / "tokenizer.json"))
    command = ("import", pretrained, "--task", "fill-mask", "-o", "x", "--no-verify")
    zoo(*command).failed(2, "the tokenizer has 62 tokens, the model 61: ")
    assert not Path("x").exists()
