"""Answers to texts and images, from checkpoint to result, against the pipelines of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from tests.exported import sign_export
from zoo.checkpoints import import_checkpoint
from zoo.errors import UsageError
from zoo_runtime import Pair, Session, load_session

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 400, "max_position_embeddings": 40, "hidden_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 20,
}  # fmt: skip
TEXTS = ["Who has seen the wind?", "Où est la gare ?", "Кто там?", "你好吗", "हाँ", "a"]
PAIRS = [("Who?", "Neither I nor you."), ("где", "you 在哪里"), ("a b c d", "e")]
LABELS = {0: "first", 1: "second", 2: "third"}
PROBLEMS = ["single_label_classification", "multi_label_classification", "regression"]
COMPUTED = {"rtol": 0, "atol": 2e-6}


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's, with a word for each character of the texts."""
    letters = sorted({letter for text in (*TEXTS, *map("".join, PAIRS)) for letter in text.lower()} - {" "})
    vocabulary = {token: n for n, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])}
    vocabulary |= {f"##{letter}": len(vocabulary) + n for n, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def make(kind: Callable[..., PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return a model whose logits differ much between inputs."""
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * (0.4 if parameter.ndim > 1 else 0.5))
    return model


def opened(theirs: PreTrainedModel, companion: Any, folder: Path) -> Session:
    """Import, export and open a model of transformers with its tokenizer or image processor."""
    theirs.save_pretrained(folder / "hub")
    companion.save_pretrained(folder / "hub")
    import_checkpoint(folder / "hub", folder / "ours")
    sign_export(folder / "ours")
    return load_session(folder / "ours")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("problem", "labels"), [(PROBLEMS[1], {0: "score"}), *((problem, LABELS) for problem in PROBLEMS)]
)
def test_texts_and_pairs_are_classified(tmp_path: Path, problem: str, labels: dict[int, str]) -> None:
    theirs = make(BertForSequenceClassification, BertConfig(**SIZES, id2label=labels, problem_type=problem))
    tokenizer = characters()
    classifier: Any = pipeline("text-classification", theirs, tokenizer=tokenizer)
    inputs = [*TEXTS, *({"text": first, "text_pair": second} for first, second in PAIRS)]
    rows = [classifier(item, top_k=None) for item in inputs]
    wanted = [{row["label"]: row["score"] for row in found} for found in rows]
    with opened(theirs, tokenizer, tmp_path) as session:
        found = session.run([*TEXTS, *(Pair(*pair) for pair in PAIRS)])
    key = "values" if problem == "regression" else "probabilities"
    answer = {"regression": set(), "multi_label_classification": {"labels"}}.get(problem, {"label"})
    keys = {"tokens", "classes", key} | answer
    assert all(result.keys() == keys for result in found)
    for result, ranked in zip(found, rows, strict=True):
        assert [row["label"] for row in result["classes"]] == [row["label"] for row in ranked]
        scores = [row.get("probability", row.get("value")) for row in result["classes"]]
        np.testing.assert_allclose(scores, [row["score"] for row in ranked], **COMPUTED)
    for result, scores in zip(found, wanted, strict=True):
        np.testing.assert_allclose(result[key], [scores[name] for name in labels.values()], **COMPUTED)
        if "label" in answer:
            assert result["label"] == max(scores, key=scores.__getitem__)
        if "labels" in answer:
            assert set(result["labels"]) == {name for name, score in scores.items() if score > 0.5}
    assert np.ptp([result[key][0] for result in found]) > 0.01


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("model_type", "classes"), [("bert", 2), ("bert", 1), ("transformers", 2), ("transformers", 3)]
)
def test_classes_without_names_are_named_as_by_the_pipeline(tmp_path: Path, model_type: str, classes: int) -> None:
    config = BertConfig(**SIZES, num_labels=classes, problem_type=PROBLEMS[1])
    make(BertForSequenceClassification, config).save_pretrained(tmp_path / "hub")
    characters().save_pretrained(tmp_path / "hub")
    described = json.loads((tmp_path / "hub" / "config.json").read_text(encoding="utf-8"))
    if classes == 2:  # the default
        described = {key: value for key, value in described.items() if key not in ("id2label", "label2id")}
        (tmp_path / "hub" / "config.json").write_text(json.dumps(described), encoding="utf-8")
    classifier: Any = pipeline("text-classification", str(tmp_path / "hub"))
    wanted = classifier(TEXTS[0], top_k=None)
    assert {row["label"] for row in wanted} == {f"LABEL_{number}" for number in range(classes)}
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type=model_type)
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours") as session:
        found = session.run(TEXTS[0])["classes"]
    assert [row["label"] for row in found] == [row["label"] for row in wanted]
    np.testing.assert_allclose([row["probability"] for row in found], [row["score"] for row in wanted], **COMPUTED)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1, 3])
def test_functions_are_those_of_the_pipeline(tmp_path: Path, classes: int) -> None:
    """One logit is a number or a probability; the pipeline's default for one is a sigmoid."""
    labels = {number: f"class {number}" for number in range(classes)}
    theirs = make(BertForSequenceClassification, BertConfig(**SIZES, id2label=labels, problem_type=PROBLEMS[2]))
    tokenizer = characters()
    classifier: Any = pipeline("text-classification", theirs, tokenizer=tokenizer)
    with opened(theirs, tokenizer, tmp_path) as session:
        for function in ("sigmoid", "none", *(["softmax"] if classes > 1 else [])):
            for text, result in zip(TEXTS, session.run(TEXTS, function_to_apply=function, top_k=2), strict=True):
                wanted = classifier(text, function_to_apply=function, top_k=2)
                assert [row["label"] for row in result["classes"]] == [row["label"] for row in wanted]
                scores = [row["value" if function == "none" else "probability"] for row in result["classes"]]
                np.testing.assert_allclose(scores, [row["score"] for row in wanted], **COMPUTED)
        if classes == 1:
            with pytest.raises(UsageError, match="single_label_classification' needs at least 2 classes"):
                session.run("a", function_to_apply="softmax")


@pytest.mark.slow
def test_tokens_are_classified(tmp_path: Path) -> None:
    theirs = make(BertForTokenClassification, BertConfig(**SIZES, id2label=LABELS))
    tagger: Any = pipeline("token-classification", theirs, tokenizer=characters(), ignore_labels=[])
    with opened(theirs, characters(), tmp_path) as session:
        for text, result in zip(TEXTS, session.run(TEXTS), strict=True):
            inner = result["classes"][1:-1]  # the pipeline leaves out [CLS] and [SEP]
            rows = tagger(text)
            assert [part["label"] for part in inner] == [row["entity"] for row in rows]
            np.testing.assert_allclose(
                [part["probability"] for part in inner], [row["score"] for row in rows], **COMPUTED
            )


@pytest.mark.slow
def test_masks_are_filled(tmp_path: Path) -> None:
    theirs = make(BertForMaskedLM, BertConfig(**SIZES))
    filler: Any = pipeline("fill-mask", theirs, tokenizer=characters())
    texts = ["wh[MASK]?", "[MASK] est", "где [MASK] там"]
    with opened(theirs, characters(), tmp_path) as session:
        for result, rows in zip(session.run(texts), filler(texts), strict=True):
            (choices,) = result["masks"]
            assert [choice["token"] for choice in choices] == [row["token"] for row in rows]
            np.testing.assert_allclose(
                [choice["probability"] for choice in choices], [row["score"] for row in rows], **COMPUTED
            )


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_images_are_classified(tmp_path: Path, problem: str) -> None:
    sizes = {key: SIZES[key] for key in SIZES if key not in ("vocab_size", "max_position_embeddings")}
    config = ViTConfig(**sizes, image_size=12, patch_size=4, id2label=LABELS, problem_type=problem)
    theirs = make(ViTForImageClassification, config)
    processor = ViTImageProcessorPil(
        size={"height": 12, "width": 12}, image_mean=[0.2, 0.5, 0.7], image_std=[0.2, 0.3, 0.5], resample=3
    )
    classifier: Any = pipeline("image-classification", theirs, image_processor=processor)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in ((31, 17), (5, 9), (12, 12))]
    with opened(theirs, processor, tmp_path) as session:
        found = session.run(images)
    key = "values" if problem == "regression" else "probabilities"
    for image, result in zip(images, found, strict=True):
        scores = {row["label"]: row["score"] for row in classifier(image)}
        np.testing.assert_allclose(result[key], [scores[name] for name in LABELS.values()], **COMPUTED)


@pytest.mark.parametrize("processor", ["bert", "roberta"])
def test_pairs_have_the_ids_and_types_of_transformers(
    exported_model: Callable[..., Path], tmp_path: Path, processor: str
) -> None:
    """RoBERTa's tokenizer separates the texts by two tokens, and has one type."""
    theirs = characters()
    if processor == "roberta":
        theirs.backend_tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    theirs.backend_tokenizer.enable_truncation(4)  # a setting for training, which neither library applies here
    theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with load_session(exported_model("bert-tiny"), tokenizer=tmp_path / "tokenizer.json") as session:
        runner: Any = session.runner("feature-extraction")
        runner.takes_pairs = True
        for value in (*TEXTS, *PAIRS):
            texts = (value,) if isinstance(value, str) else value
            item = runner.read(value if len(texts) == 1 else Pair(*texts), 1)
            wanted = theirs(*texts, truncation=False)
            assert (item.ids, list(item.types)) == (wanted["input_ids"], wanted["token_type_ids"])
