"""The layout of the hub's ONNX models: its files and numbers, and the libraries that read it where installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from tests.artifact.test_card import result_cells
from tests.conftest import Result
from zoo_export.publish.seq2seq import DECODER, ENCODER, divide

Exported = Callable[..., Path]
Zoo = Callable[..., Result]
Arrays = dict[str, np.ndarray[Any, Any]]
TEXTS = ["a text to read", "two", "The quick brown fox."]


def publish(zoo: Zoo, model: Path, *layouts: str) -> None:
    """Publish a model in layouts, in folders of their names."""
    for layout in layouts:
        result = zoo("publish", model, layout, "--layout", layout)
        assert result.status == 0, result.err


def call(file: str, feeds: Arrays) -> Arrays:
    """Run a published graph."""
    session = ort.InferenceSession(f"onnx/onnx/{file}.onnx", providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    wanted = {item.name for item in session.get_inputs()}
    return dict(zip(names, session.run(names, {key: feeds[key] for key in wanted}), strict=True))


def front_matter() -> dict[str, Any]:
    """Return the tags of the published card."""
    return dict(ModelCard.load("onnx/README.md").data.to_dict())


@pytest.mark.slow
def test_encoder_equals_transformers(exported_model: Exported, zoo: Zoo) -> None:
    """The tokenizer and the configuration are those of the hub, and the numbers those of transformers."""
    model = exported_model("bert-tiny", "task=sentence-embedding", "pad_token_id=0", noise=True)
    publish(zoo, model, "onnx", "hub")
    names = {str(path.relative_to("onnx")) for path in Path("onnx").rglob("*") if path.is_file()}
    assert names == {
        ".zoo-files.json", "1_Pooling/config.json", "README.md", "config.json", "modules.json", "onnx/model.onnx",
        "parity.json", "sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads(Path("onnx/config.json").read_text())["model_type"] == "bert"
    assert json.loads(Path("onnx/sentence_bert_config.json").read_text())["max_seq_length"] == 32
    tags = front_matter()
    assert (tags["pipeline_tag"], tags["library_name"]) == ("sentence-similarity", "sentence-transformers")
    graph = onnx.load("onnx/onnx/model.onnx").graph
    assert [value.name for value in graph.output] == ["last_hidden_state", "sentence_embedding"]
    inputs = AutoTokenizer.from_pretrained("onnx")(TEXTS, padding=True, return_tensors="np")
    found = call("model", dict(inputs))
    original = AutoModel.from_pretrained("hub").eval()
    with torch.no_grad():
        states = original(**{key: torch.from_numpy(value) for key, value in inputs.items()}).last_hidden_state.numpy()
    mask = inputs["attention_mask"][..., None]
    np.testing.assert_allclose(found["last_hidden_state"] * mask, states * mask, atol=2e-6)
    mean = (states * mask).sum(1) / mask.sum(1)
    vectors = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(found["sentence_embedding"], vectors, atol=2e-6)


@pytest.mark.slow
def test_dense_layers_have_their_weights(exported_model: Exported, zoo: Zoo) -> None:
    """sentence-transformers runs them after the graph."""
    model = exported_model("bert-tiny", "task=sentence-embedding", "projection_sizes=12", noise=True)
    publish(zoo, model, "onnx", "hub")
    name = "2_Dense/model.safetensors"
    assert Path("onnx", name).read_bytes() == Path("hub", name).read_bytes()


def test_card_has_what_was_verified(exported_model: Exported, zoo: Zoo) -> None:
    publish(zoo, exported_model("gpt-tiny"), "onnx")
    card = Path("onnx/README.md").read_text()
    evidence = json.loads(Path("onnx/parity.json").read_text())
    assert f"| parity.json, model | {' | '.join(result_cells(evidence))} |" in card
    assert "The published graphs were run again: recorded comparison holds" in card
    assert "num_layers" not in card
    assert front_matter()["pipeline_tag"] == "text-generation"


@pytest.mark.slow
def test_encoder_decoder_equals_transformers(exported_model: Exported, zoo: Zoo) -> None:
    """One decoder computes keys and values of the encoder's states in its first call, and keeps them."""
    publish(zoo, exported_model("t5-tiny", noise=True), "onnx", "hub")
    assert {path.stem for path in Path("onnx/onnx").iterdir()} == {ENCODER, DECODER}
    inputs = {"input_ids": np.array([[5, 6, 7, 8], [9, 4, 0, 0]]), "attention_mask": np.array([[1] * 4, [1, 1, 0, 0]])}
    states = call(ENCODER, inputs)["last_hidden_state"]
    ids = np.array([[0, 11, 12, 13], [0, 21, 22, 23]])
    empty = np.zeros((2, 4, 0, 16), np.float32)
    sides = [
        f"{layer}.{side}.{part}" for layer in (0, 1) for side in ("decoder", "encoder") for part in ("key", "value")
    ]
    past = {f"past_key_values.{name}": empty for name in sides}
    feeds = {"encoder_attention_mask": inputs["attention_mask"], "encoder_hidden_states": states}
    first = call(DECODER, {**feeds, **past, "input_ids": ids[:, :3], "use_cache_branch": np.array([False])})
    past = {f"past_key_values.{name}": first[f"present.{name}"] for name in sides}
    feeds["encoder_hidden_states"] = np.full_like(states, np.nan)  # not read again
    second = call(DECODER, {**feeds, **past, "input_ids": ids[:, 3:], "use_cache_branch": np.array([True])})
    original = AutoModelForSeq2SeqLM.from_pretrained("hub").eval()
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    with torch.no_grad():
        wanted = original(**tensors, decoder_input_ids=torch.from_numpy(ids)).logits.numpy()
    found = np.concatenate([first["logits"], second["logits"]], axis=1)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_wrong_decoder_is_refused(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published graphs are compared again, not those that were verified."""

    def wrong(*arguments: Any) -> Any:
        encoder, decoder = divide(*arguments)
        node = next(node for node in decoder.graph.node if node.op_type == "Softmax")
        node.op_type = "LogSoftmax"
        return encoder, decoder

    monkeypatch.setattr("zoo_export.publish.onnx_layout.divide", wrong)
    zoo("publish", exported_model("t5-tiny", noise=True), "onnx", "--layout", "onnx").failed(
        4, "recorded comparison fails"
    )
    assert not Path("onnx").exists()


def test_grey_images_are_prepared_as_by_zoo(exported_model: Exported, zoo: Zoo) -> None:
    publish(zoo, exported_model("vit-tiny"), "onnx")
    image = Image.frombytes("L", (20, 11), np.random.default_rng(0).bytes(220))
    load: Any = AutoImageProcessor.from_pretrained
    pixels = load("onnx", backend="pil")(image, return_tensors="np")["pixel_values"]
    wanted = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR), np.float32) / 127.5 - 1
    np.testing.assert_allclose(pixels[0, 0], wanted, atol=1e-6)
    assert call("model", {"pixel_values": pixels})["logits"].shape == (1, 10)


def test_models_without_a_layout_are_refused(exported_model: Exported, zoo: Zoo) -> None:
    zoo("publish", exported_model("transformer-tiny"), "onnx", "--layout", "onnx").failed(
        2, "encoder, decoder", "--layout standalone"
    )
    assert not Path("onnx").exists()


@pytest.mark.slow
def test_precisions_are_named_as_by_optimum(exported_model: Exported, zoo: Zoo) -> None:
    model = Path(shutil.copytree(exported_model("bert-tiny", "task=feature-extraction", noise=True), "model"))
    for precision in ("int8", "float16"):
        assert zoo("quantize", model, "--dtype", precision).status == 0
    publish(zoo, model, "onnx")
    files = {path.stem for path in Path("onnx/onnx").iterdir()}
    assert files == {"model", "model_quantized", "model_fp16"}
    assert json.loads(Path("onnx/parity.int8.json").read_text())["verified"]


@pytest.mark.slow
def test_sentence_transformers_reads_it(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optimum.onnxruntime")
    from sentence_transformers import SentenceTransformer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    publish(zoo, exported_model("bert-tiny", "task=sentence-embedding", "pad_token_id=0", noise=True), "onnx", "hub")
    options = {"provider": "CPUExecutionProvider"}
    found = SentenceTransformer("onnx", backend="onnx", model_kwargs=options).encode(TEXTS)
    np.testing.assert_allclose(found, SentenceTransformer("hub").encode(TEXTS), atol=1e-5)


@pytest.mark.slow
def test_fastembed_reads_it(exported_model: Exported, zoo: Zoo) -> None:
    fastembed, described = (pytest.importorskip(f"fastembed{name}") for name in ("", ".common.model_description"))
    from sentence_transformers import SentenceTransformer

    publish(zoo, exported_model("bert-tiny", "task=sentence-embedding", "pad_token_id=0", noise=True), "onnx", "hub")
    fastembed.TextEmbedding.add_custom_model(
        "mine",
        described.PoolingType.MEAN,
        True,
        described.ModelSource(hf="none/none"),
        64,
        model_file="onnx/model.onnx",
    )
    found = [*fastembed.TextEmbedding("mine", specific_model_path="onnx").embed(TEXTS)]
    np.testing.assert_allclose(found, SentenceTransformer("hub").encode(TEXTS), atol=1e-5)


@pytest.mark.slow
def test_optimum_generates_the_same_tokens(exported_model: Exported, zoo: Zoo) -> None:
    optimum = pytest.importorskip("optimum.onnxruntime")
    publish(zoo, exported_model("t5-tiny", noise=True), "onnx", "hub")
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    options: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    models = [optimum.ORTModelForSeq2SeqLM.from_pretrained("onnx"), AutoModelForSeq2SeqLM.from_pretrained("hub")]
    for beams in (1, 3):
        found, wanted = (model.generate(**inputs, **options, num_beams=beams) for model in models)
        assert torch.equal(found, wanted)
