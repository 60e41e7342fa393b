"""The answers of tasks are part of the comparison: a task that misreads right outputs fails, and is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.exported import LIVELY
from zoo.artifact import Export, ModelDirectory
from zoo.models import create, persist
from zoo.registry import registry
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_export.parity.answers import Answers, Questions, _error
from zoo_export.parity.subject import OnnxSubject
from zoo_runtime.formula import Numbers
from zoo_runtime.tasks import candidates, classification, encoders, entities, images, likelihood, questions
from zoo_runtime.tasks.generate import tasks as generate

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
CLASSES = ("bert-tiny", "task=text-classification", "num_classes=3")
ONE_CLASS = ("bert-tiny", "task=text-classification", "num_classes=1")
TOKENS = ("bert-tiny", "task=token-classification", "num_classes=3")
TAGS = (*TOKENS, 'labels=["O", "B-X", "I-X"]')
MASKS = ("bert-tiny", "task=fill-mask")
QUESTIONS = ("bert-tiny", "task=question-answering")
INFERENCE = (*CLASSES, 'labels=["contradiction", "neutral", "entailment"]')
ENCODER = ("bert-tiny",)
NOISE: dict[str, Any] = {"noise": True}


def answers_of(folder: Path) -> Answers:
    """Compare the answers of an exported model."""
    stored = ModelDirectory.open(folder)
    subject = OnnxSubject(stored, Export(stored).read(), "cpu")
    return Questions(subject, subject.open()).compare()


# Planted faults, each in a function of the runtime.

Plant = Callable[[pytest.MonkeyPatch], None]


def always_softmax(patch: pytest.MonkeyPatch) -> None:
    right = classification.classify

    def wrong(logits: Any, problem: Any, names: Any) -> Any:
        return right(logits, "single_label_classification", names)

    patch.setattr(classification, "classify", wrong)
    patch.setattr(images, "classify", wrong)


def always_sigmoid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(classification, "softmax", lambda logits: 1 / (1 + np.exp(-logits)))


def shuffled_labels(patch: pytest.MonkeyPatch) -> None:
    right = classification.classify
    patch.setattr(
        classification,
        "classify",
        lambda logits, problem, names: right(logits, problem, names and (*names[1:], names[0])),
    )


def worst_class_of_tokens(patch: pytest.MonkeyPatch) -> None:
    right = entities._likeliest
    patch.setattr(
        entities, "_likeliest", lambda chances, names: right(-chances, names) | {"probability": chances.max()}
    )


def entities_of_other_tags(patch: pytest.MonkeyPatch) -> None:
    right = entities.TokenClassification._split
    patch.setattr(entities.TokenClassification, "_split", lambda self, name: ("I", right(self, name)[1]))


def entities_with_half_the_score(patch: pytest.MonkeyPatch) -> None:
    right = entities.TokenClassification._pieces
    patch.setattr(
        entities.TokenClassification, "_pieces",
        lambda self, *given: (piece._replace(score=piece.score / 2) for piece in right(self, *given)),
    )  # fmt: skip


def masks_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = encoders.FillMask._fill
    patch.setattr(encoders.FillMask, "_fill", lambda self, item, logits: right(self, item, np.roll(logits, 1, 0)))


def padding_is_pooled(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, items: Any, hidden: Any) -> Any:
        vectors = hidden.mean(1)
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    patch.setattr(encoders.Embed, "_pool", wrong)


def features_of_another_input(patch: pytest.MonkeyPatch) -> None:
    right = encoders.Features.compute
    patch.setattr(encoders.Features, "compute", lambda self, items: {k: v[::-1] for k, v in right(self, items).items()})


def prompt_padded_on_the_right(patch: pytest.MonkeyPatch) -> None:
    right = generate.Continue.feed
    patch.setattr(generate.Continue, "feed", lambda self, items, left=False: right(self, items))


def text_without_its_beginning(patch: pytest.MonkeyPatch) -> None:
    right = Tokenizer.continuation
    patch.setattr(Tokenizer, "continuation", lambda self, prompt, ids: right(self, prompt, ids)[1:])


def answers_begin_a_token_late(patch: pytest.MonkeyPatch) -> None:
    right = questions.best_spans
    patch.setattr(
        questions, "best_spans", lambda start, end, *given, **more: right(np.roll(start, 1), end, *given, **more)
    )


def contexts_lose_their_windows(patch: pytest.MonkeyPatch) -> None:
    right = questions.QuestionAnswering.compute_rows
    patch.setattr(
        questions.QuestionAnswering,
        "compute_rows",
        lambda self, items: [rows[:1] * len(rows) for rows in right(self, items)],
    )


def labels_are_neutral(patch: pytest.MonkeyPatch) -> None:
    right = candidates.ZeroShot.result
    patch.setattr(candidates.ZeroShot, "result", lambda self, item, logits: right(self, item, logits[:, [0, 2, 1]]))


def passages_change_places(patch: pytest.MonkeyPatch) -> None:
    right = candidates.Rerank.result
    patch.setattr(candidates.Rerank, "result", lambda self, item, logits: right(self, item, logits[::-1]))


def scores_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    right = likelihood.Score._score
    patch.setattr(likelihood.Score, "_score", lambda self, item, logits: right(self, item, np.roll(logits, 1, 0)))


def next_token_after_padding(patch: pytest.MonkeyPatch) -> None:
    right = likelihood.NextToken.compute
    patch.setattr(
        likelihood.NextToken,
        "compute",
        lambda self, items: {k: np.roll(v, 1, 1) for k, v in right(self, items).items()},
    )


FAULTS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any], Plant, str]] = {
    "softmax of one number": (
        ONE_CLASS, {"noise": True, "gain": 8.0}, {"problem_type": "multi_label_classification"}, always_softmax,
        "task text-classification, optimisations on: probabilities is off by",
    ),
    "softmax of a value": (
        ONE_CLASS, {"noise": True, "gain": 8.0}, {}, always_softmax, "text-classification, .*: values is off by inf",
    ),
    "softmax of several labels": (
        CLASSES, NOISE, {"problem_type": "multi_label_classification"}, always_softmax, "probabilities is off by",
    ),
    "sigmoids of a single label": (CLASSES, NOISE, {}, always_sigmoid, "probabilities is off by"),
    "labels of other classes": (
        CLASSES, NOISE, {"labels": ["a", "b", "c"]}, shuffled_labels, "text-classification, .*: label is off by",
    ),
    "several labels of other classes": (
        CLASSES, NOISE, {"labels": ["a", "b", "c"], "problem_type": "multi_label_classification"}, shuffled_labels,
        "text-classification, .*: labels is off by",
    ),
    "worst class of tokens": (TOKENS, {"noise": True, "gain": 12.0}, {}, worst_class_of_tokens, "label is off by"),
    "entities that do not begin": (TAGS, {"noise": True, "gain": 12.0}, {}, entities_of_other_tags, "label is off by"),
    "entities with half the score": (
        TAGS, {"noise": True, "gain": 12.0}, {}, entities_with_half_the_score, "score is off by",
    ),
    "logits of the token before the mask": (
        MASKS, NOISE, {"mask_token_id": 259}, masks_off_by_one, "fill-mask, .*: probability of the token is off by",
    ),
    "pooled padding": (ENCODER, {}, {}, padding_is_pooled, "sentence-embedding, .*: embedding is off by"),
    "another input": (ENCODER, {}, {}, features_of_another_input, "feature-extraction, .*: last_hidden_state is off"),
    "padding on the wrong side": (
        ("gpt-tiny",), LIVELY["gpt-tiny"], {}, prompt_padded_on_the_right, "text-generation, .*: generated_ids is off",
    ),
    "cut text": (
        ("gpt-tiny",), LIVELY["gpt-tiny"], {}, text_without_its_beginning, "generated is off by inf, allowed 0",
    ),
    "answers a token late": (QUESTIONS, NOISE, {}, answers_begin_a_token_late, "score of the text is off by"),
    "windows of a context": (QUESTIONS, NOISE, {}, contexts_lose_their_windows, "question-answering fails|is off by"),
    "another class than entailment": (
        INFERENCE, {"noise": True, "gain": 4.0}, {}, labels_are_neutral, "zero-shot-class.*: label is off",
    ),
    "passages in another order": (ONE_CLASS, {"noise": True, "gain": 8.0}, {}, passages_change_places, "rerank, .*: p"),
    "scores of other tokens": (
        ("gpt-tiny",), LIVELY["gpt-tiny"], {}, scores_of_the_token_before, "score, .*: log_probability is off by",
    ),
    "token before the last": (
        ("gpt-tiny",), LIVELY["gpt-tiny"], {}, next_token_after_padding, "next-token, .*: probability of the rank is",
    ),
    "image": (("vit-tiny",), {}, {"problem_type": "regression"}, always_softmax, "image-classification, .*: values is"),
}  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("model", "weights", "values", "plant", "message"), FAULTS.values(), ids=FAULTS)
def test_task_that_misreads_the_outputs_fails(
    exported_model: Exported,
    redeclared: Exported,
    monkeypatch: pytest.MonkeyPatch,
    model: tuple[str, ...],
    weights: dict[str, Any],
    values: dict[str, Any],
    plant: Plant,
    message: str,
) -> None:
    """The same model passes without the fault."""
    folder = redeclared(exported_model(*model, **weights), **values)
    honest = answers_of(folder)
    assert not honest.failures
    compared = [found["inputs"] for found in honest.evidence.values() if found["compared"]]
    assert compared
    assert min(compared) >= 4
    plant(monkeypatch)
    failures = answers_of(folder).failures
    assert failures
    assert any(re.search(message, line) for line in failures), failures


@pytest.mark.slow
def test_chances_that_vanish_have_logarithms(tmp_path: Path, zoo: Zoo) -> None:
    """With one huge embedding, the logits of a token differ by thousands from those of others."""
    spec = registry().resolve("gpt-tiny", ("max_seq_len=32",))
    model = create.build(spec, seed=0, dtype="float32")
    with torch.no_grad():
        model.get_parameter("token_embedding.weight")[250] *= 1e4
    folder = persist.save_spec(spec, model, tmp_path / "model", tokenizer=spec.tokenizer)
    exported = zoo("export", folder, "--onnx")
    assert exported.status == 0, exported.err
    score = json.loads((folder / "parity.json").read_text())["answers"]["score"]["answers"]["log_probability"]
    assert 0 < score["max_abs_error"] <= score["limit"] < np.inf


def test_equal_infinities_are_equal() -> None:
    numbers = np.array([-np.inf, np.inf, 1.0])
    assert _error(Numbers([-np.inf, np.inf, 1.5], numbers)) == 0.5
    for other in ([np.inf, np.inf, 1.0], [-np.inf, np.inf, np.nan], [0.0, np.inf, 1.0]):
        assert _error(Numbers(other, numbers)) == np.inf


@pytest.mark.slow
def test_gate_fails_with_the_task(exported_build: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """zoo export writes nothing, and zoo verify rejects what was written by a runtime without the fault."""
    folder = exported_build(*ONE_CLASS, "problem_type=multi_label_classification", noise=True)
    found = "task text-classification, optimisations on: probabilities is off by"
    with monkeypatch.context() as patch:
        always_softmax(patch)
        result = zoo("export", folder, "--onnx")
        assert (result.status, (folder / "model.onnx").exists()) == (4, False)
        assert found in result.err
    assert zoo("export", folder, "--onnx").status == 0
    always_softmax(monkeypatch)
    result = zoo("verify", folder)
    assert result.status == 4
    assert found in result.err


def test_evidence_lists_the_answers(exported_model: Exported) -> None:
    evidence = json.loads((exported_model(*CLASSES, noise=True) / "parity.json").read_text())
    found = evidence["answers"].pop("text-classification")
    assert (found["compared"], found["on_the_module"]) == (True, True)
    reasons = {task: other["reason"] for task, other in evidence["answers"].items()}
    assert reasons.keys() == {"rerank", "zero-shot-classification"}
    assert reasons["rerank"].startswith("the model has 3 classes")
    assert found["answers"].keys() == {"probabilities", "rank", "class"}
    for part in found["answers"].values():
        assert part["passed"]
        assert 0 < part["max_abs_error"] <= part["limit"] < 1e-5


ENTRY = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="lengths", run="{module}_run:Lengths", serves=("feature-extraction",),
                     formula="{module}_formula:lengths")]
"""
RUNNER = """
import numpy as np
from zoo.errors import ArtifactError
from zoo_runtime import TextRunner

class Lengths(TextRunner):
    needs = ("last_hidden_state",)

    def samples(self):
        return ["", "refused", "Tea?", "Où est-il ?"]

    def answer(self, items):
        states = self.compute(items)["last_hidden_state"]
        return [{"lengths": np.linalg.norm(row[:len(item.ids)], axis=-1)} if len(item.ids) != 7
                else ArtifactError("has 7 tokens", None, "give others") for row, item in zip(states, items)]
"""
FORMULA = """
import numpy as np
from zoo_runtime.formula import Numbers

def lengths(runner, item, result, model):
    states = model(runner.feed([item]))["last_hidden_state"][0]
    return {"lengths": Numbers(result["lengths"], WHAT)}
"""
RIGHT = "np.sqrt(np.square(states).sum(-1))"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (RIGHT, None),
        (f"1.001 * {RIGHT}", "task lengths, optimisations on: lengths is off by 0.008, .*, at 'Tea"),
        (f"{RIGHT}[1:]", "task lengths, optimisations on: lengths is off by inf"),
        ("no_such_name", r"task lengths fails \(.*zoo-lengths 2.5.*cannot evaluate .*no_such_name"),
    ],
)
def test_third_party_task_is_compared_with_its_formula(
    exported_model: Exported, install: Callable[..., Path], what: str, message: str | None
) -> None:
    """Inputs that it refuses are left out."""
    model = exported_model(*ENCODER)  # without the task
    files = {"{module}_run.py": RUNNER, "{module}_formula.py": FORMULA.replace("WHAT", what)}
    install("zoo-lengths", ENTRY, version="2.5", files=files)
    found = answers_of(model)
    if message is None:
        assert not found.failures
        assert found.evidence["lengths"]["inputs"] == 2
        assert found.evidence.keys() == {"feature-extraction", "lengths", "sentence-embedding"}
    else:
        (failure,) = found.failures
        assert re.match(message, failure)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (("gpt-tiny",), {"tokenizer": False}),
        (("transformer-tiny",), LIVELY["transformer-tiny"]),
        (("vit-tiny", "num_channels=3", "image_size=12"), {}),
        (("bert-tiny", "task=pretraining", "mask_token_id=259"), {"noise": True, "gain": 2.0}),
        (("bert-tiny", "task=sentence-embedding"), {"dtype": "float16"}),
    ],
)
def test_honest_models_pass(exported_model: Exported, model: tuple[str, ...], options: dict[str, Any]) -> None:
    evidence = json.loads((exported_model(*model, **options) / "parity.json").read_text())["answers"]
    assert evidence
    assert all(found["compared"] for found in evidence.values())


@pytest.mark.slow
def test_model_whose_task_has_no_formula_says_so(exported_model: Exported, redeclared: Exported) -> None:
    folder = redeclared(exported_model(*MASKS, noise=True), mask_token_id=None)
    found = answers_of(folder)
    assert not found.failures
    assert found.evidence["fill-mask"]["compared"] is False
    assert found.evidence["fill-mask"]["reason"].startswith("the model has no mask_token_id")
