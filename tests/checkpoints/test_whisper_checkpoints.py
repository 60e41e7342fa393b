"""Whisper checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import UsageError
from zoo.registry import registry
from zoo_runtime import load_session

SIZES = {
    "vocab_size": 61, "num_mel_bins": 20, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36,
    "max_source_positions": 25, "max_target_positions": 32, "decoder_start_token_id": 50, "eos_token_id": 49,
    "bos_token_id": 49, "pad_token_id": 49, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": 50, "eos_token_id": 49, "pad_token_id": 49, "bos_token_id": 49, "max_length": 32,
    "lang_to_id": {"<|en|>": 51, "<|de|>": 52, "<|fr|>": 53}, "task_to_id": {"translate": 54, "transcribe": 55},
    "no_timestamps_token_id": 56, "is_multilingual": True, "suppress_tokens": [1, 2, 7, 51, 52, 53, 54, 55],
    "begin_suppress_tokens": [5, 49], "forced_decoder_ids": [[1, None], [2, 55]],
}  # fmt: skip
SAMPLES = 25 * 320


def export_with_settings(
    theirs: WhisperForConditionalGeneration, settings: Mapping[str, Any], folder: Path, *changes: str
) -> None:
    """Give a model settings of generation, save it as FOLDER/hub, and import and export it as FOLDER/ours."""
    for key, value in settings.items():
        setattr(theirs.generation_config, key, value)
    theirs.save_pretrained(folder / "hub")
    (folder / "hub" / "generation_config.json").write_text(json.dumps(settings))
    import_checkpoint(folder / "hub", folder / "ours", settings=changes, verify=False)
    sign_export(folder / "ours")


def make(**options: Any) -> WhisperForConditionalGeneration:
    theirs = WhisperForConditionalGeneration(WhisperConfig(**{**SIZES, **options})).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return theirs


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("options", "settings"),
    [({}, []), ({"tie_word_embeddings": False, "activation_function": "relu"}, []), ({}, ["input=features"])],
    ids=["tied", "untied", "features"],
)
def test_imported_model_equals_the_original(tmp_path: Path, options: dict[str, Any], settings: list[str]) -> None:
    """zoo compares outputs for sound in float64."""
    make(**options).save_pretrained(tmp_path / "hub")
    comparison = import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=settings).comparison
    assert comparison.reason is None
    assert comparison.exact < 1e-12


def test_round_trip_is_bit_for_bit(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert WhisperFeatureExtractor.from_pretrained(tmp_path / "back").n_samples == SAMPLES


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("whisper-tiny", {}),
        ("whisper-base", {"d_model": 512, "layers": 6, "heads": 8}),
        ("whisper-small", {"d_model": 768, "layers": 12, "heads": 12}),
        ("whisper-medium", {"d_model": 1024, "layers": 24, "heads": 16}),
        ("whisper-large-v3", {"d_model": 1280, "layers": 32, "heads": 20, "vocab_size": 51866, "num_mel_bins": 128}),
        ("whisper-large-v3-turbo", {"d_model": 1280, "layers": 32, "heads": 20, "vocab_size": 51866,
                                    "num_mel_bins": 128, "decoder_layers": 4}),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_of_the_original(name: str, sizes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"d_model": 384, "layers": 4, "heads": 6, **sizes}
    layers, heads, width = values.pop("layers"), values.pop("heads"), values["d_model"]
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder")
             for key, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))}  # fmt: skip
    with torch.device("meta"):
        theirs = WhisperForConditionalGeneration(WhisperConfig(**{**sides, **values}))
    wanted = sum(parameter.numel() for parameter in theirs.parameters())
    cost = registry().resolve(name).config.cost()
    assert cost is not None
    assert cost.parameters == wanted
    if name == "whisper-tiny":
        assert wanted == 37_760_640


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"language": "de"}, {"language": "fr", "translate": True}], ids=str)
def test_greedy_texts_equal_the_original(tmp_path: Path, options: dict[str, Any]) -> None:
    """With detected and chosen languages, suppressed tokens, and a synthesised tone."""
    theirs = make()
    export_with_settings(theirs, GENERATION, tmp_path)
    times = np.arange(SAMPLES) / 16000
    sounds = [np.sin(2 * np.pi * (300 + rate * times) * times).astype(np.float32) * 0.4 for rate in (0, 900, 4000)]
    with load_session(tmp_path / "ours") as session:
        results = session.run(sounds, max_new_tokens=12, **options)
        drafted = session.run(sounds, max_new_tokens=12, prompt_lookup=3, **options)
        beams = session.run(sounds, max_new_tokens=12, num_beams=2, **options)
    found = [item["generated_ids"] for item in results]
    languages = [item["language"] for item in results]
    assert [item["generated_ids"] for item in drafted] == found
    assert [item["language"] for item in drafted] == [item["language"] for item in beams] == languages
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    extractor.n_samples = SAMPLES
    chosen: dict[str, Any] = {"language": options.get("language")}
    chosen["task"] = "translate" if options.get("translate") else None
    for sound, ids in zip(sounds, found, strict=True):
        features = extractor(sound, sampling_rate=16000, return_tensors="pt").input_features
        wanted = theirs.generate(features, max_new_tokens=12, do_sample=False, **{k: v for k, v in chosen.items() if v})
        row = wanted[0].tolist()
        assert row[-len(ids) :] == ids


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"scale_embedding": True}, "scale_embedding True is not supported"),
        ("config.json", {"d_model": 22}, "hidden_size 22 is not divisible by num_heads 4"),
        ("preprocessor_config.json", {"hop_length": 100}, "hop_length 100 is not supported, only 160"),
    ],
)
def test_bad_configuration_is_one_line(tmp_path: Path, file: str, changes: dict[str, Any], message: str) -> None:
    make().save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(UsageError) as error:
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
