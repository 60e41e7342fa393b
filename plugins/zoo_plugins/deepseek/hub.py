"""DeepSeek-V2 and V3 checkpoints in the hub's layout, which holds each expert's matrices by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from zoo import Config, UsageError
from zoo.checkpoints import ACTIVATIONS, FP8_BLOCK, Checkpoint, Field, Layout, Rule, SourceTensor, widen_fp8_tensors
from zoo_plugins.deepseek.config import DeepseekConfig
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_frequencies
from zoo_plugins.llama.hub_shared import BLOCK_RULES, COMMON, MLP_RULES, NO_TOKENS, classes_of, fields_of

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3"]

_GROUPED = "group_limited_greedy"
_MSCALES = {"mscale": "rope_mscale", "mscale_all_dim": "rope_mscale_all_dim"}
_OURS = {field.name for field in fields(DeepseekConfig)}


def _rules(c: DeepseekConfig) -> Sequence[Rule]:
    theirs, ours = "model.layers.*", "blocks.*"
    names = {"down": "kv_a_proj_with_mqa", "norm": "kv_a_layernorm", "up": "kv_b_proj", "query": "q_proj"}
    if c.query_latent_size is not None:
        names |= {"query_down": "q_a_proj", "query_norm": "q_a_layernorm", "query": "q_b_proj"}
    parts = ("gate", "up", "down")
    return (
        *(Rule(f"{ours}.attention.{part}", f"{theirs}.self_attn.{name}") for part, name in names.items()),
        *BLOCK_RULES,
        *MLP_RULES,
        Rule(f"{ours}.norm_2", f"{theirs}.post_attention_layernorm"),
        Rule(f"{ours}.mlp.router.scores", f"{theirs}.mlp.gate"),
        Rule(f"{ours}.mlp.router.correction", f"{theirs}.mlp.gate.e_score_correction_bias"),
        *(Rule(f"{ours}.mlp.experts.{part}", f"{theirs}.mlp.experts.#.{part}_proj.weight") for part in parts),
        *(Rule(f"{ours}.mlp.shared.{part}", f"{theirs}.mlp.shared_experts.{part}_proj") for part in parts),
    )


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> dict[str, Any]:
    """Read rotary positions, and refuse what the original classes ignore or cannot run."""
    hub, where = checkpoint.config, checkpoint.config_file
    heads, key_heads = values["num_heads"], hub.get("num_key_value_heads")
    if key_heads not in (None, heads):
        raise UsageError(f"num_key_value_heads {key_heads!r} must equal num_attention_heads {heads!r}", where)
    rotated = values["rotary_dim"]
    if hub.get("head_dim", rotated) != rotated:
        raise UsageError(f"head_dim {hub['head_dim']!r} must equal qk_rope_head_dim {rotated!r}", where)
    quantization = hub.get("quantization_config") or {}
    block = [FP8_BLOCK, FP8_BLOCK]
    if quantization and quantization.get("weight_block_size", block) != block:
        found = quantization["weight_block_size"]
        raise UsageError(f"weight_block_size {found!r} is not supported, only {block}", where)
    rope = read_common(checkpoint, values)
    if rope["rope_scaling"] not in ("none", "linear", "yarn"):
        raise UsageError(f"rope_type {rope['rope_scaling']!r} is not supported", where, "known: default, linear, yarn")
    said = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    scales = {ours: float(said.get(theirs) or 0) for theirs, ours in _MSCALES.items()}
    return {**{key: value for key, value in rope.items() if key in _OURS}, **scales}


def _restore(c: DeepseekConfig) -> dict[str, Any]:
    """Write rotary positions under the keys of transformers 5, and under those of earlier versions."""
    parameters = write_frequencies(c)
    if c.rope_scaling == "yarn":
        parameters |= {theirs: getattr(c, ours) for theirs, ours in _MSCALES.items() if getattr(c, ours)}
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling if c.rope_scaling != "none" else None,
        "num_key_value_heads": c.num_heads,
    }


def _derive_v2(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the groups of experts, which only one of the methods to choose them has."""
    hub, where = checkpoint.config, checkpoint.config_file
    method = hub.get("topk_method", "greedy")
    if method not in ("greedy", _GROUPED):
        raise UsageError(f"topk_method {method!r} is not supported", where, f"known: greedy, {_GROUPED}")
    groups = {"num_groups": hub.get("n_group"), "groups_per_token": hub.get("topk_group")}
    return {**_derive(checkpoint, values), **(groups if method == _GROUPED else {})}


def _restore_v2(c: DeepseekConfig) -> Mapping[str, Any]:
    if c.router_scores != "softmax" or c.normalize_routing:
        raise UsageError("files of DeepSeek-V2 have router_scores 'softmax' and normalize_routing False")
    if not c.rope_interleaved:
        raise UsageError("files of DeepSeek-V2 have rope_interleaved True")
    method = "greedy" if c.groups_per_token == c.num_groups else _GROUPED
    return {**_restore(c), "topk_method": method, "n_group": c.num_groups, "topk_group": c.groups_per_token}


def _derive_v3(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    return {**_derive(checkpoint, values), "router_scores": "sigmoid"}


def _restore_v3(c: DeepseekConfig) -> Mapping[str, Any]:
    if c.router_scores != "sigmoid" or c.mlp_bias:
        raise UsageError("files of DeepSeek-V3 have router_scores 'sigmoid' and mlp_bias False")
    return {**_restore(c), "num_nextn_predict_layers": 0}


def _further_tokens(c: DeepseekConfig) -> Sequence[str]:
    """Return the names of the module that predicts further tokens, which lies after the last layer."""
    return (f"model.layers.{c.num_layers}.*",)


def _fields(*, experts: int, per_token: int | None, width: int, shared: int, factor: float) -> tuple[Field, ...]:
    """Return the fields that both families share, with the defaults of one."""
    return (
        *fields_of(eps=1e-6),
        Field("hidden_act", "activation", default="silu", values=ACTIVATIONS),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
        Field("attention_bias", default=False),
        Field("kv_lora_rank", "latent_size", default=512),
        Field("q_lora_rank", "query_latent_size", default=1536),
        Field("qk_nope_head_dim", "head_dim", default=128),
        Field("qk_rope_head_dim", "rotary_dim", default=64),
        Field("v_head_dim", "value_head_dim", default=128),
        Field("n_routed_experts", "num_experts", default=experts),
        Field("num_experts_per_tok", "experts_per_token", default=per_token),
        Field("moe_intermediate_size", "expert_intermediate_size", default=width),
        Field("n_shared_experts", "num_shared_experts", default=shared),
        Field("routed_scaling_factor", "routing_factor", default=factor),
    )


_IGNORED = (
    *ROPE_KEYS, "num_key_value_heads", "head_dim", "qk_head_dim", "quantization_config", "output_router_logits",
    # Keys for training and for other implementations, which the classes of transformers do not read.
    "aux_loss_alpha", "seq_aux", "ep_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _DeepseekLayout(Layout):
    """A layout whose files may hold dense layers in fp8, with a scale for each block."""

    def merged(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Return the tensors of a checkpoint, widened."""
        return widen_fp8_tensors(tensors)

    def prepare_original(self, original: nn.Module) -> None:
        """Let DeepSeek-V2 compute float32 cosines and sines by torch.cos and torch.sin, as V3 does.

        Those of torch.polar may differ in the last bit, which float64 would show.
        """
        for module in original.modules():
            if hasattr(module, "inv_freq"):
                module.register_forward_hook(_plain_rotation, with_kwargs=True)


def _plain_rotation(module: Any, args: tuple[Any, ...], inputs: Mapping[str, Any], rotation: Any) -> Any:
    if not isinstance(rotation, Tensor):  # of V3, which has cosines and sines
        return rotation
    _, positions = (*args, *inputs.values())
    angles = positions.unsqueeze(-1).float() * module.inv_freq.float()
    return torch.complex(angles.cos(), angles.sin()) * module.attention_scaling


DEEPSEEK_V2 = _DeepseekLayout(
    classes=classes_of("DeepseekV2"),
    fields=(
        *_fields(experts=64, per_token=None, width=1407, shared=2, factor=1.0),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("first_k_dense_replace", "dense_layers", default=0),
        Field("mlp_bias", default=False),
    ),
    rules=_rules,
    widens=("fp8",),
    required_values={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
    ignored_keys=(*_IGNORED, "topk_method", "n_group", "topk_group"),
    read_extra=_derive_v2,
    write_extra=_restore_v2,
    constant={"model_type": "deepseek_v2", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` deepseek_v2."""

DEEPSEEK_V3 = _DeepseekLayout(
    classes=classes_of("DeepseekV3"),
    fields=(
        *_fields(experts=256, per_token=8, width=2048, shared=1, factor=2.5),
        Field("max_position_embeddings", "max_seq_len", default=4096),
        Field("first_k_dense_replace", "dense_layers", default=3),
        Field("n_group", "num_groups", default=8),
        Field("topk_group", "groups_per_token", default=4),
        Field("norm_topk_prob", "normalize_routing", default=True),
        Field("rope_interleave", "rope_interleaved", default=True),
    ),
    rules=_rules,
    widens=("fp8",),
    left_out=_further_tokens,
    required_values={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ignored_keys=(*_IGNORED, "num_nextn_predict_layers", "num_mtp_layers"),
    read_extra=_derive_v3,
    write_extra=_restore_v3,
    constant={"model_type": "deepseek_v3", **NO_TOKENS},
    **COMMON,
)
"""``model_type`` deepseek_v3, also used by DeepSeek-R1."""
