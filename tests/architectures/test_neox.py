"""GPT-NeoX with linear biases against transformers' BLOOM and MPT, parts of a text, padding and settings.

``tests/checkpoints/test_neox_kin.py`` compares models with rotary positions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM, PreTrainedModel

from tests.architectures.equations import check_padding, check_parts, random_ids, randomized
from zoo.checkpoints import Exact
from zoo_plugins.neox.config import NeoXConfig
from zoo_plugins.neox.model import NeoX

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "num_layers": 3, "max_seq_len": 40, "num_heads": 8, "intermediate_size": 128,
    "rope_theta": 50.0,
}  # fmt: skip
ALIBI = {"positions": "alibi", "parallel": False, "tie_embeddings": True}
BLOOM = {**ALIBI, "activation": "gelu_tanh", "embedding_norm": True}
MPT = {**ALIBI, "norm_bias": False, "attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
VARIANTS: list[dict[str, Any]] = [
    {"rotary_dim": 2},
    {"shared_norm": True, "head_bias": True, "num_kv_heads": 2},
    {"gated": True, "parallel": False, "norm_bias": False, "qk_norm": True},
    {"norm": "rms", "norm_offset": False, "qk_norm": True, "joint_qk_norm": True},
    {"norm_offset": True, "sliding_windows": (0, 3), "rope_layers": (True, False), "logit_multiplier": 0.5},
    {"norm_offset": True, "parallel": False, "activation": "relu_squared"},
    {**BLOOM, "num_heads": 4, "head_dim": 6},
    {**MPT, "sliding_windows": (3, 0)},
]


def make(**options: Any) -> NeoX:
    return randomized(NeoX(NeoXConfig(**{**SIZES, **options})), 0.3)


def renamed(model: NeoX, names: dict[str, str], joined: str) -> dict[str, Tensor]:
    """Return a model's tensors by the names of another library, which holds queries, keys and values in one."""
    weights = dict(model.state_dict())
    for layer, block in enumerate(model.blocks):
        for kind in ("weight", "bias") if model.config.attention_bias else ("weight",):
            parts = [getattr(block.attention, name)._parameters[kind] for name in ("query", "key", "value")]
            if joined.endswith("query_key_value"):  # one head after another
                heads = [part.unflatten(0, (model.config.num_heads, -1)) for part in parts]
                whole = torch.cat(heads, 1).flatten(0, 1)
            else:
                whole = torch.cat(parts)
            weights[f"blocks.{layer}.{joined}.{kind}"] = whole
            for name in ("query", "key", "value"):
                del weights[f"blocks.{layer}.attention.{name}.{kind}"]
    for ours, theirs in names.items():
        weights = {f".{name}".replace(f".{ours}.", f".{theirs}.")[1:]: tensor for name, tensor in weights.items()}
    return weights


def logits_of(theirs: PreTrainedModel, weights: dict[str, Tensor], tokens: Tensor, mask: Tensor) -> Tensor:
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    with Exact(theirs):
        logits: Tensor = theirs(tokens, attention_mask=mask, use_cache=False).logits
    return logits


def padded() -> tuple[Tensor, Tensor]:
    """Return tokens of three rows, and a mask with padding on either side."""
    tokens, mask = random_ids(3, 20), torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = 0
    mask[2, 12:] = 0
    return tokens, mask


def test_linear_biases_equal_bloom() -> None:
    """BLOOM's gelu has 8 digits of the square root of 2 / pi. With 8 heads, slopes are exact in float32."""
    model, (tokens, mask) = make(**BLOOM), padded()
    names = {
        "token_embedding": "transformer.word_embeddings", "embedding_norm": "transformer.word_embeddings_layernorm",
        "blocks": "transformer.h", "norm_1": "input_layernorm", "attention.output": "self_attention.dense",
        "norm_2": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        "norm": "transformer.ln_f", "head": "lm_head",
    }  # fmt: skip
    config = BloomConfig(vocab_size=23, hidden_size=32, n_layer=3, n_head=8, attn_implementation="eager")
    weights = renamed(model, names, "self_attention.query_key_value")
    wanted = logits_of(BloomForCausalLM(config), weights, tokens, mask)
    kept = mask.bool()
    assert_close(model(tokens, mask)[kept], wanted[kept], rtol=0, atol=1e-7)
    assert wanted.std() > 0.1


def test_linear_biases_equal_mpt() -> None:
    """Norms and projections without biases."""
    model, (tokens, mask) = make(**MPT), padded()
    names = {
        "token_embedding": "transformer.wte", "blocks": "transformer.blocks", "attention.output": "attn.out_proj",
        "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj", "norm": "transformer.norm_f", "head": "lm_head",
    }  # fmt: skip
    config = MptConfig(vocab_size=23, d_model=32, n_layers=3, n_heads=8, max_seq_len=40, attn_implementation="eager")
    wanted = logits_of(MptForCausalLM(config), renamed(model, names, "attn.Wqkv"), tokens, mask)
    kept = mask.bool()
    assert_close(model(tokens, mask)[kept], wanted[kept], rtol=0, atol=1e-10)
    assert wanted.std() > 0.1


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (3, 4, 33)], ids=str)
def test_calls_on_parts_equal_one_call(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    """A bias by distance is counted from the last key, so that a step has the same differences."""
    check_parts(make(**options), cuts)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_padding_changes_nothing(options: dict[str, Any], side: str) -> None:
    check_padding(make(**options), side)


def test_parallel_sub_layers_read_the_same_stream() -> None:
    """x + attention(norm(x)) + feed-forward(norm(x)), with one norm or two."""
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shared in (False, True):
        block = make(shared_norm=shared, rope_layers=(False,)).blocks[0]
        first = block.norm_1(x)
        second = first if shared else block.norm_2(x)
        wanted = x + block.attention(first) + block.mlp(second)
        assert_close(block(x, None, None, None), wanted, rtol=0, atol=1e-14)
        assert any(name.startswith("norm_2") for name in block.state_dict()) is not shared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_norm": True, "parallel": False}, "shared_norm True needs parallel"),
        ({"post_norms": True}, "post_norms True is not supported"),
        ({"scale_embeddings": True}, "scale_embeddings True is not supported"),
        ({"residual_multiplier": 2.0}, r"residual_multiplier 2.0 is not supported, only 1.0"),
        ({"residual_dropout": 1.5}, "residual_dropout must"),
        ({"head_bias": True, "tie_embeddings": True}, "a head that shares the token embedding has no bias"),
    ],
)
def test_unsupported_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeoXConfig(**{**SIZES, **options})
