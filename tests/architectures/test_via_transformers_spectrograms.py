"""Models of transformers that read spectrograms: how these are made, classes of sound, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.architectures.originals import save_random
from tests.architectures.sounds import RATE, sounds
from tests.conftest import Result
from zoo.arrays import Array
from zoo.audio import Spectrogram
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError, ParityError
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

LABELS = {"id2label": {0: "rain", 1: "tea", 2: "dog"}}
AST: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_length": 96,
    "num_mel_bins": 32, **LABELS,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 20,
    "max_source_positions": 50, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
    "vocab_size": 20, "classifier_proj_size": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None, **LABELS,
}  # fmt: skip
KINDS = ("kaldi", "kaldi, not scaled", "whisper", "whisper, weighted layers")


def save(kind: str, folder: Path) -> Any:
    """Save a random model and its feature extractor."""
    if kind.startswith("kaldi"):
        config: Any = transformers.ASTConfig(**AST)
        scaled = {"do_normalize": False} if "not" in kind else {"mean": -5.0, "std": 3.0}
        extractor: Any = transformers.ASTFeatureExtractor(max_length=96, num_mel_bins=32, **scaled)
        model = save_random("ASTForAudioClassification", config, folder)
    else:
        config = transformers.WhisperConfig(**WHISPER, use_weighted_layer_sum="weighted" in kind)
        extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
        model = save_random("WhisperForAudioClassification", config, folder)
    extractor.save_pretrained(folder)
    return model


def heard() -> list[Array]:
    """Return sounds that are long enough for a window."""
    return [sound for sound in sounds() if len(sound) >= 400]


@pytest.mark.parametrize("length", [400, 401, 559, 560, 12_345, 16_000])
@pytest.mark.parametrize("kind", ["kaldi", "whisper"])
def test_spectrograms_equal_those_of_the_feature_extractors(kind: str, length: int) -> None:
    random, times = np.random.default_rng(length), np.arange(length) / RATE
    for sound in (random.normal(0.05, 0.1, length), 0.5 * np.sin(2000 * times), np.zeros(length)):
        sound = sound.astype(np.float32)
        if kind == "kaldi":
            theirs: Any = transformers.ASTFeatureExtractor()
            ours = Spectrogram(kind="kaldi", num_mel_bins=128, num_frames=1024, mean=theirs.mean, std=2 * theirs.std)
        else:
            theirs = transformers.WhisperFeatureExtractor(feature_size=80)
            ours = Spectrogram(kind="whisper", num_mel_bins=80, num_frames=3000)
        (wanted,) = theirs(sound, sampling_rate=RATE, return_tensors="np")[theirs.model_input_names[0]]
        assert ours.shape == wanted.shape
        np.testing.assert_allclose(ours(sound), wanted, rtol=0, atol=1e-6 if kind == "kaldi" else 1e-4)


@pytest.mark.parametrize("kind", ["kaldi", "whisper"])
def test_long_sounds_are_cut_as_by_the_feature_extractors(kind: str) -> None:
    sound = np.random.default_rng(0).normal(0, 0.1, 3 * RATE).astype(np.float32)
    if kind == "kaldi":
        theirs: Any = transformers.ASTFeatureExtractor(max_length=96, num_mel_bins=32, do_normalize=False)
        ours = Spectrogram(kind="kaldi", num_mel_bins=32, num_frames=96)
        assert ours.most == 400 + 96 * 160 - 1
    else:
        theirs = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
        ours = Spectrogram(kind="whisper", num_mel_bins=20, num_frames=100)
    (wanted,) = theirs(sound, sampling_rate=RATE, return_tensors="np")[theirs.model_input_names[0]]
    np.testing.assert_allclose(ours(sound), wanted, rtol=0, atol=1e-4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_compared(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts == {"sounds to samples": 3, "sounds to classes": 3}
    assert imported.spec.config.spectrogram == kind.partition(",")[0]
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    before, after = (transformers.AutoFeatureExtractor.from_pretrained(tmp_path / name) for name in ("hub", "back"))
    for sound in heard():
        made = [extractor(sound, sampling_rate=RATE, return_tensors="np") for extractor in (before, after)]
        assert np.array_equal(*(values[before.model_input_names[0]] for values in made))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed
    ask = transformers.pipeline("audio-classification", model=str(tmp_path / "hub"), device="cpu")
    wanted = [{row["label"]: row["score"] for row in ask(sound)} for sound in heard()]
    assert max(abs(wanted[0][name] - wanted[1][name]) for name in wanted[0]) > 1e-3
    with load_session(tmp_path / "ours") as session:
        found = list(session.run(heard()))
        with pytest.raises(ArtifactError, match=r"samples of sound are more than the model's .*: give a part"):
            session.run([np.zeros(2 * RATE, np.float32)])
        if kind.startswith("kaldi"):
            with pytest.raises(ArtifactError, match="399 samples of sound are fewer than the model's 400"):
                session.run([np.zeros(399, np.float32)])
    for sound, answer, expected in zip(heard(), found, wanted, strict=True):
        assert answer["seconds"] == len(sound) / RATE
        assert {row["label"]: row["probability"] for row in answer["classes"]} == pytest.approx(expected, abs=1e-5)


def test_another_spectrogram_than_the_original_s_is_refused(tmp_path: Path) -> None:
    save("kaldi", tmp_path / "hub")
    with pytest.raises(ParityError, match="sound 1 is prepared in another way than by the original"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=["feature_mean=-4.9"])
    assert not (tmp_path / "ours").exists()


def test_what_cannot_be_read_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("kaldi", tmp_path / "hub")
    path = tmp_path / "hub" / "preprocessor_config.json"
    stated = json.loads(path.read_text())
    for status, content, said in (
        (3, {**stated, "sampling_rate": 8000}, f"sampling_rate 8000 is not supported, spectrograms are of {RATE} Hz"),
        (3, {**stated, "sampling_rate": None}, "sampling_rate must be a positive number of samples per second, got"),
        (3, {**stated, "max_length": 200}, "makes 200 frames, but the model of config.json reads 96"),
        (3, {**stated, "num_mel_bins": 16}, "makes 16 mel bins, but the model of config.json reads 32"),
        (2, {"feature_extractor_type": "WhisperFeatureExtractor"}, "reads other spectrograms than the checkpoint's"),
        (2, None, "does not read samples of sound: of classes for spectrograms, those of AST and Whisper are known"),
    ):
        path.write_text(json.dumps(content)) if content else path.unlink()
        error = zoo("import", tmp_path / "hub", "-o", "ours").failed(status, said)
        assert status == 2 or f": {path}" in error
        assert not Path("ours").exists()
