"""Entities of token classifiers, against transformers' pipeline on the same weights and against seqeval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import scheme as schemes
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import Tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast, pipeline

from tests.runtime.test_pipelines import COMPUTED, SIZES, characters, make, opened
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import Session
from zoo_runtime.tasks.entities import TokenClassification
from zoo_runtime.tasks.tags import SCHEMES, are_tags, entities_of, scheme_of

Zoo = Callable[..., Any]
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
STRATEGIES = ("none", "simple", "first", "average", "max")
LETTERS = "wohasentidu?é гдеяу你好"
"""Letters that the tokenizer knows, and one that it does not."""
texts = st.text(LETTERS, min_size=1, max_size=25).filter(lambda text: text.strip() and len(text.encode()) <= 40)
"""Texts that fit into the models, a byte each token."""


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens inside words have no prefix: each byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(["<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", model_input_names=["input_ids"])


def tagger_model() -> BertForTokenClassification:
    """A model that gives neighbouring tokens different tags."""
    theirs: Any = make(BertForTokenClassification, BertConfig(**SIZES, id2label=dict(enumerate(TAGS))))
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    theirs.classifier.bias.copy_(-theirs(torch.arange(5, 40)[None]).logits.mean((0, 1)))
    return theirs


@pytest.fixture(scope="module", params=[characters, byte_level], ids=["pieces of words", "bytes"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Session]]:
    """The pipeline of transformers and an export of its model."""
    tokenizer = request.param()
    theirs = tagger_model()
    with opened(theirs, tokenizer, tmp_path_factory.mktemp("entities")) as session:
        yield pipeline("token-classification", theirs, tokenizer=tokenizer), session


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", STRATEGIES)
@given(text=texts)
@settings(max_examples=40, deadline=None)
def test_entities_equal_the_pipeline(case: tuple[Any, Session], strategy: str, text: str) -> None:
    tagger, session = case
    wanted = tagger(text, aggregation_strategy=strategy)
    result = session.run(text, aggregation_strategy=strategy)
    if strategy == "none":
        found = [row for row in result["classes"] if row["label"] != "O" and row["text"] not in ("[CLS]", "[SEP]")]
        assert [row["label"] for row in found] == [row["entity"] for row in wanted]
        np.testing.assert_allclose([r["probability"] for r in found], [r["score"] for r in wanted], **COMPUTED)
        return
    found = result["entities"]
    spans = [(row["entity_group"], row["start"], row["end"]) for row in wanted]
    assert [(row["label"], row["start"], row["end"]) for row in found] == spans
    assert [row["text"] for row in found] == [text[start:end] for _, start, end in spans]
    np.testing.assert_allclose([row["score"] for row in found], [row["score"] for row in wanted], **COMPUTED)


@pytest.mark.slow
def test_tokens_without_characters_are_exported(tmp_path: Path) -> None:
    """The offsets of a space that is a token of its own are trimmed to nothing, so no entity can be told to hold it."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tagger = pipeline("token-classification", tagger_model(), tokenizer=tokenizer)
    with opened(tagger.model, tokenizer, tmp_path) as session:
        text = "who has seen the wind"
        wanted = [(row["entity_group"], row["start"]) for row in tagger(text, aggregation_strategy="simple")]
        assert [(row["label"], row["start"]) for row in session.run(text)["entities"]] == wanted


@pytest.mark.slow
def test_strategies_differ(case: tuple[Any, Session]) -> None:
    """Otherwise the comparison above would not tell them apart."""
    found = [str(case[1].run("Where has he seen the wind?", aggregation_strategy=name)) for name in STRATEGIES]
    assert len(set(found)) == len(STRATEGIES)


@pytest.mark.slow
def test_ignored_labels_can_be_chosen(case: tuple[Any, Session]) -> None:
    tagger, session = case
    text = "Who has seen the wind?"
    wanted = tagger(text, aggregation_strategy="simple", ignore_labels=["PER"])
    found = session.run(text, ignore_labels=["PER"])["entities"]
    assert [(row["label"], row["start"]) for row in found] == [(row["entity_group"], row["start"]) for row in wanted]
    assert "PER" not in {row["label"] for row in found}
    assert "PER" in {row["label"] for row in session.run(text)["entities"]}


def grouped(labels: list[str], *, has_ends: bool) -> list[tuple[str, int, int]]:
    """Group labels of tokens that are one character long."""
    from zoo_runtime.tasks.entities import _Piece

    runner: Any = object.__new__(TokenClassification)
    runner.has_ends = has_ends
    pieces = iter([_Piece(name, 1.0, place, place + 1) for place, name in enumerate(labels)])
    return [(tag, group[0].start, group[-1].end - 1) for tag, group in runner._groups(pieces) if tag != "O"]


@pytest.mark.parametrize("prefixes", ["BI", "BIES", "BILU"])
@given(data=st.data())
def test_groups_are_those_of_seqeval(prefixes: str, data: st.DataObject) -> None:
    """Sequences need not be well-formed; IOB1 and IOB2 differ only in whether an entity has to begin with B."""
    names = ["O", *(f"{prefix}-{tag}" for prefix in prefixes for tag in ("PER", "LOC"))]
    labels = data.draw(st.lists(st.sampled_from(names), max_size=12))
    wanted = get_entities(
        [name.replace("L-", "E-", 1).replace("U-", "S-", 1) if name[0] in "LU" else name for name in labels]
    )
    assert grouped(labels, has_ends=prefixes != "BI") == wanted


@pytest.mark.parametrize("scheme", SCHEMES)
def test_entities_of_a_scheme_are_those_of_strict_seqeval(scheme: Any) -> None:
    """All sequences of up to four tags of two types, well-formed or not."""
    names = ["O", *(f"{prefix}-{kind}" for prefix in SCHEMES[scheme] for kind in ("X", "Y"))]
    for count in range(5):
        for tags in product(names, repeat=count):
            wanted = [
                (item.tag, item.start, item.end) for item in Tokens(list(tags), getattr(schemes, scheme)).entities
            ]
            assert [tuple(item) for item in entities_of(tags, scheme)] == wanted, tags


def test_schemes_follow_from_the_labels() -> None:
    found = {prefixes: scheme_of(["O", *(f"{one}-X" for one in prefixes)]) for prefixes in
             ("I", "B", "BI", "E", "IE", "S", "BIE", "BIES", "U", "BIL", "BILU", "SU", "BEL")}  # fmt: skip
    assert found == {
        "I": "IOB1", "B": "IOB2", "BI": "IOB2", "E": "IOE2", "IE": "IOE2", "S": "IOBES", "BIE": "IOBES",
        "BIES": "IOBES", "U": "BILOU", "BIL": "BILOU", "BILU": "BILOU", "SU": None, "BEL": None,
    }  # fmt: skip
    assert scheme_of(["NOUN", "VERB"]) is None


def test_tags_are_recognised() -> None:
    assert are_tags(TAGS)
    assert are_tags(["O", "S-PER", "E-PER", "I-PER", "B-PER"])
    for names in ((), ("O",), ("NOUN", "VERB"), ("O", "PER"), ("O", "I-")):
        assert not are_tags(names), names


def test_models_with_tags_list_entities_by_default(case: tuple[Any, Session], zoo: Zoo) -> None:
    session, text = case[1], "Who has seen?"
    assert session.run(text) == session.run(text, aggregation_strategy="simple")
    assert "classes" in session.run([5, 6, 7])
    assert zoo("run", session.path, text, "--option", "aggregation_strategy=none").out.count("'") > 10
    shown = "  ".join(
        f"{row['text']!r} {row['label']} {row['score']:.4f} at {row['start']}:{row['end']}"
        for row in session.run(text)["entities"]
    )
    assert zoo("run", session.path, text).out == f"{text!r}: {shown}\n"


@pytest.mark.slow
def test_bad_requests_are_refused(case: tuple[Any, Session], exported_model: Any, zoo: Zoo) -> None:
    with pytest.raises(ArtifactError, match="entities need a text: input 1: set aggregation_strategy=none"):
        case[1].run([5, 6], aggregation_strategy="simple")
    with pytest.raises(UsageError, match="aggregation_strategy"):
        case[1].run("a", aggregation_strategy="best")
    folder = exported_model(
        "bert-tiny", "task=token-classification", "num_classes=3", "problem_type=multi_label_classification"
    )
    refused = zoo("run", folder, "x", "--option", "aggregation_strategy=max")
    refused.failed(2, "entities need one label per token, problem_type is multi_label_classification")


def test_random_weights_are_varied() -> None:
    """The comparisons need entities of several tags, and words whose tokens disagree."""
    ids = torch.tensor([characters()("Who has seen the wind?")["input_ids"]])
    assert len(set(tagger_model()(ids).logits[0].argmax(-1).tolist())) == len(TAGS)
