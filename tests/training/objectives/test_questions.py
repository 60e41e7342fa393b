"""Extractive question answering: where answers are, and the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertForQuestionAnswering

from tests.training.objectives.common import (
    ENCODER,
    assert_equal_losses,
    batch_of,
    criterion_of,
    mean_of,
    small_bert,
    tokenizer,
    trainer_of,
    with_twin,
)
from zoo.training.objectives.questions import QuestionAnswering

CONTEXT = "Ann is in Bonn"
ROWS = [
    {"text": "who", "pair": CONTEXT, "label": {"start": 0, "text": "Ann"}},
    {"text": "how", "pair": CONTEXT, "label": {"start": 4, "text": "is in"}},
    {"text": "two", "pair": CONTEXT, "label": {"answer_start": [10, 0], "text": ["Bonn", "Ann"]}},
    {"text": "why", "pair": CONTEXT, "label": {"answer_start": [], "text": []}},
]
RAGGED = [{**row, "pair": row["pair"] + " x" * number} for number, row in enumerate(ROWS)]
words = st.lists(st.text("abcdeé", min_size=1, max_size=5), min_size=1, max_size=9)


def reader(**changes: Any) -> QuestionAnswering:
    return criterion_of(QuestionAnswering, small_bert("question-answering"), **changes)


def test_loss_is_that_of_transformers() -> None:
    ours, theirs = with_twin("question-answering", BertForQuestionAnswering, pooler=False, num_classes=2)
    criterion = criterion_of(QuestionAnswering, ours)
    batch = batch_of(criterion, ROWS)
    loss = criterion.loss(ours, batch)
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("spans", "lengths")}
    start, end = batch["spans"].unbind(1)
    wanted = theirs(**inputs, start_positions=start, end_positions=end)
    right = wanted.start_logits.argmax(-1).eq(start) & wanted.end_logits.argmax(-1).eq(end)
    assert loss.correct == int(right.sum())
    assert_equal_losses(ours, mean_of(loss), theirs, wanted.loss, {**ENCODER, "span.weight": "qa_outputs.weight"})


def test_padding_does_not_change_the_loss() -> None:
    model = small_bert("question-answering")
    criterion = criterion_of(QuestionAnswering, model)
    alone = sum(criterion.loss(model, batch_of(criterion, [row])).total for row in RAGGED)
    torch.testing.assert_close(criterion.loss(model, batch_of(criterion, RAGGED)).total, alone)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_do_not_depend_on_the_division_of_a_step(micro: int) -> None:
    results = []
    for size in (None, micro):
        model = small_bert("question-answering")
        list(trainer_of(model, criterion_of(QuestionAnswering, model), RAGGED * 4, micro_batch_size=size).run())
        results.append(model.state_dict())
    for name, values in results[0].items():
        torch.testing.assert_close(results[1][name], values, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@given(question=words, context=words, data=st.data())
@settings(deadline=None, max_examples=80)
def test_tokens_of_the_span_are_those_of_the_answer(
    question: list[str], context: list[str], data: st.DataObject
) -> None:
    """Each letter is a token, so the span's tokens are those of the answer by itself."""
    first = data.draw(st.integers(0, len(context) - 1))
    last = data.draw(st.integers(first, len(context) - 1))
    text, answer = " ".join(context), " ".join(context[first : last + 1])
    start = len(" ".join(context[:first])) + (first > 0)
    row = {"text": " ".join(question), "pair": text, "label": {"start": start, "text": answer}}
    wanted = tokenizer().encode(answer, add_special_tokens=False).ids
    found = reader(max_length=200).encode(row)
    one, other = found["span"]
    assert found["input_ids"][one : other + 1].tolist() == wanted

    used = len(tokenizer().encode(row["text"], add_special_tokens=False).ids) + 3
    before = len(tokenizer().encode(" ".join(context[:first]), add_special_tokens=False).ids)
    whole = used + before + len(wanted)  # the shortest example that holds the answer
    criterion = reader(max_length=whole)
    assert criterion.encode(row)["span"].tolist() == [one, other]
    if whole - 1 > used:
        assert reader(max_length=whole - 1).encode(row)["span"].tolist() == [0, 0]


@given(data=st.data(), context=st.lists(st.sampled_from("abcde"), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_windows_are_those_of_run_qa(data: st.DataObject, context: list[str]) -> None:
    """Windows of the tokenizers library; those that do not hold the whole answer have the span of the first token."""
    first = data.draw(st.integers(0, len(context) - 1))
    last = data.draw(st.integers(first, min(first + 4, len(context) - 1)))
    text, limit = " ".join(context), data.draw(st.integers(8, 24))
    label: dict[str, Any] = {"start": 2 * first, "text": " ".join(context[first : last + 1])}
    if data.draw(st.booleans()):
        label = {"answer_start": [], "text": []}
    criterion = reader(max_length=limit)
    found = list(criterion.examples({"text": "ab", "pair": text, "label": label}))
    used = len(tokenizer().encode("ab").ids) + 1
    cutting = tokenizer()
    room = limit - used
    cutting.enable_truncation(limit, stride=limit // 2 if limit // 2 < room else room // 2, strategy="only_second")
    whole = cutting.encode("ab", text)
    wanted = [whole, *whole.overflowing]
    assert [example["input_ids"].tolist() for example in found] == [window.ids for window in wanted]
    for example, window in zip(found, wanted, strict=True):
        places = {offset[0]: place for place, offset in enumerate(window.offsets) if window.sequence_ids[place] == 1}
        ends = (2 * first, 2 * last)
        inside = "start" in label and all(end in places for end in ends)
        assert example["span"].tolist() == ([places[end] for end in ends] if inside else [0, 0])
    without = sum(not example["span"].any() for example in found)
    assert criterion.noted["windows without the answer"] == (without if "start" in label else 0)
    assert criterion.truncated == 0


def test_spaces_around_an_answer_do_not_count() -> None:
    row = {"text": "who", "pair": CONTEXT, "label": {"start": 3, "text": " is "}}
    one, other = reader().encode(row)["span"]
    assert other - one == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": {"start": 1, "text": "Ann"}}, "the answer 'Ann' is not at character 1 of the pair"),
        ({"label": {"start": -4, "text": "Bonn"}}, "is not at character -4"),
        ({"label": {"start": 0, "text": " "}}, "the answer is empty"),
        ({"label": {"text": "Ann"}}, "label must be"),
        ({"label": "Ann"}, "label must be"),
        ({"label": {"answer_start": [], "text": ["Ann"]}}, "label must be"),
        ({"label": {"answer_start": 0, "text": ["Ann"]}}, "label must be"),
        ({"text": ""}, "text is empty"),
        ({"pair": ""}, "is not at character 0"),
        ({"pair": "", "label": {"answer_start": [], "text": []}}, "pair is empty"),
        ({"text": "abcdefghijklmnopqrstuvwxyz"}, "text has 29 tokens"),
    ],
)
def test_bad_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reader().encode({**ROWS[0], **change})


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        reader(tokenizer=None)
