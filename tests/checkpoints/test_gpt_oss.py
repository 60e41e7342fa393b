"""Checkpoints of gpt-oss, from random transformers models, with experts in MXFP4 or not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GptOssForSequenceClassification,
    GptOssModel,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zoo as library
from tests.checkpoints.decoders import (
    Family,
    check_defaults,
    check_generation,
    check_imported,
    check_published,
    check_refused,
    edit,
    logits_of,
    same,
    save,
    sharpen,
)
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.checkpoints.mxfp4 import widen_mxfp4
from zoo.errors import ArtifactError, UsageError
from zoo.registry import registry

YARN = {
    "rope_type": "yarn", "rope_theta": 1500.0, "factor": 4.0, "original_max_position_embeddings": 10,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
FAMILY = Family(
    GptOssForCausalLM,
    GptOssConfig,
    {
        "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 20,
        "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7, "rms_norm_eps": 1e-3,
        "rope_parameters": YARN, "eos_token_id": 7, "pad_token_id": 3,
    },
    {
        "vocab_size": 61, "max_seq_len": 40, "hidden_size": 24, "num_layers": 3, "num_heads": 6, "num_kv_heads": 3,
        "head_dim": 10, "intermediate_size": 20, "num_experts": 5, "experts_per_token": 3, "norm_eps": 1e-3,
        "sliding_windows": (7, 0), "rope_scaling": "yarn", "rope_factor": 4.0, "rope_theta": 1500.0,
        "rope_truncate": False, "rope_original_length": 10, "attention_bias": True, "attention_output_bias": True,
        "attention_sinks": True, "mlp_bias": True, "expert_limit": 7.0, "activation": "gelu_sigmoid",
        "eos_token_id": 7, "pad_token_id": 3, "router_aux_loss": 0.001, "normalize_routing": True,
    },
)  # fmt: skip
UNSAID = {"hidden_act", "rope_parameters", "sliding_window", "use_cache", "dtype", "_name_or_path"}
"""Keys that the original class does not read, that are redundant, or whose values by default are written."""
QUANTIZED: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
METHOD = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
EXPERTS = "model.layers.0.mlp.experts"


def make(model: type[PreTrainedModel] | None = None, **options: Any) -> PreTrainedModel:
    """Return a model whose experts are computed one after another, which float64 needs."""
    theirs = FAMILY.make(model, **options)
    theirs.set_experts_implementation("eager")
    return theirs


def quantized(folder: Path, **options: Any) -> Path:
    """Save a model whose experts are random numbers in MXFP4, and whose other tensors are bfloat16."""
    save(make(**QUANTIZED, **options).bfloat16(), folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, **METHOD)
    return folder


def test_checkpoint_is_imported(tmp_path: Path) -> None:
    theirs = make()
    config = check_imported(theirs, tmp_path).spec.config
    assert {key: getattr(config, key) for key in FAMILY.ours} == FAMILY.ours
    same(tmp_path / "ours", theirs)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    theirs = make()
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    again = check_published(theirs, tmp_path, UNSAID, AutoModelForCausalLM)
    again.set_experts_implementation("eager")
    assert torch.equal(logits_of(again), logits_of(theirs))


def drawn(number: int) -> PreTrainedModel:
    """Draw a random configuration and a random model."""
    rng = random.Random(number)
    layers, kv_heads, experts = rng.randint(1, 4), rng.choice([1, 2, 3]), rng.randint(1, 6)
    kinds = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    ropes = [YARN, {**YARN, "truncate": True, "attention_factor": 0.8}, {"rope_type": "default", "rope_theta": 50.0}]
    return make(
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * rng.choice([1, 2, 4]),
        head_dim=rng.choice([6, 10, 16]),
        hidden_size=rng.choice([24, 36]),
        intermediate_size=rng.choice([12, 37]),
        layer_types=rng.choice([kinds, None]),
        sliding_window=rng.choice([1, 2, 5, 100]),
        num_local_experts=experts,
        num_experts_per_tok=rng.randint(1, experts),
        swiglu_limit=rng.choice([0.3, 7.0]),
        attention_bias=rng.choice([False, True]),
        tie_word_embeddings=rng.choice([False, True]),
        router_aux_loss_coef=rng.choice([0.0, 0.9]),
        rope_parameters=rng.choice(ropes),
    )


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("number", range(24))
def test_random_configuration(tmp_path: Path, number: int) -> None:
    theirs = drawn(number)
    check_imported(theirs, tmp_path)
    check_published(theirs, tmp_path, UNSAID)
    same(tmp_path / "ours", theirs)


def test_defaults_equal_those_of_the_original(tmp_path: Path) -> None:
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    theirs = GptOssConfig(**tokens)
    check_defaults(theirs, {name: getattr(theirs, name) for name in sizes}, 131072, tmp_path)


def test_keys_of_published_files_are_understood(tmp_path: Path) -> None:
    """Files of transformers 4, with settings that the original class does not read."""
    theirs = make()
    folder = save(theirs, tmp_path / "hub")
    scaling = {key: value for key, value in YARN.items() if key != "rope_theta"}
    edit(folder, rope_parameters=None, rope_theta=1500.0, rope_scaling=scaling, swiglu_alpha=None)
    edit(folder, initial_context_length=10, experts_per_token=3)
    import_checkpoint(folder, tmp_path / "ours", verify=True)
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 is not supported, only 1.702"),
        ({"swiglu_limit": 0.0}, "expert_limit must be positive, got 0.0"),
        ({"num_experts_per_tok": 6}, "experts_per_token 6 is above num_experts 5"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types must name 3 layers, each full_attention or sliding"),
        ({"sliding_window": None}, "layer_types has sliding_attention, but there is no sliding_window"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type 'proportional' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantised \(fp8\)"),
        ({"num_experts": 5}, "num_experts"),
    ],
    ids=str,
)
def test_bad_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    check_refused(make(), changes, message, tmp_path)


def test_base_models_are_sentence_encoders(tmp_path: Path) -> None:
    theirs = make(GptOssModel)
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=True)
    ours, ids = library.load(tmp_path / "ours").double().eval(), torch.arange(20)[None]
    with Exact(theirs.double()), torch.inference_mode():
        assert_close(ours(ids)["last_hidden_state"], theirs(ids).last_hidden_state, rtol=0, atol=1e-10)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_classifiers_are_imported(tmp_path: Path) -> None:
    theirs = make(GptOssForSequenceClassification, num_labels=4)
    imported = import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=True)
    assert imported.spec.task == "text-classification"
    assert imported.comparison.exact < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["portable", "cpu"])
def test_generated_texts_equal_the_original(tmp_path: Path, profile: str) -> None:
    theirs = make(eos_token_id=None)
    sharpen(theirs)
    save(theirs, tmp_path / "hub")
    check_generation(theirs, tmp_path, profile)


@pytest.mark.parametrize(("name", "parameters"), [("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)])
def test_published_sizes_have_as_many_parameters_as_the_original(name: str, parameters: int) -> None:
    c = registry().resolve(name).config
    with torch.device("meta"):
        theirs = GptOssForCausalLM(GptOssConfig(num_hidden_layers=c.num_layers, num_local_experts=c.num_experts))
    assert c.cost().parameters == sum(value.numel() for value in theirs.parameters()) == parameters


# MXFP4.


def test_every_number_is_widened_exactly() -> None:
    """Each byte with each scale. 255 stands for no number; transformers reads it as a power of two."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(255, 1, -1, -1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).expand(-1, -1, 16)
    assert torch.equal(widen_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales).transpose(1, 2))
    assert widen_mxfp4(blocks[:1], torch.full_like(scales[:1], 255)).isnan().all()


def test_quantised_experts_are_widened(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "hub")
    imported = import_checkpoint(folder, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "hub"))
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    for layer in range(2):
        stack = EXPERTS.replace("0", str(layer))
        gate_up, down = (
            convert_moe_packed_tensors(theirs[f"{stack}.{name}_blocks"], theirs[f"{stack}.{name}_scales"])
            for name in ("gate_up_proj", "down_proj")
        )
        prefix = f"blocks.{layer}.mlp.experts"
        assert torch.equal(ours[f"{prefix}.gate"], gate_up[..., ::2].transpose(1, 2))
        assert torch.equal(ours[f"{prefix}.up"], gate_up[..., 1::2].transpose(1, 2))
        assert torch.equal(ours[f"{prefix}.down"], down.transpose(1, 2))


def test_widened_experts_are_published(tmp_path: Path) -> None:
    """As bfloat16, with a configuration that says so."""
    import_checkpoint(quantized(tmp_path / "hub"), tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    back, hub = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "hub"))
    wanted = convert_moe_packed_tensors(hub[f"{EXPERTS}.gate_up_proj_blocks"], hub[f"{EXPERTS}.gate_up_proj_scales"])
    assert torch.equal(back[f"{EXPERTS}.gate_up_proj"], wanted)
    assert not any(name.endswith(("_blocks", "_scales")) for name in back)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_quantised_experts_may_be_read_in_another_dtype(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "hub")
    import_checkpoint(folder, tmp_path / "ours", verify=False)
    import_checkpoint(folder, tmp_path / "wide", verify=False, dtype="float32")
    narrow, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "wide"))
    assert all(torch.equal(narrow[name].float(), wide[name]) for name in narrow)


def without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERTS}.down_proj_scales"]


def both(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}.down_proj"] = torch.zeros(5, 64, 32, dtype=torch.bfloat16)


def narrow(tensors: dict[str, Tensor]) -> None:
    for name in ("blocks", "scales"):
        tensors[f"{EXPERTS}.gate_up_proj_{name}"] = tensors[f"{EXPERTS}.gate_up_proj_{name}"][:, 2:].clone()


def signed(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}.down_proj_scales"] = tensors[f"{EXPERTS}.down_proj_scales"].to(torch.int8)


def no_number(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}.down_proj_scales"][2, 3, 1] = 255


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scales, "unexpected model.layers.0.mlp.experts.down_proj_blocks"),
        (both, "unexpected model.layers.0.mlp.experts.down_proj_blocks"),
        (narrow, r"gate_up_proj:gate has shape \(5, 63, 32\), but the configuration requires \(5, 64, 32\)"),
        (signed, "unexpected model.layers.0.mlp.experts.down_proj_blocks"),
        (no_number, "down_proj:rows has values that are not finite"),
    ],
)
def test_damaged_experts_are_refused(tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    folder = quantized(tmp_path / "hub")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((ArtifactError, UsageError), match=message):
        import_checkpoint(folder, tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()
