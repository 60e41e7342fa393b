"""Multiple choice, from checkpoint to answer, against the classes of transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMultipleChoice, PreTrainedTokenizerFast, RobertaConfig
from transformers import RobertaForMultipleChoice as Roberta

from tests.runtime.test_pipelines import PAIRS, SIZES, TEXTS, characters, make
from zoo.checkpoints import import_checkpoint
from zoo.errors import ArtifactError, ParityError
from zoo_export.export import export_model
from zoo_runtime import Pair, load_session

Zoo = Callable[..., Any]
QUESTIONS = [(TEXTS[0], TEXTS[1:]), (PAIRS[0][0], [PAIRS[0][1], "in", PAIRS[1][1]]), ("a", ["wind", "in"])]
"""Texts, each with a number of choices of its own, which have different lengths."""


def like_roberta() -> PreTrainedTokenizerFast:
    """A tokenizer with RoBERTa's special tokens, for the characters of the texts."""
    letters = sorted({letter for text in (*TEXTS, *map("".join, PAIRS)) for letter in text})
    vocabulary = {token: n for n, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **names
    )


def save(kind: str, folder: Path) -> tuple[Any, Any]:
    """Save a random model and its tokenizer, and return both."""
    if kind == "roberta":
        sizes = {**SIZES, "max_position_embeddings": 64, "type_vocab_size": 1, "pad_token_id": 1}
        theirs, tokenizer = make(Roberta, RobertaConfig(**sizes)), like_roberta()
    else:
        theirs, tokenizer = make(BertForMultipleChoice, BertConfig(**SIZES)), characters()
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return theirs, tokenizer


def chances(theirs: Any, tokenizer: Any, text: str, choices: Sequence[str]) -> Any:
    """Return the probabilities of choices, as transformers' documentation of the class computes them."""
    inputs = tokenizer([text] * len(choices), list(choices), padding=True, return_tensors="pt")
    with torch.inference_mode():
        return theirs(**{name: value[None] for name, value in inputs.items()}).logits[0].softmax(-1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_choices_of_an_export_equal_those_of_transformers(tmp_path: Path, zoo: Zoo, kind: str) -> None:
    theirs, tokenizer = save(kind, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert (imported.spec.task, imported.comparison.exact < 1e-13) == ("multiple-choice", True)
    assert imported.answers.counts["texts to choices"] == 2
    assert export_model(tmp_path / "ours").passed
    wanted = [chances(theirs, tokenizer, text, choices) for text, choices in QUESTIONS]
    assert min(map(np.ptp, wanted)) > 1e-2
    with load_session(tmp_path / "ours") as session:
        assert session.graphs[0].output_tensors()[0].dims == ("batch", 1)
        found = list(session.run([Pair(text, list(choices)) for text, choices in QUESTIONS]))
        alone = session.run(Pair(QUESTIONS[0][0], list(QUESTIONS[0][1])), batch_size=1)
        for value in ("a", Pair("a", "one"), Pair("a", ["one"]), Pair("a", []), [5, 6], Pair("a", ["b", 5])):
            with pytest.raises(ArtifactError, match="expected a text and two choices or more: input 1: give TEXT"):
                session.run([value])
        with pytest.raises(ArtifactError, match="the text has no tokens: input 1"):
            session.run(Pair("", ["a", "b"]))
        with pytest.raises(ArtifactError, match="the text of choice 2 has no tokens: input 1: give at least one"):
            session.run(Pair("a", ["b", ""]))
    for (_, choices), answer, expected in zip(QUESTIONS, found, wanted, strict=True):
        order = np.argsort(-expected, kind="stable").tolist()
        assert [row["index"] for row in answer["choices"]] == order
        assert [row["text"] for row in answer["choices"]] == [choices[at] for at in order]
        np.testing.assert_allclose([row["probability"] for row in answer["choices"]], expected[order], atol=1e-5)
    np.testing.assert_allclose(
        [row["probability"] for row in alone["choices"]],
        [row["probability"] for row in found[0]["choices"]],
        atol=1e-6,
    )
    text, choices = QUESTIONS[1]
    shown = [f"{row['probability']:.4f} {row['text']!r}" for row in found[1]["choices"]]
    assert zoo("run", tmp_path / "ours", text, *choices).out.splitlines() == shown
    zoo("run", tmp_path / "ours", "only a text").failed(3, "expected a text and two choices or more")
    rows = [{"context": text, "endings": list(choices)} for text, choices in QUESTIONS]
    (tmp_path / "in").mkdir()
    for name in ("in.jsonl", "in/part.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = ("--column", "context", "--pair-column", "endings")
    results = zoo("run", tmp_path / "ours", "--input", tmp_path / "in.jsonl", *columns, "--json").json["results"]
    assert [row["choices"][0]["index"] for row in results] == [int(np.argmax(row)) for row in wanted]
    assert zoo("run", tmp_path / "ours", "--input", tmp_path / "in", *columns, "--output", "out").status == 0
    (lines,) = (path.read_text(encoding="utf-8") for path in Path("out").rglob("part*.jsonl"))
    assert [json.loads(line)["choices"] for line in lines.splitlines()] == [row["choices"] for row in results]


def test_other_answers_than_the_original_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original with its choices in another order stands for a model that reads them wrongly."""
    save("bert", tmp_path / "hub")
    forward: Any = BertForMultipleChoice.forward

    def reversed_choices(self: Any, input_ids: Any, **inputs: Any) -> Any:
        return forward(self, input_ids.flip(1), **{name: value.flip(1) for name, value in inputs.items()})

    def flipped(self: Any, input_ids: Any, **inputs: Any) -> Any:
        several = input_ids.shape[1] > 1
        return (reversed_choices if several else forward)(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(BertForMultipleChoice, "forward", flipped)
    with pytest.raises(ParityError, match=r"the classes of 'The rain has stopped\.' are"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert not (tmp_path / "ours").exists()
