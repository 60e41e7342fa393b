"""wav2vec 2.0 and HuBERT checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures.sounds import RATE, save_sound_model, sounds
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_export.export import export_model
from zoo_plugins.wav2vec2.config import Wav2Vec2Config
from zoo_plugins.wav2vec2.hub import HUBERT, WAV2VEC2
from zoo_runtime import load_session

LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("Wav2Vec2ForCTC", {"feat_extract_norm": "group"}),
    "large": ("Wav2Vec2ForCTC", LARGE),
    "odd kernel": ("Wav2Vec2ForCTC", {**LARGE, "num_conv_pos_embeddings": 7, "feat_extract_activation": "relu"}),
    "not normalised": ("HubertForCTC", {"feat_extract_norm": "layer", "normalize": False}),
    "without a norm of features": ("HubertForCTC", {**LARGE, "feat_proj_layer_norm": False, "hidden_act": "relu"}),
    "classes": ("Wav2Vec2ForSequenceClassification", {**LARGE, "classifier_proj_size": 9}),
    "classes without mask": ("HubertForSequenceClassification", {"feat_extract_norm": "group"}),
}
TYPES = {"Wav2Vec2": "wav2vec2", "Hubert": "hubert"}


def type_of(model_class: str) -> str:
    return next(kind for name, kind in TYPES.items() if model_class.startswith(name))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """Outputs, texts and classes equal the original's; every tensor but the one of SpecAugment survives."""
    model_class, changes = MODELS[name]
    theirs = save_sound_model(model_class, tmp_path / "hub", **changes)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.spec.architecture.name == "wav2vec2"
    assert imported.comparison.exact < 1e-13
    texts = {"token lists to texts": 200, "sounds to texts": 3}
    found = texts if model_class.endswith("CTC") else {"sounds to classes": 3}
    assert imported.answers.counts == {"sounds to samples": 3, **found}
    lost = f"{type_of(model_class)}.masked_spec_embed"
    assert imported.head.dropped == (lost,)
    assert parameter_count(imported.spec) == sum(item.numel() for item in theirs.parameters()) - 16
    export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=type_of(model_class), verify=True)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hub", "back"))
    assert before.keys() - after.keys() == {lost}
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "back")
    assert extractor.do_normalize == changes.get("normalize", True)
    assert extractor.return_attention_mask == (changes["feat_extract_norm"] == "layer")


@pytest.mark.slow
def test_random_configurations(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(12):
        layers = draw.randint(1, 4)
        changes = {
            "feat_extract_norm": draw.choice(["group", "layer"]), "do_stable_layer_norm": draw.random() < 0.5,
            "conv_bias": draw.random() < 0.5, "conv_dim": [draw.randint(3, 9) for _ in range(layers)],
            "conv_kernel": [draw.randint(1, 6) for _ in range(layers)],
            "conv_stride": [draw.randint(1, 3) for _ in range(layers)], "num_feat_extract_layers": layers,
            "num_conv_pos_embeddings": draw.randint(1, 9), "num_hidden_layers": draw.randint(1, 3),
            "hidden_act": draw.choice(["gelu", "relu", "silu"]), "layer_norm_eps": 10 ** -draw.randint(2, 6),
            "feat_extract_activation": draw.choice(["gelu", "relu"]),
        }  # fmt: skip
        model_class = draw.choice([name for name, _ in MODELS.values()])
        hub = tmp_path / str(number)
        save_sound_model(model_class, hub / "hub", **changes)
        assert import_checkpoint(hub / "hub", hub / "ours").comparison.exact < 1e-12, changes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "large", "classes"])
def test_answers_of_an_export_equal_those_of_the_pipeline(tmp_path: Path, name: str) -> None:
    model_class, changes = MODELS[name]
    save_sound_model(model_class, tmp_path / "hub", **changes)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    task: Any = "automatic-speech-recognition" if name != "classes" else "audio-classification"
    ask = transformers.pipeline(task, model=str(tmp_path / "hub"), device="cpu")
    with load_session(tmp_path / "ours") as session:
        for sound, answer in zip(sounds(), session.run(sounds()), strict=True):
            wanted = ask(sound)
            assert answer["seconds"] == len(sound) / RATE
            if name == "classes":
                chances = {row["label"]: pytest.approx(row["score"], abs=1e-4) for row in wanted}
                assert {row["label"]: row["probability"] for row in answer["classes"]} == chances
            else:
                assert answer["text"] == wanted["text"]


def test_old_names_of_the_weight_norm_are_read(tmp_path: Path) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub", feat_extract_norm="group")
    file = tmp_path / "hub/model.safetensors"
    tensors = load_file(file)
    for number, old in enumerate("gv"):
        name = f"wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original{number}"
        tensors[f"wav2vec2.encoder.pos_conv_embed.conv.weight_{old}"] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
    assert import_checkpoint(tmp_path / "hub", tmp_path / "ours").comparison.exact < 1e-13


@pytest.mark.parametrize(("layout", "kind"), [(WAV2VEC2, "Wav2Vec2Config"), (HUBERT, "HubertConfig")])
def test_defaults_equal_those_of_the_original(tmp_path: Path, layout: Any, kind: str) -> None:
    config = getattr(transformers, kind)()

    def read(content: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_configuration(layout, Checkpoint(tmp_path, planned={}), Wav2Vec2Config)

    assert read({"model_type": config.model_type}) == read({**config.to_dict(), "architectures": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_weighted_layer_sum": True}, "use_weighted_layer_sum True is not supported"),
        ({"add_adapter": True}, "add_adapter True is not supported"),
        ({"adapter_attn_dim": 4}, "adapter_attn_dim 4 is not supported"),
        ({"feat_extract_norm": "batch"}, "convolution_norm"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"conv_stride": [5]}, "as many numbers"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_sound_model("Wav2Vec2ForCTC", tmp_path / "hub")
    path = tmp_path / "hub/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding_value": 1.0}, r"padding_value 1\.0 is not supported, only 0\.0.*preprocessor_config"),
        ({"feature_extractor_type": "SeamlessM4TFeatureExtractor"}, "SeamlessM4TFeatureExtractor' is not supported"),
        ({"sampling_rate": 0}, "sampling_rate must be a positive number of samples per second, got 0.*preprocessor"),
        ({"do_normalize": "yes"}, "normalize_sound must be bool.*preprocessor_config"),
    ],
    ids=str,
)
def test_another_feature_extractor_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_sound_model("HubertForCTC", tmp_path / "hub")
    path = tmp_path / "hub/preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")


@pytest.mark.parametrize(
    ("preset", "model_class", "options"),
    [
        ("wav2vec2-base-960h", "Wav2Vec2ForCTC", {}),
        ("wav2vec2-large-960h-lv60-self", "Wav2Vec2ForCTC", LARGE),
        ("hubert-large-ls960-ft", "HubertForCTC", LARGE),
    ],
)
def test_parameters_are_those_of_the_original(preset: str, model_class: str, options: dict[str, Any]) -> None:
    """But for the vector of SpecAugment."""
    wide = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    kind = getattr(transformers, model_class)
    with torch.device("meta"):
        theirs = kind(kind.config_class(**options, **(wide if options else {})))
    learned = sum(item.numel() for item in theirs.parameters()) - theirs.config.hidden_size
    assert parameter_count(registry().resolve(preset)) == learned
