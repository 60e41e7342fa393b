"""Models saved by the installed sentence-transformers give the answers of ``encode`` and ``predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import UsageError, ZooWarning
from zoo_runtime import Pair, load_session

library = pytest.importorskip("sentence_transformers", minversion="6")

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_VOCABULARY = [*_SPECIAL, *_LETTERS, *_LETTERS.upper(), *".,:?", *(f"##{letter}" for letter in _LETTERS)]
PAIRS = [("tea", "rain"), ("the rain has stopped", "now"), ("a", "b c d e f")]
CLASSES = {("Sigmoid", 1): "multi_label_classification", ("Identity", 1): "regression",
           ("Sigmoid", 3): "multi_label_classification", ("Softmax", 3): "single_label_classification",
           ("Identity", 3): "single_label_classification"}  # fmt: skip


def write_bert(folder: Path, *, classes: int = 0, cased: bool = False) -> Path:
    """Write a small random BERT with its tokenizer, as transformers saves them."""
    torch.manual_seed(classes)
    config = BertConfig(
        vocab_size=len(_VOCABULARY), hidden_size=20, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=40, num_labels=classes or 2, initializer_range=0.5,
    )  # fmt: skip
    model = BertForSequenceClassification(config) if classes else BertModel(config)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(_VOCABULARY))
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=not cased).save_pretrained(folder)
    return folder


def write_encoder(folder: Path, *, cased: bool = False, **settings: Any) -> Any:
    """Write a sentence encoder with a dense layer and normalisation, and return it."""
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    first = Transformer(str(write_bert(folder / "bert", cased=cased)))
    modules = [first, Pooling(20, settings.pop("pooling", "mean")), Dense(20, 12), Normalize()]
    model = library.SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save(str(folder / "hub"))
    return model


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("activation", "classes"), CLASSES)
def test_cross_encoders_keep_their_activation(tmp_path: Path, activation: str, classes: int) -> None:
    """The activation of config_sentence_transformers.json is applied, and published again."""
    function = getattr(torch.nn, activation)
    made = function() if activation != "Softmax" else function(-1)
    model = library.CrossEncoder(str(write_bert(tmp_path / "bert", classes=classes)), activation_fn=made, device="cpu")
    model.save(str(tmp_path / "hub"))
    wanted = model.predict(PAIRS)
    config = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True).spec.config
    assert config.problem_type == CLASSES[activation, classes]  # type: ignore[attr-defined]
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    assert "modules.json" in exported.files
    again = library.CrossEncoder(str(tmp_path / "back"), device="cpu")
    if activation == "Softmax":
        assert isinstance(again.activation_fn, torch.nn.Softmax)
    elif (activation, classes) != ("Identity", 3):
        np.testing.assert_allclose(again.predict(PAIRS), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_answers_equal_predict(tmp_path: Path) -> None:
    """Three sigmoids of a pair are those of the cross-encoder."""
    bert = write_bert(tmp_path / "bert", classes=3)
    model = library.CrossEncoder(str(bert), activation_fn=torch.nn.Sigmoid(), device="cpu")
    model.save(str(tmp_path / "hub"))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours", threads=1) as session:
        found = [result["probabilities"] for result in session.run([Pair(*pair) for pair in PAIRS])]
    np.testing.assert_allclose(found, model.predict(PAIRS), rtol=0, atol=1e-5)


def test_answers_equal_encode(tmp_path: Path) -> None:
    """Prompts, lower case before a cased tokenizer, the maximum length, dense layer and norm are those of ``encode``.

    A name of the settings that only old models have is understood, too.
    """
    prompts = {"query": "find: ", "passage": ""}
    write_encoder(tmp_path, cased=True, prompts=prompts, default_prompt_name="query")
    source = tmp_path / "hub"
    settings = json.loads((source / "sentence_bert_config.json").read_text())
    (source / "sentence_bert_config.json").unlink()
    old = {"max_seq_length": 30, "do_lower_case": True}
    (source / "sentence_roberta_config.json").write_text(json.dumps(settings | old))
    model = library.SentenceTransformer(str(source), device="cpu")
    import_checkpoint(source, tmp_path / "ours", verify=True)
    sign_export(tmp_path / "ours")
    texts = ["Tea", "THE rain has Stopped", "a b c", "x" * 60]
    with load_session(tmp_path / "ours", threads=1) as session, pytest.warns(ZooWarning, match="truncated to 30"):
        found = [[result["embedding"] for result in session.run(texts, **options)]
                 for options in ({}, {"task_prefix": "passage"})]  # fmt: skip
    np.testing.assert_allclose(found[0], model.encode(texts), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[1], model.encode(texts, prompt_name="passage"), rtol=0, atol=1e-5)
    assert abs(found[0][0] - found[1][0]).max() > 1e-3


@pytest.mark.parametrize("file", ["sentence_bert_config.json", "config_sentence_transformers.json", "modules.json"])
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, file: str) -> None:
    """Each setting that would change the answers of ``encode`` is named; settings that change none are accepted."""
    write_encoder(tmp_path)
    source = tmp_path / "hub"
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {
        "sentence_bert_config.json": {
            "query_length": 8, "document_length": 9, "query_expansion": {"length": 8},
            "tokenizer_name_or_path": "other", "tokenizer_args": {"additional_special_tokens": ["x"]},
            "processor_kwargs": {"do_lower_case": True}, "model_args": {"num_labels": 3},
            "config_kwargs": {"hidden_act": "relu"}, "transformer_task": "any-to-any",
            "modality_config": {"text": {**text, "method_output_name": "pooler_output"}},
            "module_output_name": "scores", "processing_kwargs": {"text": {"max_length": 5}},
            "surprise": 1,
        },
        "config_sentence_transformers.json": {"truncate_dim": 4},
        "modules.json": {},
    }  # fmt: skip
    before = (source / file).read_text()
    for key, value in settings[file].items():
        change(source / file, **{key: value})
        with pytest.raises(UsageError, match=key):
            import_checkpoint(source, tmp_path / "ours", verify=False)
        (source / file).write_text(before)
    if file == "modules.json":
        foreign = before.replace("sentence_transformers.sentence_transformer.modules.pooling", "custom_st")
        (source / file).write_text(foreign)
        with pytest.raises(UsageError, match=r"custom_st\.Pooling"):
            import_checkpoint(source, tmp_path / "ours", verify=False)
        (source / file).write_text(before)
    change(source / "sentence_bert_config.json", unpad_inputs=False, model_args={"attn_implementation": "eager"})
    change(source / "config_sentence_transformers.json", similarity_fn_name="dot", requirements=[])
    import_checkpoint(source, tmp_path / "ours", verify=False)


def test_a_prompt_or_module_that_a_task_lacks_is_refused(tmp_path: Path) -> None:
    """A cross-encoder's default prompt; a module after a model that is not an encoder of sentences."""
    model = library.CrossEncoder(str(write_bert(tmp_path / "bert", classes=1)), device="cpu", prompts={"q": "find: "})
    model.save(str(tmp_path / "hub"))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    change(tmp_path / "hub/config_sentence_transformers.json", default_prompt_name="q")
    with pytest.raises(UsageError, match="default_prompt_name 'q' is not supported for text-classification"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False, force=True)
    change(tmp_path / "hub/config_sentence_transformers.json", default_prompt_name=None)
    listed = json.loads((tmp_path / "hub/modules.json").read_text())
    score = {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.LogitScore"}
    (tmp_path / "hub/modules.json").write_text(json.dumps([*listed, score]))
    options: Any = {"verify": False, "force": True, "settings": ["problem_type=regression"]}
    with pytest.raises(UsageError, match="LogitScore is not supported for text-classification"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", **options)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", task="text-classification", **options)
