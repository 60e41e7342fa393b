"""Tokenizers with more tokens than the model has embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import Result
from zoo.artifact import ModelDirectory

Zoo = Callable[..., Result]
WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c"]


def make(added: list[str], *, rows: int = 6, **special: str) -> PreTrainedTokenizerFast:
    """Write a model of ``rows`` embeddings with a tokenizer of six words and these added tokens."""
    config = LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained("hub")
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", **special)
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained("hub")
    return tokenizer


def test_surplus_tokens_are_named(zoo: Zoo) -> None:
    make([f"<t{number}>" for number in range(5)], rows=7)
    said = zoo("import", "hub", "-o", "ours").failed(2)
    assert "the tokenizer has 11 tokens, the model 7: it lacks '<t1>' (7), '<t2>' (8), '<t3>' (9) and 1 more" in said
    assert "hub/tokenizer.json: pass --drop-tokens to leave these tokens out" in said


def test_surplus_tokens_are_dropped(zoo: Zoo) -> None:
    """The tokens below the limit, added ones included, keep their ids; dropped ones are texts like any other."""
    theirs = make(["<kept>", "<lost>"], rows=7, pad_token="<pad>")  # <pad> gets the id 6
    assert theirs.convert_tokens_to_ids(["<pad>", "<kept>", "<lost>"]) == [6, 7, 8]
    said = zoo("import", "hub", "-o", "ours", "--drop-tokens")
    assert said.status == 0, said.err
    note = "without 2 tokens of the tokenizer that the model lacks: '<kept>' (7), '<lost>' (8)"
    assert f"note: hub: {note}\n" in said.err
    assert note in ModelDirectory.open("ours").origin.changes
    ours = Tokenizer.from_file("ours/tokenizer.json")
    for text in ("a b c", "a </s> b", "<pad> a", "x a"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text
    assert max(ours.encode("a <lost> b <kept>", add_special_tokens=False).ids) < 7
    said_of_tokens = Path("ours/tokenizer_config.json").read_text()
    assert "<lost>" not in said_of_tokens
    assert "<pad>" in said_of_tokens


def test_surplus_padding_token_is_dropped_everywhere(zoo: Zoo) -> None:
    """Fine-tunes often add one and leave the model as it is."""
    make([], pad_token="[PAD]")
    assert zoo("import", "hub", "-o", "ours", "--drop-tokens").status == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert "[PAD]" not in Path("ours", name).read_text()


@pytest.mark.parametrize(
    ("rows", "special", "message"),
    [
        (6, {"bos_token": "<begin>"}, "the bos_token '<begin>' lies beyond the 6 tokens of the model"),
        (5, {}, "'c' belongs to the vocabulary and cannot be dropped"),
    ],
)
def test_tokens_that_are_needed_are_not_dropped(rows: int, special: dict[str, str], message: str, zoo: Zoo) -> None:
    make([], rows=rows, **special)
    assert message in zoo("import", "hub", "-o", "ours", "--drop-tokens").failed(3)
    assert not Path("ours").exists()


def test_nothing_is_dropped_from_a_tokenizer_that_fits(zoo: Zoo) -> None:
    make(["<kept>"], rows=9)
    assert zoo("import", "hub", "-o", "ours", "--drop-tokens").status == 0
    assert json.loads(Path("ours/tokenizer.json").read_text()) == json.loads(Path("hub/tokenizer.json").read_text())
