"""Perceiver IO checkpoints in the hub's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zoo import UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo_plugins.perceiver.config import PerceiverConfig

__all__ = ["PERCEIVER"]

_BLOCK = (
    ("norm_1", "attention.self.layernorm1"),
    ("attention.query", "attention.self.query"),
    ("attention.key", "attention.self.key"),
    ("attention.value", "attention.self.value"),
    ("attention.output", "attention.output.dense"),
    ("norm_2", "layernorm"),
    ("mlp.up", "mlp.dense1"),
    ("mlp.down", "mlp.dense2"),
)


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Derive head widths, which config.json gives as totals over the heads, and feed-forward widths."""
    hub, where = checkpoint.config, checkpoint.config_file
    latents, inputs = values["hidden_size"], values["embedding_size"]
    shape = hub.get("cross_attention_shape_for_attention", "kv")
    if shape not in ("kv", "q"):
        raise UsageError(f"cross_attention_shape_for_attention {shape!r} is not supported", where, "known: 'kv', 'q'")
    widening, other = (hub.get(f"{kind}_attention_widening_factor", 1) for kind in ("self", "cross"))
    if widening != other:
        what = f"different widening factors of self-attention ({widening}) and cross-attention ({other})"
        raise UsageError(f"{what} are not supported", where)
    fields = {"intermediate_size": widening * latents}
    for prefix, width in (("", latents), ("cross_", inputs if shape == "kv" else latents)):
        heads = values[f"{prefix}num_heads"]
        keys = hub.get("qk_channels") or width
        items = hub.get("v_channels") or keys
        if keys % heads or items % heads:
            raise UsageError(f"{keys} qk_channels or {items} v_channels are not divisible by {heads} heads", where)
        fields |= {f"{prefix}head_dim": keys // heads, f"{prefix}value_head_dim": items // heads}
    return fields


def _restore(c: PerceiverConfig) -> Mapping[str, Any]:
    """Write ``qk_channels`` and ``v_channels`` if both kinds of attention share them; else the hub's defaults apply."""
    keys, cross_keys = c.num_heads * c.head_dim, c.cross_num_heads * c.cross_head_dim
    items = c.num_heads * (c.value_head_dim or 0)
    cross_items = c.cross_num_heads * (c.cross_value_head_dim or 0)
    widening = (c.intermediate_size or 0) // c.hidden_size
    return {
        "qk_channels": keys if keys == cross_keys else None,
        "v_channels": items if items == cross_items else None,
        "self_attention_widening_factor": widening,
        "cross_attention_widening_factor": widening,
    }


def _rules(c: PerceiverConfig) -> Sequence[Rule]:
    fills = c.task == "fill-mask"
    decoder = "perceiver.decoder" if fills else "perceiver.decoder.decoder"
    across = (*_BLOCK, ("memory_norm", "attention.self.layernorm2"))
    return (
        Rule("token_embedding", "perceiver.input_preprocessor.embeddings"),
        Rule("position_embedding", "perceiver.input_preprocessor.position_embeddings"),
        Rule("latents.weight", "perceiver.embeddings.latents"),
        *(Rule(f"reader.{ours}", f"perceiver.encoder.cross_attention.{theirs}") for ours, theirs in across),
        *(Rule(f"blocks.*.{ours}", f"perceiver.encoder.self_attends.*.{theirs}") for ours, theirs in _BLOCK),
        Rule("queries.weight", f"{decoder}.output_position_encodings.position_embeddings"),
        *(Rule(f"answerer.{ours}", f"{decoder}.decoding_cross_attention.{theirs}") for ours, theirs in across),
        Rule("head.bias", "embedding_decoder.bias") if fills else Rule("head", f"{decoder}.final_layer"),
    )


class _Original(nn.Module):
    """The original model with its logits cut to the input: it computes them for all ``max_seq_len`` positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"logits": logits[:, : input_ids.shape[1]] if logits.ndim == 3 else logits}


def _original(checkpoint: Checkpoint, c: PerceiverConfig) -> nn.Module:
    from transformers import PerceiverForMaskedLM, PerceiverForSequenceClassification

    kind = PerceiverForMaskedLM if c.task == "fill-mask" else PerceiverForSequenceClassification
    return _Original(kind.from_pretrained(checkpoint.path, attn_implementation="eager", local_files_only=True))


PERCEIVER = Layout(
    classes={"PerceiverForMaskedLM": "fill-mask", "PerceiverForSequenceClassification": "text-classification"},
    fields=(
        Field("vocab_size", default=262),
        Field("max_position_embeddings", "max_seq_len", default=2048),
        Field("d_model", "embedding_size", default=768),
        Field("num_latents", default=256),
        Field("d_latents", "hidden_size", default=1280),
        Field("num_self_attends_per_block", "num_layers", default=26),
        Field("num_blocks", "num_repeats", default=1),
        Field("num_self_attention_heads", "num_heads", default=8),
        Field("num_cross_attention_heads", "cross_num_heads", default=8),
        Field("use_query_residual", "cross_residual", default=True),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("attention_probs_dropout_prob", "dropout", default=0.1),
    ),
    rules=_rules,
    ignored_keys=(
        "_label_trainable_num_channels", "audio_samples_per_frame", "cross_attention_shape_for_attention",
        "cross_attention_widening_factor", "image_size", "layer_norm_eps", "num_frames", "output_num_channels",
        "output_shape", "qk_channels", "samples_per_patch", "self_attention_widening_factor", "train_size",
        "v_channels",
    ),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "perceiver"},
    tokenizer="PerceiverTokenizer",
    original=_original,
)  # fmt: skip
"""``model_type`` perceiver, for texts. The original ignores ``layer_norm_eps`` and adds 1e-5."""
