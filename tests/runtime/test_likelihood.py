"""Log-probabilities of texts and next tokens, against transformers; texts without special tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import zoo as library
from tests.runtime.test_entities import byte_level
from tests.runtime.test_pipelines import SIZES, TEXTS, characters, make, opened
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import Pair, Session, load_session

Zoo = Callable[..., Any]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GPT2LMHeadModel, Session]]:
    """A model of transformers and its export."""
    config = GPT2Config(vocab_size=257, n_positions=40, n_embd=24, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    theirs: Any = make(GPT2LMHeadModel, config)
    with opened(theirs, byte_level(), tmp_path_factory.mktemp("gpt")) as session:
        yield theirs, session


def test_log_probabilities_equal_transformers(case: tuple[GPT2LMHeadModel, Session]) -> None:
    """The loss of transformers is the logarithm of the perplexity. Texts of different lengths share a call."""
    theirs, session = case
    texts = [text for text in TEXTS if len(text) > 1]
    for text, result in zip(texts, session.run(texts, task="score"), strict=True):
        ids = byte_level()(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            outputs = theirs.double()(ids, labels=ids)
        theirs.float()
        wanted = outputs.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert [part["token"] for part in result["scores"]] == ids[0, 1:].tolist()
        found = [part["log_probability"] for part in result["scores"]]
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-5)
        assert result["log_probability"] == pytest.approx(float(wanted.sum()), abs=1e-4)
        assert result["perplexity"] == pytest.approx(float(outputs.loss.exp()), rel=1e-5)
        assert result["tokens"] == ids.shape[1]


def test_next_tokens_equal_transformers(case: tuple[GPT2LMHeadModel, Session]) -> None:
    theirs, session = case
    for text, result in zip(TEXTS, session.run(TEXTS, task="next-token", top_k=300), strict=True):
        with torch.inference_mode():
            wanted = theirs(**byte_level()(text, return_tensors="pt")).logits[0, -1].softmax(-1)
        tokens = [part["token"] for part in result["next"]]
        assert sorted(tokens) == list(range(257))
        chances = [part["probability"] for part in result["next"]]
        assert chances == sorted(chances, reverse=True)
        np.testing.assert_allclose(chances, wanted[tokens].numpy(), rtol=0, atol=1e-6)


def test_lines_show_scores(case: tuple[GPT2LMHeadModel, Session], zoo: Zoo) -> None:
    session = case[1]
    score, following = session.run("Who", task="score"), session.run("Who", task="next-token")
    shown = "  ".join(f"{part['text']!r} {part['log_probability']:.4f}" for part in score["scores"])
    line = f"'Who': perplexity {score['perplexity']:.4f}: {shown}\n"
    assert zoo("run", session.path, "Who", "--task", "score").out == line
    assert len(following["next"]) == 5
    out = zoo("run", session.path, "Who", "--task", "next-token", "--top-k", 1).out
    assert out.endswith(f" {following['next'][0]['probability']:.4f}\n")


def test_texts_that_have_no_score_are_refused(case: tuple[GPT2LMHeadModel, Session]) -> None:
    with pytest.raises(ArtifactError, match="has only one token, and none before it: input 1: give at least two"):
        case[1].run("a", task="score")
    with pytest.raises(UsageError, match="top_k"):
        case[1].run("a", task="next-token", top_k=0)


@pytest.mark.slow
def test_variants_give_the_same_scores_or_are_refused(case: tuple[GPT2LMHeadModel, Session], zoo: Zoo) -> None:
    session = case[1]
    for options in (("--profile", "cpu"), ("--generate",)):
        assert zoo("export", session.path, "--onnx", *options).status == 0
    wanted = session.run("Who", task="score")["perplexity"]
    (found,) = zoo("run", session.path, "Who", "--task", "score", "--variant", "cpu", "--json").json["results"]
    assert found["perplexity"] == pytest.approx(wanted, rel=1e-5)
    for task in ("score", "next-token"):
        refused = zoo("run", session.path, "Who", "--task", task, "--variant", "generate")
        refused.failed(2, "this variant only generates")


@pytest.mark.slow
def test_infinite_perplexity_is_an_error(tmp_path: Path, zoo: Zoo) -> None:
    model = library.create_model("gpt-tiny", num_layers=1, max_seq_len=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e4)
    library.save(model, tmp_path / "gpt", tokenizer="bytes")
    assert zoo("export", tmp_path / "gpt", "--onnx", "--graph-only").status == 0
    zoo("run", tmp_path / "gpt", "time", "--task", "score", "--unverified").failed(
        3, "has no finite perplexity: input 1"
    )


@pytest.mark.slow
def test_special_tokens_can_be_left_out(tmp_path: Path, zoo: Zoo) -> None:
    theirs, tokenizer = make(BertModel, BertConfig(**SIZES)), characters()
    opened(theirs, tokenizer, tmp_path).close()
    with load_session(tmp_path / "ours", special_tokens=False) as session:
        found = session.run(TEXTS[0])["last_hidden_state"]
        runner: Any = session.runner()
        runner.takes_pairs = True
        assert runner.read(Pair("a", "e"), 1).ids == tokenizer("a", "e", add_special_tokens=False)["input_ids"]
        with pytest.raises(ArtifactError, match="empty input: input 1"):
            session.run(" ")
    with torch.inference_mode():
        ids = tokenizer(TEXTS[0], return_tensors="pt", add_special_tokens=False)
        wanted = theirs(**ids).last_hidden_state[0]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-5)
    counts = [
        zoo("run", tmp_path / "ours", TEXTS[0], *options, "--json").json["results"][0]["tokens"]
        for options in ((), ("--no-special",))
    ]
    assert counts == [len(wanted) + 2, len(wanted)]
