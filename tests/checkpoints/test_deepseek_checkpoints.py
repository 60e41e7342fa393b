"""Checkpoints of DeepSeek-V2 and V3, from random transformers models, in fp8 or not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV2ForSequenceClassification,
    DeepseekV2Model,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV3ForSequenceClassification,
    DeepseekV3Model,
    PreTrainedModel,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import zoo as library
from tests.checkpoints.decoders import (
    Family,
    batch,
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
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint, widen_fp8
from zoo.errors import ArtifactError, UsageError

YARN = {
    "rope_type": "yarn", "rope_theta": 1500.0, "factor": 4.0, "original_max_position_embeddings": 10,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale": 0.8, "mscale_all_dim": 0.5,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 37, "kv_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 9, "first_k_dense_replace": 1, "rms_norm_eps": 1e-3, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
OURS: dict[str, Any] = {
    "vocab_size": 61, "max_seq_len": 40, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "intermediate_size": 37,
    "latent_size": 10, "head_dim": 6, "rotary_dim": 4, "value_head_dim": 7, "num_experts": 8, "experts_per_token": 3,
    "expert_intermediate_size": 9, "dense_layers": 1, "norm_eps": 1e-3, "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
V2, V3 = "deepseek_v2", "deepseek_v3"
FAMILIES = {
    V2: Family(
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {**SIZES, "q_lora_rank": None, "mlp_bias": True, "attention_bias": True},
        {
            **OURS, "query_latent_size": None, "mlp_bias": True, "attention_bias": True, "router_scores": "softmax",
            "num_shared_experts": 2, "num_groups": 1, "groups_per_token": 1, "normalize_routing": False,
        },
    ),
    "deepseek_v2, groups": Family(
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            **SIZES, "q_lora_rank": 12, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.2, "rope_parameters": YARN, "n_shared_experts": 1,
        },
        {
            **OURS, "query_latent_size": 12, "num_groups": 4, "groups_per_token": 2, "routing_factor": 2.2,
            "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 10, "rope_mscale": 0.8,
            "rope_mscale_all_dim": 0.5, "num_shared_experts": 1,
        },
    ),
    V3: Family(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {**SIZES, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
        {
            **OURS, "query_latent_size": 12, "num_groups": 4, "groups_per_token": 2, "routing_factor": 2.5,
            "router_scores": "sigmoid", "normalize_routing": True, "rope_interleaved": True, "rope_mscale": 0.8,
        },
    ),
    "deepseek_v3, halves": Family(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **SIZES, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
            "rope_interleave": False, "attention_bias": True, "tie_word_embeddings": True, "attention_dropout": 0.1,
        },
        {
            **OURS, "query_latent_size": None, "normalize_routing": False, "rope_interleaved": False, "num_groups": 1,
            "attention_bias": True, "tie_embeddings": True, "dropout": 0.1, "rope_scaling": "none",
        },
    ),
}  # fmt: skip
UNSAID = {
    "_name_or_path", "dtype", "use_cache", "scoring_func", "topk_method", "moe_layer_freq", "rope_parameters",
    "norm_topk_prob", "n_group", "topk_group", "num_nextn_predict_layers", "num_mtp_layers", "rope_theta",
}  # fmt: skip
"""Keys that the original class does not read or that are written with their defaults; settings of the router and of
positions are compared by what the published model computes."""


def make(name: str, model: type[PreTrainedModel] | None = None, **options: Any) -> PreTrainedModel:
    """Return a model whose experts are computed one after another, which float64 needs, with random corrections."""
    theirs = FAMILIES[name].make(model, **options)
    theirs.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(3)
    for key, buffer in theirs.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return theirs


def tolerance(theirs: PreTrainedModel) -> float:
    """Return the greatest difference between outputs in float64.

    transformers turns queries and keys of V2 by torch.polar in float32, whose last bit differs from that of torch.cos
    and torch.sin; the comparison of an import replaces it.
    """
    return 1e-6 if theirs.config.model_type == V2 else 1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_is_imported(tmp_path: Path, name: str) -> None:
    theirs = make(name)
    config = check_imported(theirs, tmp_path).spec.config
    assert {key: getattr(config, key) for key in FAMILIES[name].ours} == FAMILIES[name].ours
    same(tmp_path / "ours", theirs, tolerance(theirs))


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_round_trip(tmp_path: Path, name: str) -> None:
    theirs = make(name)
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    again = check_published(theirs, tmp_path, UNSAID, AutoModelForCausalLM)
    again.set_experts_implementation("eager")
    assert torch.equal(logits_of(again), logits_of(theirs))
    names = load_file(tmp_path / "back" / "model.safetensors")
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in names


def drawn(family: str, number: int) -> PreTrainedModel:
    """Draw a random configuration and a random model."""
    rng = random.Random(number)
    heads, group_size = rng.choice([1, 2, 3, 4]), rng.choice([2, 3, 4])
    groups, layers = rng.choice([1, 2, 4]), rng.randint(1, 4)
    used = rng.randint(1, groups)
    ropes = [
        YARN, {**YARN, "mscale": 0.0}, {**YARN, "mscale_all_dim": 0.0, "attention_factor": 0.8, "truncate": False},
        {"rope_type": "default", "rope_theta": 50.0}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0},
    ]  # fmt: skip
    options: dict[str, Any] = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": rng.choice([heads, None]),
        "hidden_size": heads * rng.choice([8, 10]), "intermediate_size": rng.choice([12, 37]),
        "q_lora_rank": rng.choice([None, 2, 12]), "kv_lora_rank": rng.choice([4, 10, 16]),
        "qk_nope_head_dim": rng.choice([2, 6]), "qk_rope_head_dim": rng.choice([2, 4, 8]),
        "v_head_dim": rng.choice([3, 8]), "n_routed_experts": groups * group_size,
        "num_experts_per_tok": rng.randint(1, used * group_size), "moe_intermediate_size": rng.choice([5, 9]),
        "n_shared_experts": rng.choice([1, 3]), "first_k_dense_replace": rng.randint(0, layers),
        "routed_scaling_factor": rng.choice([1.0, 2.5]), "attention_bias": rng.choice([False, True]),
        "tie_word_embeddings": rng.choice([False, True]), "rope_parameters": rng.choice(ropes),
        "hidden_act": rng.choice(["silu", "gelu", "relu"]), "n_group": groups, "topk_group": used,
        "rms_norm_eps": rng.choice([1e-6, 1e-2]),
    }  # fmt: skip
    if family == V3:
        options |= {"norm_topk_prob": rng.choice([False, True]), "rope_interleave": rng.choice([False, True])}
    else:
        options |= {
            "topk_method": rng.choice(["greedy", "group_limited_greedy"]), "mlp_bias": rng.choice([False, True]),
        }  # fmt: skip
        if options["topk_method"] == "greedy":
            options |= {"n_group": rng.choice([None, 3]), "topk_group": rng.choice([None, 2])}
    return make(family, **options)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("family", [V2, V3])
def test_random_configuration(tmp_path: Path, family: str, number: int) -> None:
    theirs = drawn(family, number)
    check_imported(theirs, tmp_path)
    again = check_published(theirs, tmp_path, {*UNSAID, "num_key_value_heads"})
    again.set_experts_implementation("eager")
    assert torch.equal(logits_of(again), logits_of(theirs))
    same(tmp_path / "ours", theirs, tolerance(theirs))


@pytest.mark.parametrize(("family", "positions"), [(V2, 2048), (V3, 4096)])
def test_defaults_equal_those_of_the_original(tmp_path: Path, family: str, positions: int) -> None:
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    given = {"num_experts_per_tok": 6} if family == V2 else {}  # V2's default is none, with which it does not run
    theirs = FAMILIES[family].config(**tokens, **given)
    check_defaults(theirs, {**given, **{name: getattr(theirs, name) for name in sizes}}, positions, tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2, groups", V3])
def test_keys_of_published_files_are_understood(tmp_path: Path, family: str) -> None:
    """Files of DeepSeek's own code, with settings of training, and the module that predicts further tokens."""
    theirs = make(family)
    folder = save(theirs, tmp_path / "hub")
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type", "truncate")}
    edit(folder, rope_parameters=None, rope_theta=1500.0, rope_scaling={"type": "yarn", **scaling}, head_dim=None)
    edit(folder, aux_loss_alpha=0.001, seq_aux=True, ep_size=1, moe_layer_freq=1, pretraining_tp=1, auto_map={})
    if family == V3:
        edit(folder, scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {
            name.replace("layers.2.", "layers.3."): tensor + 1
            for name, tensor in tensors.items()
            if ".layers.2." in name
        }
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(24, 48)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        edit(folder, scoring_func="softmax", norm_topk_prob=False)
    imported = import_checkpoint(folder, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    same(tmp_path / "ours", theirs, tolerance(theirs))
    if family == V3:
        assert "model.layers.3.*" in (tmp_path / "ours" / "README.md").read_text()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (V2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported, only 'softmax'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob True is not supported, only False"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported: .*known: greedy, group_limited"),
        (V2, {"topk_method": "group_limited_greedy"}, "num_groups must be int"),
        (V2, {"num_key_value_heads": 2}, "num_key_value_heads 2 must equal num_attention_heads 4"),
        (V2, {"head_dim": 6}, "head_dim 6 must equal qk_rope_head_dim 4"),
        (V2, {"rope_interleave": False}, "rope_interleave"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only 'noaux_tc'"),
        (V3, {"mlp_bias": True}, "mlp_bias"),
        (V3, {"n_group": 3}, "num_experts 8 is not divisible by num_groups 3"),
        (V3, {"n_group": 8, "num_experts_per_tok": 2}, "a group needs two experts or more"),
        (V3, {"n_shared_experts": 0}, "num_shared_experts must be positive, got 0"),
        (V3, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        (
            V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size \[64, 64\] is not supported, only \[128, 128\]",
        ),
        (V3, {"quantization_config": {"quant_method": "awq", "bits": 4}}, r"the weights are quantised \(awq, 4 bits\)"),
    ],
    ids=str,
)
def test_bad_configuration_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    check_refused(make(family), changes, message, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_scores": "softmax"}, "files of DeepSeek-V3 have router_scores 'sigmoid'"),
        ({"mlp_bias": True}, "files of DeepSeek-V3 have router_scores 'sigmoid' and mlp_bias False"),
    ],
    ids=str,
)
def test_models_that_files_cannot_express_are_not_published(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    library.save(library.create_model("deepseek-tiny", **changes), tmp_path / "ours")
    with pytest.raises(UsageError, match=message):
        export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=V3, verify=False)


@pytest.mark.parametrize(
    ("family", "model"), [(V2, DeepseekV2ForSequenceClassification), (V3, DeepseekV3ForSequenceClassification)]
)
def test_classifiers_are_imported(tmp_path: Path, family: str, model: type[PreTrainedModel]) -> None:
    theirs = make(family, model, num_labels=4)
    check_imported(theirs, tmp_path)
    check_published(theirs, tmp_path, {*UNSAID, "problem_type"})


@pytest.mark.parametrize(("family", "model"), [(V2, DeepseekV2Model), (V3, DeepseekV3Model)])
def test_base_models_are_sentence_encoders(tmp_path: Path, family: str, model: type[PreTrainedModel]) -> None:
    theirs = make(family, model)
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=True)
    ours, ids = library.load(tmp_path / "ours").double().eval(), torch.arange(20)[None]
    with Exact(theirs.double()), torch.inference_mode():
        wanted = theirs(ids).last_hidden_state
        assert_close(ours(ids)["last_hidden_state"], wanted, rtol=0, atol=tolerance(theirs))
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


FP8: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "kv_lora_rank": 96, "v_head_dim": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "q_lora_rank": 128, "moe_intermediate_size": 128,
}  # fmt: skip
"""Sizes of matrices that are multiples of 128: for others, transformers derives other blocks from the scales."""


def quantized(folder: Path, **options: Any) -> Path:
    """Save a model whose dense layers and experts are random numbers in fp8, and whose other tensors are bfloat16."""
    save(make(V3, **{**FP8, **options}).bfloat16(), folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if "_proj" in name and tensors[name].ndim == 2]:
        shape = tensors[name].shape
        tensors[name] = (3 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in shape]
        tensors[f"{name}_scale_inv"] = 0.01 + 0.02 * torch.rand(blocks, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit(folder, quantization_config=method)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_widened_as_by_transformers(tmp_path: Path, dtype: str) -> None:
    """Files hold numbers of several dtypes, so a model has one that is chosen."""
    folder = quantized(tmp_path / "hub")
    with pytest.raises(UsageError, match=r"the weights have dtypes .*float8_e4m3fn"):
        import_checkpoint(folder, tmp_path / "ours", verify=False)
    imported = import_checkpoint(folder, tmp_path / "ours", dtype=dtype, verify=True)
    assert imported.comparison.exact < 1e-12
    correction = "blocks.1.mlp.router.correction"
    assert library.load(tmp_path / "ours").state_dict()[correction].dtype == torch.float32
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(after) == {name for name in before if not name.endswith("_scale_inv")}
    op = Fp8Dequantize(None)
    for name, tensor in before.items():
        if f"{name}_scale_inv" in before:
            wanted = op._dequantize_one(tensor, before[f"{name}_scale_inv"], getattr(torch, dtype))
            assert torch.equal(after[name], wanted)


def test_blocks_at_the_edge_of_a_matrix_may_be_smaller() -> None:
    """As of kv_a_proj_with_mqa with 576 rows, which the class of transformers refuses."""
    weights = torch.randn(300, 130).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    wide = widen_fp8(weights, scales)
    for row, column in ((0, 0), (127, 127), (128, 128), (299, 129), (256, 0)):
        assert wide[row, column] == weights[row, column].float() * scales[row // 128, column // 128]
    padded = torch.zeros(384, 256, dtype=torch.float8_e4m3fn)
    padded[:300, :130] = weights
    assert torch.equal(wide, Fp8Dequantize(None)._dequantize_one(padded, scales)[:300, :130])


@pytest.mark.parametrize("change", ["shape", "missing", "unannounced"])
def test_damaged_fp8_is_refused(tmp_path: Path, change: str) -> None:
    folder = quantized(tmp_path / "hub")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    if change == "shape":
        tensors[name] = torch.ones(1, 2)
    elif change == "missing":
        del tensors[name]
    else:
        edit(folder, quantization_config=None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((ArtifactError, UsageError), match="scale_inv"):
        import_checkpoint(folder, tmp_path / "ours", dtype="float32", verify=False)
    assert not (tmp_path / "ours").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2, groups", V3])
def test_generated_texts_equal_the_original(tmp_path: Path, name: str) -> None:
    theirs = make(name, eos_token_id=None)
    sharpen(theirs)
    save(theirs, tmp_path / "hub")
    check_generation(theirs, tmp_path)


def test_attention_weights_equal_the_original(tmp_path: Path) -> None:
    theirs = make(V3)
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    ids, _, _ = batch()
    theirs = theirs.double()
    with Exact(theirs), torch.inference_mode():
        wanted = theirs(ids, output_attentions=True).attentions
    with library.nn.recorded_attentions() as weights, torch.inference_mode():
        library.load(tmp_path / "ours").double()(ids)
    assert len(weights) == len(wanted)
    for mine, its in zip(weights, wanted, strict=True):
        assert_close(mine, its, rtol=0, atol=1e-10)
