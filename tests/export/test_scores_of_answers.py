"""The numbers of ``zoo evaluate`` are those that scikit-learn, scipy, seqeval, sacrebleu, jiwer and SQuAD's formula
compute from the answers of ``zoo run`` to the same rows.

Models have random weights, and labels are random or those of some of the answers, so that all scores lie between the
extremes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.conftest import Result
from tests.exported import sign_export
from zoo.artifact import ModelDirectory
from zoo.models import persist
from zoo.probe.module import perturb
from zoo.training.batches import evaluation_batches
from zoo.training.data.examples import Example
from zoo.training.objectives.masked import Pretraining
from zoo.training.options import MaskingOptions
from zoo.training.processes import ALONE
from zoo_export.opened import ModuleSession
from zoo_runtime import Pair, Session, load_session
from zoo_runtime.tasks.tags import SCHEMES

Zoo = Callable[..., Result]
Row = dict[str, Any]
SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 64}
WORDS = ("tea", "Rome", "o", "Ada", "met", "rain", "x", "who", "a", "wind")
WHERE = pytest.mark.parametrize("where", ["module", pytest.param("export", marks=pytest.mark.slow)])
"""Evaluated in PyTorch, or by the export."""


def phrases(count: int, longest: int = 6) -> list[str]:
    rng = np.random.default_rng(count)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(count)]


def build(preset: str, **config: Any) -> Path:
    """Save a model whose answers differ between inputs."""
    if "labels" in config:
        config["num_classes"] = len(config["labels"])
    model = library.create_model(preset, seed=3, **{**SIZES, **config})
    perturb(model, seed=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight *= 4
            elif "classifier" in name or "span" in name:
                weight.zero_()  # or one class would be the answer to all
    return library.save(model, "m", tokenizer=None if preset == "vit-tiny" else "bytes")


@contextmanager
def opened(zoo: Zoo, where: str) -> Iterator[Session]:
    """Open the model, exported or not."""
    if where == "export":
        sign_export(Path("m"))
        with load_session("m") as session:
            yield session
        return
    stored = ModelDirectory.open("m")
    session = ModuleSession(stored, persist.load_directory(stored))
    yield session
    session.close()


def evaluated(zoo: Zoo, rows: Sequence[Row], where: str, *options: str) -> dict[str, Any]:
    """Return the scores of rows."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    variant = "torch" if where == "module" else ""
    said = zoo("evaluate", "m", "--data", "rows.jsonl", "--variant", variant, "--json", *options)
    assert said.status == 0, said.err
    (found,) = said.json["scores"]
    return dict(found)


def same(found: Mapping[str, Any], wanted: Mapping[str, float]) -> None:
    """Compare scores, of which none is extreme."""
    assert {name: found[name] for name in wanted} == pytest.approx(dict(wanted), rel=1e-4)
    assert all(abs(value) > 1e-3 for value in wanted.values()), wanted


@WHERE
@pytest.mark.parametrize("pairs", [False, True])
def test_one_class(zoo: Zoo, where: str, pairs: bool) -> None:
    from sklearn import metrics

    names = ("good", "fair", "bad")
    build("bert-tiny", task="text-classification", labels=names)
    rng = np.random.default_rng(0)
    rows: list[Row] = [{"text": text, "label": str(rng.choice(names))} for text in phrases(40)]
    if pairs:
        rows = [{**row, "pair": text} for row, text in zip(rows, phrases(41), strict=False)]
    with opened(zoo, where) as session:
        given = [Pair(row["text"], row["pair"]) if pairs else row["text"] for row in rows]
        found = [answer["label"] for answer in session.run(given)]
    wanted = [row["label"] for row in rows]
    assert len(set(found)) > 1
    same(evaluated(zoo, rows, where), {
        "accuracy": metrics.accuracy_score(wanted, found),
        "f1": metrics.f1_score(wanted, found, average="macro", labels=sorted({*wanted, *found}), zero_division=0),
    })  # fmt: skip


@WHERE
@pytest.mark.parametrize("classes", [1, 4])
def test_several_classes(zoo: Zoo, where: str, classes: int) -> None:
    """One logit is the probability of class 1, as a binary classifier has it."""
    from sklearn import metrics

    build("bert-tiny", task="text-classification", num_classes=classes, problem_type="multi_label_classification")
    rng = np.random.default_rng(0)
    wanted = rng.random((40, classes)) < 0.5
    labels = [int(row[0]) if classes == 1 else np.flatnonzero(row).tolist() for row in wanted]
    rows: list[Row] = [{"text": text, "label": label} for text, label in zip(phrases(40), labels, strict=True)]
    with opened(zoo, where) as session:
        chances = np.array([answer["probabilities"] for answer in session.run([row["text"] for row in rows])])
    found = chances > 0.5
    assert 0 < found.mean() < 1
    expected = {"accuracy": metrics.accuracy_score(wanted, found)}
    if classes == 1:
        expected["f1"] = metrics.f1_score(wanted[:, 0], found[:, 0])
    else:
        expected |= {
            f"f1_{mean}": metrics.f1_score(wanted, found, average=mean, zero_division=0) for mean in ("micro", "macro")
        }
    same(evaluated(zoo, rows, where), expected)


@WHERE
@pytest.mark.parametrize("outputs", [1, 3])
def test_numbers(zoo: Zoo, where: str, outputs: int) -> None:
    from scipy import stats
    from sklearn import metrics

    build("bert-tiny", task="text-classification", num_classes=outputs, problem_type="regression")
    wanted = np.random.default_rng(0).normal(size=(30, outputs)).round(3)
    rows: list[Row] = [{"text": text, "label": row.tolist()} for text, row in zip(phrases(30), wanted, strict=True)]
    with opened(zoo, where) as session:
        found = np.array([answer["values"] for answer in session.run([row["text"] for row in rows])])
    expected = {"mean_squared_error": metrics.mean_squared_error(wanted, found)}
    expected["loss"] = expected["mean_squared_error"]
    if outputs == 1:
        expected["pearson"] = stats.pearsonr(wanted[:, 0], found[:, 0])[0]
        expected["spearman"] = stats.spearmanr(wanted[:, 0], found[:, 0])[0]
    scores = evaluated(zoo, rows, where)
    same(scores, expected)
    assert "perplexity" not in scores


@WHERE
def test_images(zoo: Zoo, where: str) -> None:
    from sklearn import metrics

    config = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    model = library.create_model("vit-tiny", hidden_size=16, num_layers=1, num_heads=2, num_classes=3, **config)
    perturb(model)
    model.get_parameter("embeddings.patch.weight").data *= 20  # fresh kernels tell images hardly apart
    library.save(model, "m")
    rng = np.random.default_rng(0)
    images = [rng.integers(256, size=(8, 8, 1)).tolist() for _ in range(30)]
    rows: list[Row] = [{"image": image, "label": int(rng.integers(3))} for image in images]
    with opened(zoo, where) as session:
        found = [int(np.argmax(answer["probabilities"])) for answer in session.run([np.array(i) for i in images])]
    wanted = [row["label"] for row in rows]
    assert len(set(found)) > 1
    expected = {"f1": metrics.f1_score(wanted, found, average="macro", zero_division=0)}
    same(evaluated(zoo, rows, where), expected | {"accuracy": metrics.accuracy_score(wanted, found)})


def tagged(names: Sequence[str], count: int = 40) -> list[Row]:
    rng = np.random.default_rng(2)
    found = [text.split() for text in phrases(count)]
    return [{"text": words, "label": rng.choice(names, len(words)).tolist()} for words in found]


@WHERE
@pytest.mark.parametrize("scheme", SCHEMES)
def test_entities(zoo: Zoo, where: str, scheme: str) -> None:
    """Tags are those of seqeval's strict mode, of which ``zoo run`` lists the entities."""
    seqeval, schemes = pytest.importorskip("seqeval.metrics"), pytest.importorskip("seqeval.scheme")
    names = ("O", *(f"{prefix}-{kind}" for prefix in SCHEMES[scheme] for kind in ("X", "Y")))
    build("bert-tiny", task="token-classification", labels=names)
    rows = tagged(names)
    declared = ("--option", f"scheme={scheme}") if scheme.endswith("1") else ()
    options = {"scheme": scheme} if declared else {}
    with opened(zoo, where) as session:
        answers = [session.run([row["text"]], **options)[0] for row in rows]
        found = [[word["label"] for word in answer["words"]] for answer in answers]
        right = max(range(len(rows)), key=lambda number: len(answers[number]["entities"]))
        rows[right]["label"] = found[right]  # some is found
    wanted = [row["label"] for row in rows]
    strict = {"mode": "strict", "scheme": getattr(schemes, scheme), "zero_division": 0}
    expected = {
        name: getattr(seqeval, f"{name}_score")(wanted, found, **strict) for name in ("precision", "recall", "f1")
    }
    same(evaluated(zoo, rows, where, *declared), expected)
    for tags, answer in zip(found, answers, strict=True):
        words = [word["word"] for word in answer["words"]]
        stops = np.cumsum([len(word) + 1 for word in words]) - 1
        listed = [
            (entity.tag, int(stops[entity.start]) - len(words[entity.start]), int(stops[entity.end - 1]))
            for entity in schemes.Tokens(tags, getattr(schemes, scheme)).entities
        ]
        assert [(item["label"], item["start"], item["end"]) for item in answer["entities"]] == listed


@WHERE
def test_words_without_prefixes(zoo: Zoo, where: str) -> None:
    from sklearn import metrics

    names = ("NOUN", "VERB", "X")
    build("bert-tiny", task="token-classification", labels=names)
    rows = tagged(names)
    rows[0]["label"][0] = -100
    with opened(zoo, where) as session:
        answers = [session.run([row["text"]])[0] for row in rows]
    assert "entities" not in answers[0]
    pairs = [
        (label, word["label"])
        for row, answer in zip(rows, answers, strict=True)
        for label, word in zip(row["label"], answer["words"], strict=True)
        if label != -100
    ]
    wanted, found = zip(*pairs, strict=True)
    expected = {"f1": metrics.f1_score(wanted, found, average="macro", zero_division=0)}
    same(evaluated(zoo, rows, where), expected | {"accuracy": metrics.accuracy_score(wanted, found)})


def squad_words(text: str) -> list[str]:
    """The words of an answer without case, ASCII punctuation and articles (Rajpurkar et al. 2016, section 6.1)."""
    plain = re.sub(r"[!-/:-@\[-`{-~]", "", text.casefold())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def squad(found: str, wanted: Sequence[str]) -> tuple[float, float]:
    """The exact match and the F1 of an answer: the largest over all right ones, "" if there is none."""
    pairs = []
    for text in wanted or [""]:
        one, other = squad_words(found), squad_words(text)
        both = sum(min(count, Counter(other)[word]) for word, count in Counter(one).items())
        precision, recall = both / max(len(one), 1), both / max(len(other), 1)
        f1 = 2 * precision * recall / (precision + recall) if both else float(one == other == [])
        pairs.append((float(one == other), f1))
    return max(exact for exact, _ in pairs), max(f1 for _, f1 in pairs)


@WHERE
@pytest.mark.parametrize("answered", [True, False])
def test_answers_to_questions(zoo: Zoo, where: str, answered: bool) -> None:
    """Contexts are longer than a window. Without ``answered``, some questions have no answer."""
    build("bert-tiny", task="question-answering")
    rng, rows = np.random.default_rng(0), list[Row]()
    for question, context in zip(phrases(24, 3), phrases(25, 40), strict=False):
        words = list(re.finditer(r"\S+", context))
        first = int(rng.integers(len(words)))
        start, stop = words[first].start(), words[min(first + 1, len(words) - 1)].end()
        label: Any = {"start": start, "text": context[start:stop]}
        if rng.random() < 0.5:
            label = {"answer_start": [start, 0], "text": [context[start:stop], context.split()[0]]}
        if not answered and rng.random() < 0.4:
            label = {"answer_start": [], "text": []}
        rows.append({"text": question, "pair": context, "label": label})
    assert max(len(row["pair"]) for row in rows) > 2 * SIZES["max_seq_len"]
    with opened(zoo, where) as session:
        given = [Pair(row["text"], row["pair"]) for row in rows]
        found = [answer["answers"][0] for answer in session.run(given, handle_impossible=not answered)]
    for number in (0, 1, 2):  # some are right
        if found[number]["text"].strip():
            rows[number]["label"] = {"start": found[number]["start"], "text": found[number]["text"]}
    texts = [row["label"]["text"] for row in rows]
    pairs = [
        squad(answer["text"], [text] if isinstance(text, str) else text)
        for answer, text in zip(found, texts, strict=True)
    ]
    exact, f1 = np.mean(pairs, axis=0)
    same(evaluated(zoo, rows, where), {"exact_match": exact, "f1": f1})
    assert exact < f1 < 1


@WHERE
def test_embeddings(zoo: Zoo, where: str) -> None:
    from scipy import stats

    build("bert-tiny", task="sentence-embedding")
    wanted = np.random.default_rng(0).random(24).round(3).tolist()
    rows: list[Row] = [
        {"text": one, "pair": other, "label": label}
        for one, other, label in zip(phrases(24), phrases(25), wanted, strict=False)
    ]
    with opened(zoo, where) as session:
        vectors = [[session.run(row[name])["embedding"] for name in ("text", "pair")] for row in rows]
    found = [torch.cosine_similarity(*map(torch.as_tensor, pair), dim=0).item() for pair in vectors]
    expected = {"pearson": stats.pearsonr(wanted, found)[0], "spearman": stats.spearmanr(wanted, found)[0]}
    same(evaluated(zoo, rows, where), expected)


@WHERE
@pytest.mark.parametrize("limit", [None, 5])
def test_generated_texts(zoo: Zoo, where: str, limit: int | None) -> None:
    """Texts are generated up to the length of the longest target, or the one that is given."""
    sacrebleu, jiwer = pytest.importorskip("sacrebleu"), pytest.importorskip("jiwer")
    build("transformer-tiny")
    rows: list[Row] = [{"text": one, "target": two} for one, two in zip(phrases(8), phrases(9, 9), strict=False)]
    with opened(zoo, where) as session:
        texts = [row["text"] for row in rows]
        for number, answer in enumerate(session.run(texts[:3], max_new_tokens=40)):
            rows[number]["target"] = rows[number]["target"][:9] + answer["generated"][:20]
        longest = max(len(row["target"].encode()) for row in rows) + 1  # and the end token
        assert longest > 32
        answers = session.run(texts, max_new_tokens=limit or longest)
    found, wanted = [answer["generated"] for answer in answers], [row["target"] for row in rows]
    scores = evaluated(zoo, rows, where, *(() if limit is None else ("--max-new-tokens", str(limit))))
    assert scores["unfinished"] == sum(answer["finish_reason"] == "length" for answer in answers) > 0
    assert scores["exact_match"] == np.mean([one == other for one, other in zip(found, wanted, strict=True)])
    expected = {"chrf": sacrebleu.corpus_chrf(found, [wanted]).score, "word_error_rate": jiwer.wer(wanted, found),
                "character_error_rate": jiwer.cer(wanted, found)}  # fmt: skip
    same(scores, expected)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(found, [wanted]).score)


class _List(list[Example]):
    """Examples in memory."""

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        return np.array([max(map(len, example.values())) for example in self])


def test_losses_of_pretraining(zoo: Zoo) -> None:
    """The perplexity is that of the masked tokens, and each loss and accuracy has a name."""
    from sklearn import metrics

    build("bert-tiny", task="pretraining")
    labels = np.random.default_rng(0).integers(2, size=40).tolist()
    rows: list[Row] = [
        {"text": one, "pair": two, "label": label}
        for one, two, label in zip(phrases(40), phrases(41), labels, strict=False)
    ]
    stored = ModelDirectory.open("m")
    model = persist.load_directory(stored)
    tokenizer = library.load_tokenizer("m")
    criterion = Pretraining(stored.spec.config, tokenizer, MaskingOptions(), stored.spec.config.max_seq_len)  # type: ignore[attr-defined]
    examples = _List(criterion.encode(row) for row in rows)
    logits: dict[str, list[Any]] = {"tokens": [], "follows": []}
    targets: dict[str, list[int]] = {"tokens": [], "follows": []}
    with torch.no_grad():
        for _, batch in evaluation_batches(examples, criterion, 32, ALONE):
            outputs, chosen = criterion.outputs(model, batch), batch["targets"] != -100
            logits["tokens"] += outputs["logits"][chosen].double().log_softmax(-1).exp().tolist()
            targets["tokens"] += batch["targets"][chosen].tolist()
            logits["follows"] += outputs["next_sentence_logits"].double().log_softmax(-1).exp().tolist()
            targets["follows"] += batch["labels"].tolist()
    expected = {}
    for name, part in (("masked_lm", "tokens"), ("next_sentence", "follows")):
        chances, wanted = np.array(logits[part]), targets[part]
        expected[f"{name}_loss"] = metrics.log_loss(wanted, chances, labels=range(chances.shape[1]))
        expected[f"{name}_accuracy"] = metrics.accuracy_score(wanted, chances.argmax(1))
    scores = evaluated(zoo, rows, "module", "--objective", "pretraining")
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert scores["loss"] == pytest.approx(expected["masked_lm_loss"] + expected["next_sentence_loss"], rel=1e-4)
    assert scores["perplexity"] == pytest.approx(np.exp(expected["masked_lm_loss"]), rel=1e-3)
    assert "accuracy" not in scores
