"""Checkpoints of Qwen3.5's text decoder and of Qwen3-Next, from random transformers models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import zoo as library
from tests.exported import sign_export
from zoo.checkpoints import Exact, Rule, export_checkpoint, import_checkpoint
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_runtime import load_session

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 5, "intermediate_size": 37, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 5, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 90, "bos_token_id": None, "eos_token_id": 7, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
KINDS = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", {}),
    ("qwen3_next", {}),
    ("qwen3_5", {"layer_types": KINDS, "tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3_next", {"layer_types": KINDS, "attention_bias": True, "linear_num_key_heads": 3, "hidden_act": "gelu"}),
    ("experts", {}),
    ("experts", {"mlp_only_layers": [1], "norm_topk_prob": False, "num_experts_per_tok": 3}),
]
IMAGES: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "shared_expert_intermediate_size": 11,
}  # fmt: skip


def make(kind: str, **options: Any) -> PreTrainedModel:
    if kind == "qwen3_5":
        theirs: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SIZES, **options}))
    elif kind == "images":
        tied = options.pop("tie_word_embeddings", False)
        text = {**SIZES, **options}
        theirs = Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=text, vision_config=IMAGES, tie_word_embeddings=tied)
        )
    else:
        experts = EXPERTS if kind == "experts" else {"mlp_only_layers": list(range(5))}
        theirs = Qwen3NextForCausalLM(Qwen3NextConfig(**{**SIZES, **experts, **options}))
        theirs.set_experts_implementation("eager")  # others need aligned sizes
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.requires_grad_(False).parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return theirs.eval()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_imported_model_equals_the_original(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    theirs = make(kind, **options)
    theirs.save_pretrained(tmp_path / "hub")
    assert import_checkpoint(tmp_path / "hub", tmp_path / "ours").comparison.exact < 1e-11
    ours = library.load(tmp_path / "ours").double().eval()
    ids = torch.randint(61, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with Exact(theirs.double()), torch.inference_mode():
        assert_close(ours(ids), theirs(ids).logits)
        # The original counts padding in positions, which changes the last bits of a rotation in float32.
        wanted = theirs(ids, attention_mask=mask).logits[1, 9:]
        assert_close(ours(ids, mask)[1, 9:], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_round_trip_is_bit_for_bit(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    theirs = make(kind, **options)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs)
    if kind != "qwen3_5":
        again.set_experts_implementation("eager")
    ids = torch.arange(20)[None]
    assert_close(again(ids).logits, theirs(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "experts"])
def test_generated_texts_equal_the_original(tmp_path: Path, kind: str) -> None:
    """40 new tokens, after prompts of different lengths: chunks are filled, and both kinds of past passed on."""
    theirs = make(kind, eos_token_id=None)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    sign_export(tmp_path / "ours")
    prompts = [[5, 9, 33, 2], [8] * 19, [41]]
    with load_session(tmp_path / "ours") as session:
        found = [item["generated_ids"] for item in session.run(prompts, max_new_tokens=40)]
    for prompt, ids in zip(prompts, found, strict=True):
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert wanted[0, len(prompt) :].tolist() == ids


def test_parameters_are_those_of_the_original() -> None:
    with torch.device("meta"):
        theirs = Qwen3NextForCausalLM(Qwen3NextConfig())
    assert parameter_count(registry().resolve("qwen3-next-80b-a3b")) == sum(
        item.numel() for item in theirs.parameters()
    )


def test_interleaved_tensors() -> None:
    rule = Rule(("a", "b"), "c", interleaved=2)
    joined = rule.to_theirs([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])])
    assert joined.tolist() == [1, 2, 5, 3, 4, 6]
    assert [part.tolist() for part in rule.to_ours(joined, [4, 2])] == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    "options", [{}, {"layer_types": KINDS, "tie_word_embeddings": True, "attention_bias": True}], ids=str
)
def test_text_decoder_beside_an_image_encoder(tmp_path: Path, options: dict[str, Any]) -> None:
    """Texts have the logits of the whole model. The decoder is published alone."""
    theirs = make("images", **options)
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.head.dropped == ("model.visual.*",)
    assert "Qwen3_5ForConditionalGeneration" in imported.comparison.against
    assert imported.comparison.exact < 1e-11
    assert (imported.spec.config.eos_token_id, imported.spec.config.pad_token_id) == (7, 0)
    ours = library.load(tmp_path / "ours").double().eval()
    ids = torch.randint(61, (2, 70), generator=torch.Generator().manual_seed(1))
    with Exact(theirs.double()), torch.inference_mode():
        assert_close(ours(ids), theirs(input_ids=ids).logits)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back").model_type == "qwen3_5_text"
    alone: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back").double()
    with Exact(alone), torch.inference_mode():
        assert_close(alone(ids).logits, ours(ids))
    with pytest.raises(UsageError, match="include an image encoder, which the model lacks"):
        export_checkpoint(tmp_path / "ours", tmp_path / "other", model_type="qwen3_5")


def test_image_encoder_is_reported(tmp_path: Path, zoo: Callable[..., Any]) -> None:
    make("images").save_pretrained(tmp_path / "hub")
    said = zoo("import", tmp_path / "hub", "-o", tmp_path / "ours")
    assert said.status == 0
    assert "dropped: model.visual.*" in said.out + said.err
    zoo("import", tmp_path / "hub", "-o", tmp_path / "strict", "--strict").failed(2, "model.visual.* would be dropped")


ROPE = SIZES["rope_parameters"]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("experts", {"num_experts_per_tok": 6}, "experts_per_token 6 is above num_experts 5"),
        ("experts", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of numbers of layers, got 3"),
        ("experts", {"decoder_sparse_step": 0}, "decoder_sparse_step must be positive, got 0"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "layer_types must name 5 layers"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 5}, "linear_layers must have both True and False"),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be positive"),
        ("qwen3_5", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ("qwen3_5", {"rope_parameters": {**ROPE, "partial_rotary_factor": 2}}, "must lie in (0, 1], got 2"),
        ("qwen3_5", {"rope_parameters": {**ROPE, "other": 2}}, "unsupported rope_parameters: other"),
        ("qwen3_5", {"rope_parameters": [1]}, "rope_parameters must be a mapping, got [1]"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "linear_num_heads"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate False is not supported"),
    ],
)
def test_bad_configuration_is_one_line(tmp_path: Path, kind: str, changes: Mapping[str, Any], message: str) -> None:
    make(kind).save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
    with pytest.raises(UsageError) as error:
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()
