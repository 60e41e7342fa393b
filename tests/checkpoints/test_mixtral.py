"""Checkpoints of Mixtral, OLMoE and Qwen3-MoE in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import PreTrainedModel

import zoo as library
from tests.exported import sign_export
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError, UsageError, ZooError
from zoo_runtime import load_session

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "bos_token_id": None,
    "eos_token_id": 7, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 10},
    "Olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "head_dim": 10},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", {}),
    ("Mixtral", {"sliding_window": 5, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default",
                 "rope_theta": 123.0}, "num_experts_per_tok": 1, "hidden_act": "gelu_pytorch_tanh"}),
    ("Olmoe", {}),
    ("Olmoe", {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4, "num_experts_per_tok": 7}),
    ("Qwen3Moe", {"mlp_only_layers": [1]}),
    ("Qwen3Moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 4}),
]  # fmt: skip


def make(family: str, head: str = "ForCausalLM", **options: Any) -> PreTrainedModel:
    """Return a model whose routes are far from uniform."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **options})
    theirs: PreTrainedModel = getattr(transformers, f"{family}{head}")(config).eval().requires_grad_(False)
    theirs.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return theirs


def save(theirs: PreTrainedModel, target: Path) -> Path:
    theirs.save_pretrained(target)
    return target


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_imported_model_equals_the_original(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """With and without padding on the left."""
    theirs = make(family, **options)
    comparison = import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=True).comparison
    assert comparison.exact < 1e-13
    ours = library.load(tmp_path / "ours").double().eval()
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with Exact(theirs.double()), torch.inference_mode():
        assert_close(ours(ids), theirs(ids).logits, rtol=1e-6, atol=1e-6)
        # transformers' rotary frequencies were rounded to float32.
        padded = theirs(ids, attention_mask=mask).logits
        assert_close(ours(ids, mask)[1, 6:], padded[1, 6:], rtol=1e-6, atol=1e-6)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_round_trip_is_bit_for_bit(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    theirs = make(family, **options)
    hub = save(theirs, tmp_path / "hub")
    import_checkpoint(hub, tmp_path / "ours", verify=True)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    kinds = [json.loads((tmp_path / name / "config.json").read_text())["model_type"] for name in ("hub", "back")]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("family", "name"),
    [("Mixtral", "block_sparse_moe.experts.4.w3"), ("Olmoe", "mlp.experts.6.up_proj")],
)
def test_files_have_one_tensor_for_each_expert(tmp_path: Path, family: str, name: str) -> None:
    """The names of published files, which the round trip would not notice if transformers changed them."""
    import_checkpoint(save(make(family), tmp_path / "hub"), tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    assert f"model.layers.2.{name}.weight" in load_file(tmp_path / "back" / "model.safetensors")
    assert "blocks.2.mlp.experts.up" in load_file(tmp_path / "ours" / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_base_models_are_sentence_encoders(tmp_path: Path, family: str) -> None:
    """Their files lack the prefix ``model.``, also before the numbers of experts."""
    theirs = make(family, "Model")
    hub = save(theirs, tmp_path / "hub")
    import_checkpoint(hub, tmp_path / "ours", verify=True)
    ours = library.load(tmp_path / "ours").double().eval()
    ids = torch.arange(12)[None]
    with Exact(theirs.double()), torch.inference_mode():
        assert_close(ours(ids)["last_hidden_state"], theirs(ids).last_hidden_state)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    assert load_file(hub / "model.safetensors").keys() == load_file(tmp_path / "back" / "model.safetensors").keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_texts_equal_the_original(tmp_path: Path, family: str) -> None:
    theirs = make(family, eos_token_id=None)
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours")
    sign_export(tmp_path / "ours")
    prompts = [[5, 9, 33, 2], [8] * 19, [41]]
    with load_session(tmp_path / "ours") as session:
        found = [item["generated_ids"] for item in session.run(prompts, max_new_tokens=30)]
    for prompt, ids in zip(prompts, found, strict=True):
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
        assert wanted[0, len(prompt) :].tolist() == ids


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Mixtral", {"num_experts_per_tok": 6}, "experts_per_token 6 is above num_experts 5"),
        ("Mixtral", {"num_local_experts": 0}, "num_experts"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be positive, got 0"),
        ("Qwen3Moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of numbers of layers, got ['1']"),
        ("Qwen3Moe", {"router_aux_loss_coef": -1.0}, "router_aux_loss must not be negative, got -1.0"),
    ],
    ids=str,
)
def test_bad_configuration_is_one_line(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    hub = save(make(family), tmp_path / "hub")
    path = hub / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UsageError) as error:
        import_checkpoint(hub, tmp_path / "ours", verify=True)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()


def without(number: int) -> Any:
    return lambda tensors: {name: value for name, value in tensors.items() if f"experts.{number}.w1" not in name}


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    return {**tensors, name: tensors[name][:, 1:].clone()}


def further(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.0.block_sparse_moe.experts.#.w2.weight"
    return {**tensors, **{name.replace("#", "5"): tensors[name.replace("#", "4")].clone()}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(4), "experts.#.w1.weight has shape (4, 20, 24), but the configuration requires (5, 20, 24)"),
        (without(2), "missing model.layers.0.block_sparse_moe.experts.#.w1.weight"),
        (narrow, "unexpected model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        (further, "experts.#.w2.weight has shape (6, 24, 20), but the configuration requires (5, 24, 20)"),
    ],
    ids=["last expert missing", "expert missing", "another shape", "too many"],
)
def test_files_without_exactly_the_experts_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    hub = save(make("Mixtral"), tmp_path / "hub")
    save_file(change(load_file(hub / "model.safetensors")), hub / "model.safetensors", {"format": "pt"})
    with pytest.raises(ZooError) as error:
        import_checkpoint(hub, tmp_path / "ours", verify=True)
    assert isinstance(error.value, ArtifactError)
    assert message in str(error.value)
