"""Masked tokens, next sentences and replaced tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertForMaskedLM, BertForPreTraining

import zoo
from tests.checkpoints.test_encoders import FAMILIES
from tests.training.objectives.common import (
    CLS,
    ENCODER,
    MASK,
    SEP,
    assert_equal_losses,
    batch_of,
    criterion_of,
    mean_of,
    small_bert,
    tokenizer,
    trainer_of,
    with_twin,
)
from zoo.checkpoints import import_checkpoint
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.training.data.order import generator
from zoo.training.objectives.masked import MaskedLM, Pretraining
from zoo.training.objectives.replaced import ReplacedTokenDetection
from zoo.training.options import MaskingOptions

TEXTS = ["the cat sat", "on a mat", "by the door of a house", "and", "slept all day"]
PAIRS = [{"text": text, "pair": TEXTS[number - 1], "label": number % 2} for number, text in enumerate(TEXTS)]
words = st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=40)


def masked(settings: MaskingOptions | None = None, **changes: Any) -> MaskedLM:
    return criterion_of(MaskedLM, small_bert("fill-mask"), settings or MaskingOptions(), **changes)


def test_masked_lm_loss_is_that_of_transformers() -> None:
    ours, theirs = with_twin("fill-mask", BertForMaskedLM, pooler=False)
    criterion = criterion_of(MaskedLM, ours, MaskingOptions(rate=0.4))
    batch = batch_of(criterion, [{"text": text} for text in TEXTS])
    loss = criterion.loss(ours, batch)
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    wanted = theirs(**inputs, labels=batch["targets"])
    assert_equal_losses(ours, mean_of(loss), theirs, wanted.loss, ENCODER)
    right = wanted.logits.argmax(-1).eq(batch["targets"])
    assert loss.correct == int(right.sum())


def test_pretraining_loss_is_that_of_transformers() -> None:
    ours, theirs = with_twin("pretraining", BertForPreTraining)
    criterion = criterion_of(Pretraining, ours, MaskingOptions())
    batch = batch_of(criterion, PAIRS)
    loss = criterion.loss(ours, batch)
    assert criterion.counts(batch) == (loss.count, loss.further[0].count)
    assert loss.further[0].count == len(PAIRS) != loss.count
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("targets", "labels")}
    assert set(inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    wanted = theirs(**inputs, labels=batch["targets"], next_sentence_label=batch["labels"]).loss
    names = {**ENCODER, "next_sentence.weight": "cls.seq_relationship.weight"}
    assert_equal_losses(ours, mean_of(loss), theirs, wanted, names)


def test_replaced_token_loss_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = FAMILIES["electra"].make("ForPreTraining").eval()
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    ours = zoo.load(tmp_path / "ours").double().eval().requires_grad_(True)
    criterion = ReplacedTokenDetection(ours.config, None, MaskingOptions(rate=0.3), ours.config.max_seq_len)
    rows = [{"text": [5 + (number * place) % 9 for place in range(3 + number)]} for number in range(5)]
    batch = batch_of(criterion, rows)
    targets, mask = batch["targets"], batch["attention_mask"]
    assert torch.equal(targets.eq(-100), mask.eq(0))
    assert 0 < targets.clamp(0).sum() < mask.sum() / 2
    loss = criterion.loss(ours, batch)
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    wanted = theirs.double().requires_grad_(True)(**inputs, labels=targets.clamp(0).double()).loss
    names = {"embeddings.token.weight": "electra.embeddings.word_embeddings.weight"}
    assert_equal_losses(ours, mean_of(loss), theirs, wanted, names, rtol=1e-6)  # transformers' labels are float32


@given(texts=words, rate=st.floats(0.01, 1), key=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_share_of_chosen_tokens(texts: list[str], rate: float, key: int) -> None:
    """Exact in each example but for rounding, at least one, and none that is special."""
    criterion = masked(MaskingOptions(rate=rate))
    for example in criterion.examples({"text": " ".join(texts)}):
        ids = example["input_ids"]
        chosen = criterion.choose(example, generator(key))
        plain = int((ids > MASK).sum())
        assert len(set(chosen.tolist())) == len(chosen) == max(1, int(rate * plain + 0.5))
        assert (ids[chosen] > MASK).all()


@given(texts=words, rate=st.floats(0.05, 0.9), key=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_whole_words_are_chosen(texts: list[str], rate: float, key: int) -> None:
    criterion = masked(MaskingOptions(rate=rate, whole_word=True), max_length=200)
    example = criterion.encode({"text": " ".join(texts)})
    chosen = set(criterion.choose(example, generator(key)).tolist())
    place, whole = 1, []  # after [CLS]; each letter is a token
    for text in texts:
        members = set(range(place, place + len(text)))
        assert members <= chosen or not members & chosen
        whole += [len(members)] * (members <= chosen)
        place += len(text)
    budget = max(1, int(rate * sum(map(len, texts)) + 0.5))
    assert len(whole) == 1 or sum(whole) <= budget
    assert chosen


def test_whole_words_of_pairs_are_distinct() -> None:
    criterion = criterion_of(Pretraining, small_bert("pretraining"), MaskingOptions(whole_word=True))
    words = criterion.encode({"text": "ab c", "pair": "de f", "label": 0})["words"].tolist()
    assert words[1] == words[2]
    assert words[5] == words[6]
    assert len(set(words[1:4] + words[5:8])) == 4


def test_chosen_tokens_are_masked_replaced_or_kept() -> None:
    """80 %, 10 % and 10 % (Devlin et al. 2019, section 3.1), within four standard deviations."""
    criterion = masked()
    counts, total, size = np.zeros(3), 0, criterion.config.vocab_size
    for key in range(300):
        ids = generator(1, key).integers(5, size, 200).astype(np.int32)
        chosen = criterion.choose({"input_ids": ids}, generator(2, key))
        read, targets = criterion.corrupt(ids, chosen, generator(3, key))
        others = np.setdiff1d(np.arange(200), chosen)
        assert (read[others] == ids[others]).all()
        assert (targets[others] == -100).all()
        assert (targets[chosen] == ids[chosen]).all()
        found, was = read[chosen], ids[chosen]
        counts += [(found == MASK).sum(), ((found != MASK) & (found != was)).sum(), (found == was).sum()]
        total += len(chosen)
    assert total == 300 * 30
    expected = np.array([0.8 + 0.1 / size, 0.1 * (1 - 2 / size), 0.1 + 0.1 / size])
    assert (np.abs(counts / total - expected) < 4 * np.sqrt(expected * (1 - expected) / total)).all()


def test_replaced_tokens_are_uniform() -> None:
    """A replacement that equals the original counts as original."""
    criterion = criterion_of(ReplacedTokenDetection, small_bert("replaced-token-detection"), MaskingOptions(rate=1.0))
    ids, size = np.full(5000, 7, np.int32), criterion.config.vocab_size
    read, targets = criterion.corrupt(ids, criterion.choose({"input_ids": ids}, generator(0)), generator(1))
    assert (targets == (read != 7)).all()
    share = np.bincount(read, minlength=size) / len(read)
    assert (np.abs(share - 1 / size) < 5 * np.sqrt(1 / size / len(read))).all()


@pytest.mark.parametrize("kind", [MaskedLM, ReplacedTokenDetection])
def test_batches_are_determined_by_generators(kind: type[MaskedLM]) -> None:
    task = "fill-mask" if kind is MaskedLM else "replaced-token-detection"
    criterion = criterion_of(kind, small_bert(task), MaskingOptions())
    rows = [{"text": text} for text in TEXTS]

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    assert same(batch_of(criterion, rows, 4), batch_of(criterion, rows, 4))
    assert not same(batch_of(criterion, rows, 4), batch_of(criterion, rows, 5))


@given(texts=words)
@settings(deadline=None, max_examples=30)
def test_long_texts_become_several_examples(texts: list[str]) -> None:
    """Their tokens, apart from special ones, are those of the text."""
    criterion, text = masked(max_length=9), " ".join(texts)
    examples = [example["input_ids"].tolist() for example in criterion.examples({"text": text})]
    assert all(len(ids) <= 9 and (ids[0], ids[-1]) == (CLS, SEP) for ids in examples)
    assert [item for ids in examples for item in ids[1:-1]] == tokenizer().encode(text, add_special_tokens=False).ids
    assert criterion.truncated == 0
    assert len(list(criterion.examples({"text": [5] * 9 + [MASK] * 9 + [6]}))) == 2
    ids = list(range(5, 5 + min(len(text), 50)))
    pieces = criterion.examples({"text": ids})
    assert [item for piece in pieces for item in piece["input_ids"].tolist()] == ids


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("micro", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [MaskedLM, Pretraining, ReplacedTokenDetection])
def test_gradients_do_not_depend_on_the_division_of_a_step(kind: type[MaskedLM], micro: int) -> None:
    """Parts of a step have unequal numbers of masked tokens per pair."""
    task = {MaskedLM: "fill-mask", Pretraining: "pretraining"}.get(kind, "replaced-token-detection")
    results = []
    for size in (None, micro):
        model = small_bert(task)
        trainer = trainer_of(model, criterion_of(kind, model, MaskingOptions()), PAIRS * 4, micro_batch_size=size)
        results.append(([step.loss for step in trainer.run()], model.state_dict(), trainer.evaluate().loss))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-9)
    assert results[1][2] == pytest.approx(results[0][2], rel=1e-9)
    for name, values in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": ""}, "text is empty"),
        ({"text": []}, "text is empty"),
        ({"text": 3}, "text must be a text, got int"),
        ({"text": "[MASK] [MASK]"}, "only special tokens"),
        ({"text": [5, 99]}, "token id 99, outside of vocab_size 57"),
        ({"text": [5, "a"]}, "a text or a list of token ids"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(masked().examples(row))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "pair": "b", "label": 2}, "label must be 0 if the pair follows the text, or 1 if not, got 2"),
        ({"text": "a", "pair": "", "label": 0}, "pair is empty"),
        ({"text": "", "pair": "b", "label": 0}, "text is empty"),
        ({"text": [5], "pair": "b", "label": 0}, "text must be a text, got list"),
        ({"text": "[UNK]", "pair": "[UNK]", "label": 0}, "only special tokens"),
    ],
)
def test_bad_pairs(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion_of(Pretraining, small_bert("pretraining"), MaskingOptions()).encode(row)


def test_unsuitable_models_are_refused() -> None:
    with pytest.raises(ValueError, match="mask_token_id is not set"):
        criterion_of(MaskedLM, small_bert("fill-mask", mask_token_id=None), MaskingOptions())
    with pytest.raises(ValueError, match="a tokenizer that divides texts into words"):
        masked(MaskingOptions(whole_word=True), tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="token ids do not tell where words begin"):
        masked(MaskingOptions(whole_word=True)).encode({"text": [5, 6]})
    with pytest.raises(ValueError, match="rate must be more than 0"):
        MaskingOptions(rate=0.0)


@pytest.mark.parametrize("micro", [None, 3])
def test_gradient_of_a_step_is_that_of_the_sum_of_means(micro: int | None) -> None:
    """The means are over all targets of the step, of each kind."""
    model, other = small_bert("pretraining"), small_bert("pretraining")
    criterion = criterion_of(Pretraining, model, MaskingOptions())
    trainer = trainer_of(model, criterion, PAIRS * 4, micro_batch_size=micro, clip_norm=None)
    batches = [trainer._batches[0, part].batch for part in range(trainer._batches.parts)]
    losses = [criterion.loss(other, batch) for batch in batches]
    tokens = sum(loss.total for loss in losses) / sum(loss.count for loss in losses)
    pairs = sum(loss.further[0].total for loss in losses) / 7
    (tokens + pairs).backward()
    norm = torch.nn.utils.get_total_norm([item.grad for item in other.parameters()])
    step = next(trainer.run())
    assert step.loss == pytest.approx((tokens + pairs).item(), rel=1e-9)
    assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-9)
