"""Sound models of transformers: how sound is prepared, texts and classes, masks, and what is refused."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import zoo as library
from tests.architectures.sounds import RATE, VOCABULARY, save_sound_model, sounds
from tests.conftest import Result
from zoo.artifact import TOKENIZER
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.tokenizers.files.load import read_tokenizer
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "without mask": ("Wav2Vec2ForCTC", {"feat_extract_norm": "group"}),
    "with mask": ("Wav2Vec2ForCTC", {"feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    "not normalised": ("HubertForCTC", {"feat_extract_norm": "layer", "normalize": False}),
    "relative positions": ("WavLMForCTC", {"feat_extract_norm": "layer", "num_buckets": 8, "max_bucket_distance": 16}),
    "classes": ("Wav2Vec2ForSequenceClassification", {"feat_extract_norm": "layer"}),
    "classes without mask": ("HubertForSequenceClassification", {"feat_extract_norm": "group"}),
}


def pipeline_of(folder: Path) -> Any:
    is_ctc = (folder / "vocab.json").exists()
    task: Any = "automatic-speech-recognition" if is_ctc else "audio-classification"
    return transformers.pipeline(task, model=str(folder), device="cpu")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_compared(tmp_path: Path, name: str) -> None:
    model_class, changes = MODELS[name]
    save_sound_model(model_class, tmp_path / "hub", **changes)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    texts = {"token lists to texts": 200, "sounds to texts": 3}
    found = texts if model_class.endswith("CTC") else {"sounds to classes": 3}
    assert imported.answers.counts == {"sounds to samples": 3, **found}
    graph = imported.spec.graphs[0]
    assert any(tensor.is_mask for tensor in graph.input_tensors()) == (changes["feat_extract_norm"] == "layer")
    assert (graph.sizes["samples"].min, imported.spec.config.normalize_sound) == (20, changes.get("normalize", True))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, name: str) -> None:
    model_class, changes = MODELS[name]
    save_sound_model(model_class, tmp_path / "hub", **changes)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed
    ask = pipeline_of(tmp_path / "hub")
    with load_session(tmp_path / "ours") as session:
        found = list(session.run(sounds()))
    for sound, answer in zip(sounds(), found, strict=True):
        wanted = ask(sound)
        assert answer["seconds"] == len(sound) / RATE
        if "text" in answer:
            assert answer["text"] == wanted["text"]
        else:
            chances = {row["label"]: pytest.approx(row["score"], abs=1e-4) for row in wanted}
            assert {row["label"]: row["probability"] for row in answer["classes"]} == chances


@pytest.mark.slow
def test_files_of_the_command_line(tmp_path: Path, zoo: Zoo) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub", feat_extract_norm="layer")
    assert "3 sounds to texts" in zoo("import", tmp_path / "hub", "-o", "ours").out
    assert zoo("export", "ours", "--onnx").status == 0
    integers = (sounds()[1] * 32767).astype("<i2")
    with wave.open("noise.wav", "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(integers.tobytes())
    wanted = pipeline_of(tmp_path / "hub")(integers.astype(np.float32) / 32768)["text"]
    assert zoo("run", "ours", "noise.wav").out.strip() == wanted
    soundfile = pytest.importorskip("soundfile")
    soundfile.write("noise.flac", integers, RATE)
    assert zoo("run", "ours", "noise.flac").out.strip() == wanted
    with wave.open("short.wav", "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(integers[:19].tobytes())
    zoo("run", "ours", "short.wav").failed(3, "19 samples of sound are fewer than the model's 20")


def test_padding_does_not_change_the_answers_of_a_class_with_a_mask(tmp_path: Path) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub", feat_extract_norm="layer")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    model = library.load(tmp_path / "ours")
    model.double()
    short, long = (torch.from_numpy(sound).double()[None] for sound in (sounds()[2] + 0.5, sounds()[1]))
    both = torch.full((2, long.shape[1]), torch.nan, dtype=torch.float64)
    mask = torch.zeros(both.shape, dtype=torch.long)
    for row, sound in enumerate((short, long)):
        both[row, : sound.shape[1]] = sound
        mask[row, : sound.shape[1]] = 1
    together = model(input_values=both, attention_mask=mask)["logits"]
    for row, sound in enumerate((short, long)):
        alone = model(input_values=sound)["logits"][0]
        torch.testing.assert_close(together[row, : len(alone)], alone)


def test_shortest_sound_of_a_class_that_pools_positions(tmp_path: Path) -> None:
    save_sound_model("SEWForCTC", tmp_path / "hub", feat_extract_norm="layer")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.answers.counts["sounds to texts"] == 3
    (graph,) = imported.spec.graphs
    assert graph.sizes["samples"].min == 30
    assert [tensor.dims for tensor in graph.input_tensors()] == [("batch", "samples")]
    assert graph.outputs[0].dims == ("batch", "(samples - 10) // 10", len(VOCABULARY))


def test_language_model_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub")
    (tmp_path / "hub" / "language_model").mkdir()
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert "texts are written without the language_model of the checkpoint" in imported.notes


def test_text_of_tokens(tmp_path: Path) -> None:
    """The delimiter of words is a space, blanks separate equal tokens, and special tokens are written."""
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    tokenizer = Tokenizer(read_tokenizer(tmp_path / "ours" / TOKENIZER))
    ids = [VOCABULARY.index(token) for token in ("|", "A", "A", "|", "É", "'", "<s>", "|")]
    assert tokenizer.decode(ids, special_tokens=True) == " AA É'<s> "
    assert tokenizer.encode("AB É").ids == [VOCABULARY.index(token) for token in ("A", "B", "|", "É")]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer_config.json", {"do_lower_case": True}, "do_lower_case True is not supported"),
        ("tokenizer_config.json", {"target_lang": "deu"}, "has no vocabulary of 'deu'"),
        (
            "preprocessor_config.json",
            {"feature_extractor_type": "SeamlessM4TFeatureExtractor"},
            "prepares sound in a way that zoo does not",
        ),
        ("preprocessor_config.json", {"sampling_rate": 0}, "sampling_rate must be a positive number of samples"),
        ("config.json", {"conv_stride": [0, 0]}, "conv_stride [0, 0] is not possible"),
        ("config.json", {"conv_stride": [5]}, "transformers cannot read the configuration: Class validation error"),
        ("config.json", {"dtype": "float128"}, "dtype 'float128' is no dtype of torch"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, zoo: Zoo, file: str, content: dict[str, Any], said: str
) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub")
    path = tmp_path / "hub" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    result = zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers")
    assert result.status in (2, 3) and said in result.err
    assert file.startswith("tokenizer") or file in result.err
    assert not Path("ours").exists()


def test_published_files_are_read_by_transformers(tmp_path: Path) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    before, after = (pipeline_of(tmp_path / name)(sounds()[1]) for name in ("hub", "back"))
    assert before == after
    before, after = (transformers.Wav2Vec2ForCTC.from_pretrained(tmp_path / name) for name in ("hub", "back"))
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
