"""Text augmentation by masked prediction, against the same model called step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo as library
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.tasks.augment.masked import Augment, AugmentOptions

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
MASK = 259
SPECIAL = {256, 257, 258, MASK}
TASK = ("--task", "augment")
MODEL = ("task=fill-mask", "mask_token_id=259")
TEXTS = ["time flies like an arrow", "x", "fruit flies"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "time", "flies", "an", "arrow", "##s", "!", "fruit", "##ful"]


@pytest.fixture
def model(exported_model: Exported) -> Path:
    return exported_model("bert-tiny", *MODEL, noise=True, gain=12.0)


@pytest.fixture(scope="module")
def session(exported_model: Exported) -> Any:
    with load_session(exported_model("bert-tiny", *MODEL, noise=True, gain=12.0)) as session:
        yield session


@pytest.fixture(scope="module")
def worded(exported_model: Exported, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the same model with a WordPiece tokenizer of thirteen words."""
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    with load_session(exported_model("bert-tiny", *MODEL, noise=True, gain=12.0), tokenizer=path) as session:
        yield session


def augment(session: Session, text: Any, **options: Any) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = session.run(text, task="augment", **options)["variants"]
    return variants


def ids_of(result: dict[str, Any]) -> list[list[int]]:
    return [variant["ids"] for variant in result["variants"]]


def refilled(folder: Path, original: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[float]]:
    """Fill places from left to right with the likeliest other token, using torch."""
    model = library.load(folder)
    ids = [MASK if place in places else token for place, token in enumerate(original)]
    chances = []
    for place in sorted(places):
        with torch.inference_mode():
            logits = model(torch.tensor([ids]))["logits"][0, place].double()
        others = [token for token in range(len(logits)) if token not in {*SPECIAL, original[place]}]
        best = max(others, key=lambda token: float(logits[token]))
        ids[place] = best
        chances.append(float(logits.softmax(-1)[best]))
    return ids, chances


# Replacements.


@pytest.mark.slow
def test_masks_are_filled_one_at_a_time(session: Session, model: Path) -> None:
    """Each prediction sees the earlier ones: filling all masks in one pass would give another result."""
    original, apart = list(TEXTS[0].encode()), 0
    for variant in augment(session, TEXTS[0], temperature=0, fraction=0.6, num_variants=6, whole_words=False):
        places = [change["place"] for change in variant["changes"]]
        assert len(places) == round(0.6 * len(original)) == 14
        ids, chances = refilled(model, original, places)
        assert variant["ids"] == ids
        np.testing.assert_allclose([change["probability"] for change in variant["changes"]], chances, atol=1e-5)
        masked = [MASK if place in places else token for place, token in enumerate(original)]
        with torch.no_grad():
            logits = library.load(model)(torch.tensor([masked]))["logits"][0]
        allowed = torch.tensor([token not in SPECIAL for token in range(logits.shape[1])])
        logits[range(len(original)), original] = -torch.inf
        at_once = logits.masked_fill(~allowed, -torch.inf).argmax(-1)
        apart += sum(ids[place] != at_once[place] for place in places)
    assert apart


def test_samples_follow_top_k_probabilities(session: Session, model: Path) -> None:
    """For one masked letter, the three likeliest others occur in proportion to their probabilities."""
    (original,) = b"x"
    with torch.no_grad():
        logits = library.load(model)(torch.tensor([[MASK]]))["logits"][0, 0].double()
    logits[[original, *SPECIAL]] = -torch.inf
    best = logits.topk(3)
    chances = (best.values / 0.5).softmax(-1)
    variants = augment(session, "x", num_variants=400, top_k=3, temperature=0.5)
    found = [variant["ids"][0] for variant in variants]
    assert set(found) == set(best.indices.tolist())
    for token, chance in zip(best.indices.tolist(), chances.tolist(), strict=True):
        deviation = (chance * (1 - chance) / 400) ** 0.5
        assert abs(found.count(token) / 400 - chance) < 4 * deviation


@given(
    text=st.text(st.sampled_from("ab cé"), min_size=1, max_size=16),
    fraction=st.floats(0, 1),
    options=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0, 1, 3]), "top_k": st.integers(1, 300), "seed": st.integers(0, 9),
         "whole_words": st.booleans()}
    ),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_laws(session: Session, text: str, fraction: float, options: dict[str, Any]) -> None:
    """Changes are exactly the differences, no special token is inserted, and the text is decoded from the ids."""
    original = list(text.encode())
    for variant in augment(session, text, num_variants=2, fraction=fraction, **options):
        ids, changes = variant["ids"], variant["changes"]
        places = [change["place"] for change in changes]
        assert places == [place for place, (a, b) in enumerate(zip(original, ids, strict=True)) if a != b]
        assert [(change["token"], change["new_token"]) for change in changes] == [
            (original[place], ids[place]) for place in places
        ]
        assert not SPECIAL & set(ids)
        if not options["whole_words"] or " " in text.strip():  # this tokenizer treats a whole text as one word
            assert len(places) == max(1, round(fraction * len(original)))
        else:
            assert len(places) == len(original)
        assert variant["text"] == session.tokenizer.decode(ids)


def test_variants_depend_only_on_seed_text_and_number(session: Session) -> None:
    options = {"task": "augment", "num_variants": 3}
    results = session.run(TEXTS, seed=3, **options)
    wanted = [ids_of(result) for result in results]
    assert [ids_of(result) for result in session.run(TEXTS, seed=3, batch_size=1, **options)] == wanted
    for count in (1, 2):
        fewer = session.run(TEXTS, seed=3, task="augment", num_variants=count)
        assert [ids_of(result) for result in fewer] == [ids[:count] for ids in wanted]
    assert [ids_of(result) for result in session.run(TEXTS, seed=4, **options)] != wanted
    first, second = session.run([TEXTS[0], TEXTS[0]], seed=3, **options)
    assert first["variants"] != second["variants"]
    assert len({variant["text"] for variant in first["variants"]}) == 3


# Tokens that are kept.


def test_whole_words_change_together(worded: Session) -> None:
    """Including all pieces of a word; special and unknown tokens are kept."""
    text = "fruitful flies an zebra arrows!"
    ids = [2, 11, 12, 6, 7, 1, 8, 9, 10, 3]
    words = [{1, 2}, {3}, {4}, {6, 7}, {8}]
    seen = set()
    for variant in augment(worded, text, num_variants=30, fraction=0.3):
        places = {change["place"] for change in variant["changes"]}
        assert len(places) == 2
        assert all(word <= places or not word & places for word in words)
        assert places <= set().union(*words)
        assert all(variant["ids"][place] == token for place, token in enumerate(ids) if place not in places)
        assert set(variant["ids"]) <= set(range(len(WORDS))), "the model has more tokens than the tokenizer"
        assert "[CLS]" not in variant["text"]
        seen |= {frozenset(places)}
    assert {frozenset({1, 2}), frozenset({6, 7})} <= seen
    assert len(seen) > 3
    pieces = augment(worded, text, num_variants=30, fraction=0.3, whole_words=False)
    assert any(len(words[0] & {change["place"] for change in variant["changes"]}) == 1 for variant in pieces)


def test_shortest_word_is_used_if_none_fits(worded: Session) -> None:
    (variant,) = augment(worded, "fruitful", num_variants=1, fraction=0.1)
    assert [change["place"] for change in variant["changes"]] == [1, 2]


def test_token_without_alternative_is_kept(worded: Session) -> None:
    """All words except one are special."""
    special = tuple(range(5)) + tuple(range(6, len(WORDS)))
    (variant,) = augment(worded, "time flies", num_variants=1, fraction=1.0, special_tokens=special)
    assert variant["ids"] == [2, 5, 6, 3]
    assert [(change["token"], change["new_token"]) for change in variant["changes"]] == [(5, 5)]


def test_ids_without_a_tokenizer(model: Path, redeclared: Callable[..., Path]) -> None:
    """Special tokens must then be given as an option."""
    with load_session(redeclared(model, tokenizer=False, pad_token_id=0)) as session:
        variants = augment(session, [0, 7, 8, 9, 3], num_variants=20, fraction=1.0, special_tokens=(3,), top_k=300)
        for variant in variants:
            assert variant["text"] is None
            assert [change["place"] for change in variant["changes"]] == [1, 2, 3]
            assert (variant["ids"][0], variant["ids"][4]) == (0, 3)
            assert not {0, 3, MASK} & set(variant["ids"][1:4])
        with pytest.raises(UsageError, match="special token 260 is outside the vocabulary of 260"):
            augment(session, [7], special_tokens=(260,))


def test_ids_have_no_words(worded: Session) -> None:
    ids = [2, 11, 12, 3]
    found = {tuple(change["place"] for change in v["changes"]) for v in augment(worded, ids, fraction=0.5)}
    assert found <= {(1,), (2,)}


# The command.


def test_output_as_text_and_json(model: Path, zoo: Zoo) -> None:
    run = ("run", model, "time", *TASK, "--option", "num_variants=2", "--option", "whole_words=false", "--seed", 1)
    result = zoo(*run, "--json").json["results"][0]
    assert (result["text"], result["tokens"], len(result["variants"])) == ("time", 4, 2)
    (change,) = result["variants"][0]["changes"]
    assert change.keys() == {"place", "token", "text", "new_token", "new_text", "probability"}
    line = zoo(*run).out.splitlines()[0]
    assert line.startswith("'time': '")
    assert f"  {change['text']!r} -> " in line
    written = zoo(*run, "--output", "out.jsonl")
    assert written.status == 0
    assert json.loads(Path("out.jsonl").read_text())["variants"] == result["variants"]
    assert zoo(*run, "--temperature", 0, "--top-k", 3).status == 0


REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "nothing to replace": (("<pad>",), 3, "no replaceable tokens: input 1"),
    "an empty text": (("",), 3, "empty input: input 1"),
    "a mask": (("a <mask>",), 3, "already contains a mask: input 1"),
    "too much": (("x", "--option", "fraction=1.5"), 2, "fraction must lie in [0, 1], got 1.5"),
    "too little": (("x", "--option", "fraction=-0.1"), 2, "fraction must lie in [0, 1], got -0.1"),
    "no variants": (("x", "--option", "num_variants=0"), 2, "num_variants must be positive, got 0"),
    "a cold below zero": (("x", "--temperature", "-1"), 2, "temperature must not be negative, got -1.0"),
    "no tokens to choose": (("x", "--top-k", "0"), 2, "top_k must be positive, got 0"),
    "a negative seed": (("x", "--seed", "-1"), 2, "seed must not be negative, got -1"),
    "an unknown option": (("x", "--option", "variants=2"), 2, "did you mean 'num_variants'"),
    "a pair": (("--pair", "x", "y"), 3, "the task does not accept pairs"),
}


@pytest.mark.parametrize(("arguments", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_inputs(model: Path, zoo: Zoo, arguments: tuple[str, ...], status: int, message: str) -> None:
    zoo("run", model, *arguments, *TASK).failed(status, message)


def test_model_without_a_mask_token_is_rejected(model: Path, redeclared: Callable[..., Path], zoo: Zoo) -> None:
    zoo("run", redeclared(model, mask_token_id=None), "x", *TASK).failed(2, "has no mask_token_id")


def test_non_finite_logits_fail_one_text(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text fails; the others get results."""
    compute = Augment.compute

    def broken(self: Augment, items: Any) -> Any:
        outputs = compute(self, items)
        for row, item in enumerate(items):
            if item.number == 2:
                outputs["logits"][row, :] = np.nan
        return outputs

    monkeypatch.setattr(Augment, "compute", broken)
    answers = list(session.map(TEXTS, task="augment"))
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert isinstance(answers[1].error, ArtifactError)
    assert "output contains NaN or infinity: input 2" in str(answers[1].error)
    assert all(len(answer.result["variants"]) == AugmentOptions().num_variants for answer in answers[::2])
