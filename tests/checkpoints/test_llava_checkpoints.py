"""Checkpoints of LLaVA, from random transformers models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import LlavaConfig, LlavaForConditionalGeneration

import zoo as library
from tests.architectures.originals import save_random
from tests.runtime.image_chat_models import save_llava
from zoo import ParityError, UsageError
from zoo.checkpoints import Checkpoint, Exact, Imported, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import read_configuration
from zoo.models.count import parameter_count
from zoo_plugins.llava.config import LlavaConfig as OurConfig
from zoo_plugins.llava.hub import LLAVA

VISION: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 37, "max_position_embeddings": 48, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", **VISION}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
FULL = {"vision_feature_select_strategy": "full"}
MODELS: dict[str, dict[str, Any]] = {
    "clip and llama": {"vision_config": CLIP, "text_config": {"model_type": "llama", **TEXT}},
    "siglip and qwen2": {
        "vision_config": {**SIGLIP, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
        "text_config": {"model_type": "qwen2", **TEXT, "tie_word_embeddings": True},
        "vision_feature_layer": -1,
        **FULL,
    },
    "clip and mistral": {
        "vision_config": {**CLIP, "num_channels": 1},
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": 9, "head_dim": 6},
        "vision_feature_layer": [0, -2, 3],
        "projector_hidden_act": "relu",
        "multimodal_projector_bias": False,
        **FULL,
    },
}


def save(values: dict[str, Any], folder: Path) -> Any:
    config = LlavaConfig(**{"image_token_index": 5, **values})
    return save_random("LlavaForConditionalGeneration", config, folder)


def check(theirs: Any, folder: Path) -> Imported:
    """Import ``folder``/hub, publish it again, and compare both models in float64."""
    imported = import_checkpoint(folder / "hub", folder / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    assert "LlavaForConditionalGeneration of transformers" in str(imported.comparison)
    assert parameter_count(imported.spec) == sum(parameter.numel() for parameter in theirs.parameters())
    exported = export_checkpoint(folder / "ours", folder / "back", verify=True)
    assert (exported.model_type, exported.comparison.exact < 1e-12) == ("llava", True)
    back = LlavaForConditionalGeneration.from_pretrained(folder / "back", attn_implementation="eager")
    again, wanted = back.state_dict(), theirs.state_dict()
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    c = imported.spec.config
    assert isinstance(c, OurConfig)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, 61, (2, c.num_features + 9), generator=generator)
    ids[0, 2 : 2 + c.num_features] = ids[1, 7 : 7 + c.num_features] = 5
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pixels = torch.randn(2, c.num_channels, 32, 32, generator=generator, dtype=torch.float64)
    feeds = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    ours, theirs, back = library.load(folder / "ours").double(), theirs.double(), back.double()
    with torch.inference_mode():
        with Exact(theirs):
            expected = theirs(**feeds, position_ids=positions).logits[mask.bool()]
        with Exact(back):
            assert_close(back(**feeds, position_ids=positions).logits[mask.bool()], expected, rtol=0, atol=1e-10)
        assert_close(ours(**feeds)[mask.bool()], expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.1
    return imported


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    imported = check(save(MODELS[name], tmp_path / "hub"), tmp_path)
    c = imported.spec.config
    assert (c.bos_token_id, c.eos_token_id, c.pad_token_id, c.image_token_id) == (0, 2, 1, 5)


def drawn(number: int, folder: Path) -> Any:
    """Draw a random configuration and save a random model of it."""
    rng = random.Random(number)
    heads = rng.choice([1, 2, 4])
    image: dict[str, Any] = {
        "num_hidden_layers": rng.randint(1, 4), "num_attention_heads": heads, "hidden_size": 4 * heads,
        "intermediate_size": rng.choice([12, 17]), "patch_size": rng.choice([7, 8, 16]), "image_size": 32,
        "hidden_act": rng.choice(["quick_gelu", "gelu", "gelu_pytorch_tanh"]),
        "layer_norm_eps": rng.choice([1e-5, 1e-2]), "num_channels": rng.choice([1, 3]),
    }  # fmt: skip
    siglip = rng.random() < 0.4
    layers = [
        rng.randint(-image["num_hidden_layers"] - 1, image["num_hidden_layers"]) for _ in range(rng.randint(1, 3))
    ]
    family, groups = rng.choice(["llama", "mistral", "qwen2"]), rng.choice([1, 2, 3])
    text: dict[str, Any] = {
        **TEXT, "model_type": family, "num_key_value_heads": groups, "num_attention_heads": groups * rng.choice([1, 2]),
        "hidden_size": 24, "head_dim": rng.choice([4, 10]), "rms_norm_eps": rng.choice([1e-6, 1e-2]),
        "num_hidden_layers": rng.randint(1, 3), "tie_word_embeddings": rng.choice([False, True]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([50.0, 1e4])},
    }  # fmt: skip
    if family == "llama":
        text |= {"attention_bias": rng.choice([False, True]), "mlp_bias": rng.choice([False, True])}
    if family == "mistral":
        text["sliding_window"] = rng.choice([None, 5])
    values = {
        "vision_config": {**image, **({"model_type": "siglip_vision_model", "vision_use_head": False} if siglip else
                                      {"model_type": "clip_vision_model"})},
        "text_config": text,
        "vision_feature_layer": layers[0] if len(layers) == 1 else layers,
        "vision_feature_select_strategy": "full" if siglip else rng.choice(["default", "full"]),
        "projector_hidden_act": rng.choice(["gelu", "relu", "silu"]),
        "multimodal_projector_bias": rng.choice([False, True]),
    }  # fmt: skip
    return save(values, folder)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("number", range(20))
def test_random_configuration(tmp_path: Path, number: int) -> None:
    check(drawn(number, tmp_path / "hub"), tmp_path)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_of_other_versions_are_read_and_the_published_ones_written(tmp_path: Path, prefix: str) -> None:
    """Transformers 4 names a further part of the image encoder; names of the class of transformers 5 are read, too."""
    theirs = save(MODELS["clip and llama"], tmp_path / "hub")
    path = tmp_path / "hub" / "model.safetensors"
    tensors = load_file(path)
    old = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()}
    save_file(theirs.state_dict() if prefix else old, path, {"format": "pt"})
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == old.keys()
    assert all(torch.equal(again[name], value) for name, value in old.items())


def read(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", **values}))
    return read_configuration(LLAVA, Checkpoint(folder, planned={}), OurConfig).to_dict()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"text_config": {"model_type": "llama", "vocab_size": 32064}},
        {"text_config": {"model_type": "mistral", "vocab_size": 32064}},
        {"text_config": {"model_type": "qwen2"}, "vision_config": {"model_type": "clip_vision_model"}},
        {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}, **FULL},
    ],
    ids=str,
)
def test_defaults_equal_those_of_the_original(tmp_path: Path, said: dict[str, Any]) -> None:
    """A config.json with few values means the same as one with all keys of the original classes."""
    said = {"image_token_index": 7, **said}
    assert read(said, tmp_path) == read(json.loads(LlavaConfig(**said).to_json_string(use_diff=False)), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"model_type": "gemma3_text"}},
            "text_config of 'gemma3_text' is not supported.*: known: llama, mistral, qwen2",
        ),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config of 'pixtral' is not supported.*: known: clip"),
        ({"vision_config": SIGLIP}, "vision_feature_select_strategy 'default' is not supported.*: known: full"),
        ({"vision_config": {**SIGLIP, "vision_use_head": True}, **FULL}, "vision_use_head true is not supported"),
        ({"vision_config": {**SIGLIP, "vision_use_head": None}, **FULL}, "vision_use_head true is not supported"),
        ({"vision_config": {**CLIP, "image_size": [32, 40]}}, "image_size must be int"),
        ({"vision_config": {**CLIP, "hidden_act": "mish"}}, "hidden_act 'mish' is not supported"),
        ({"vision_config": {**CLIP, "attention_bias": True}}, "not understood: attention_bias True"),
        ({"vision_feature_layer": 9}, r"image_feature_layers must be numbers from -4 to 3 .*, got \(9,\)"),
        ({"vision_feature_layer": None}, "image_feature_layers must be"),
        ({"vision_feature_select_strategy": "cls"}, "'cls' is not supported.*: known: default, full"),
        ({"text_config": {**TEXT, "rope_scaling": {"rope_type": "odd"}}}, "rope_type 'odd' is not supported"),
        ({"text_config": {**TEXT, "num_experts": 4}}, "not understood: num_experts 4"),
        ({"image_token_index": 99}, "image_token_id 99 lies outside vocab_size 61"),
        ({"image_grid_pinpoints": [[336, 672]]}, "not understood: image_grid_pinpoints"),
    ],
    ids=str,
)
def test_bad_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = {"image_token_index": 5, **MODELS["clip and llama"], **changes}
    with pytest.raises(UsageError, match=message):
        read(values, tmp_path)


def test_decoder_or_image_encoder_of_no_known_family_is_not_published(tmp_path: Path) -> None:
    for name, values, said in (
        ("norms", {"qk_norm": True}, "cannot represent qk_norm True"),
        ("encoder", {"image_pre_norm": False}, "no image encoder of transformers has"),
    ):
        model = library.create_model("llava-tiny", **values)
        library.save(model, tmp_path / name)
        with pytest.raises(UsageError, match=said):
            export_checkpoint(tmp_path / name, tmp_path / "back")


@pytest.mark.parametrize("key", ["num_additional_image_tokens", "patch_size"])
def test_processor_that_prepares_prompts_in_another_way_is_refused(tmp_path: Path, key: str) -> None:
    save_llava(tmp_path / "hub")
    path = tmp_path / "hub" / "processor_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: content[key] * 2}))
    with pytest.raises(ParityError, match="becomes other tokens"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert not (tmp_path / "ours").exists()


def test_files_of_the_processor_are_published_as_they_were_or_written(tmp_path: Path) -> None:
    """For a model that was not imported, written files give transformers' processor the model's own settings."""
    save_llava(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    for name in ("processor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()
    config = {**library.load(tmp_path / "ours").config.to_dict()}
    library.save(
        library.create_model("llava-tiny", **config), tmp_path / "made", tokenizer=tmp_path / "hub" / "tokenizer.json"
    )
    export_checkpoint(tmp_path / "made", tmp_path / "written", verify=False)
    again = import_checkpoint(tmp_path / "written", tmp_path / "again", verify=True)
    assert again.spec.config.to_dict() == config
    assert again.answers.counts["images and prompts to inputs"] == 32
