"""Latent attention against transformers' DeepSeek-V2 and V3, against the equations in numpy, and with a cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from zoo.checkpoints import Exact
from zoo.nn import Cache, LatentAttention, LayerCache, RotaryPositions, apply_rotary, build_mask
from zoo.training.adapters.low_rank import LowRankLinear, add_adapters
from zoo.training.settings import LowRankSettings

HIDDEN, HEADS, LATENT, PLAIN, ROTATED, VALUE, LENGTH = 18, 3, 8, 6, 4, 5, 9
SIZES: dict[str, Any] = {
    "latent_size": LATENT, "head_dim": PLAIN, "rotary_dim": ROTATED, "value_head_dim": VALUE,
}  # fmt: skip


def make(**options: Any) -> LatentAttention:
    """Build a module with random weights, those of norms included."""
    attention = LatentAttention(HIDDEN, HEADS, **{**SIZES, **options}).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return attention


def inputs(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rotation(start: int, stop: int, theta: float = 50.0) -> tuple[Tensor, Tensor]:
    return RotaryPositions(ROTATED, theta)(torch.arange(start, stop)[None], torch.float64)


@pytest.mark.parametrize("query_size", [None, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", ["v2", "v3", "v3, halves"])
def test_outputs_and_weights_equal_transformers(family: str, bias: bool, query_size: int | None) -> None:
    options = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": LATENT,
        "q_lora_rank": query_size, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED, "v_head_dim": VALUE,
        "attention_bias": bias, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "attn_implementation": "eager",
    }  # fmt: skip
    turned = rotation(0, LENGTH)
    theirs: Any
    if family == "v2":
        theirs = DeepseekV2Attention(DeepseekV2Config(**options), 0)
        angles: Any = torch.complex(*(part[:, 0, :, : ROTATED // 2] for part in turned))
    else:
        theirs = DeepseekV3Attention(DeepseekV3Config(rope_interleave=family == "v3", **options), 0)
        angles = tuple(part[:, 0] for part in turned)
    theirs.double().eval()
    ours = make(query_latent_size=query_size, bias=bias, interleaved=family != "v3, halves")
    names = {
        "query": "q_proj" if query_size is None else "q_b_proj", "query_down": "q_a_proj",
        "query_norm": "q_a_layernorm", "down": "kv_a_proj_with_mqa", "norm": "kv_a_layernorm", "up": "kv_b_proj",
        "output": "o_proj",
    }  # fmt: skip
    state = {".".join((names[(parts := key.split("."))[0]], parts[1])): item for key, item in ours.state_dict().items()}
    theirs.load_state_dict(state)
    mask = build_mask(LENGTH, LENGTH, causal=True)
    assert mask is not None
    added = torch.zeros(()).double().masked_fill(~mask, -torch.inf)
    with Exact(theirs), torch.no_grad():
        wanted, weights = theirs(inputs(), attention_mask=added, position_embeddings=angles)
    found, found_weights = ours.with_weights(inputs(), mask=mask, rotation=turned)
    assert_close(found, wanted)
    assert_close(found_weights, weights)
    with torch.no_grad():
        assert_close(ours(inputs(), mask=mask, rotation=turned, cache=LayerCache()), wanted)


def by_hand(attention: LatentAttention, x: np.ndarray, theta: float) -> np.ndarray:
    """Equations 9 to 19 of the paper, one head and one token at a time, with complex rotations of neighbours."""
    w = {name: value.numpy() for name, value in attention.state_dict().items()}
    frequencies = theta ** (-np.arange(ROTATED // 2) / (ROTATED // 2))

    def turn(part: np.ndarray, position: int) -> np.ndarray:
        turned = (part[::2] + 1j * part[1::2]) * np.exp(1j * position * frequencies)
        return np.stack((turned.real, turned.imag), -1).ravel()

    def norm(vector: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return vector / np.sqrt((vector**2).mean() + 1e-6) * weight

    up = w["up.weight"].reshape(HEADS, PLAIN + VALUE, LATENT)
    heads = np.zeros((len(x), HEADS, VALUE))
    for t in range(len(x)):
        query = w["query.weight"] @ norm(w["query_down.weight"] @ x[t], w["query_norm.weight"])
        for head, part in enumerate(query.reshape(HEADS, -1)):
            query_t = np.concatenate((part[:PLAIN], turn(part[PLAIN:], t)))
            keys, values = [], []
            for s in range(t + 1):
                latent, shared = np.split(w["down.weight"] @ x[s], [LATENT])
                key, value = np.split(up[head] @ norm(latent, w["norm.weight"]), [PLAIN])
                keys.append(np.concatenate((key, turn(shared, s))))
                values.append(value)
            scores = np.exp(np.stack(keys) @ query_t / np.sqrt(PLAIN + ROTATED))
            heads[t, head] = scores @ np.stack(values) / scores.sum()
    return heads.reshape(len(x), -1) @ w["output.weight"].T


def test_outputs_equal_the_equations() -> None:
    attention, x = make(query_latent_size=7), inputs(1)
    wanted = torch.from_numpy(by_hand(attention, x[0].numpy(), 50.0))
    found = attention(x, mask=build_mask(LENGTH, LENGTH, causal=True), rotation=rotation(0, LENGTH))
    assert_close(found[0], wanted, rtol=1e-5, atol=1e-6)  # rotations are rounded to float32


@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 3, 8), tuple(range(1, LENGTH))], ids=str)
def test_calls_with_a_cache_equal_one_call(cuts: tuple[int, ...]) -> None:
    """The cache holds the latent vector and the rotated part of each token."""
    attention, x, cache = make(query_latent_size=7), inputs(), Cache.empty(1)[0]
    bounds, parts = [0, *cuts, LENGTH], []
    for start, stop in pairwise(bounds):
        mask = build_mask(stop - start, stop, causal=True)
        parts.append(attention(x[:, start:stop], mask=mask, rotation=rotation(start, stop), cache=cache))
    whole = attention(x, mask=build_mask(LENGTH, LENGTH, causal=True), rotation=rotation(0, LENGTH))
    assert_close(torch.cat(parts, 1), whole)
    assert cache.key is not None
    assert cache.value is not None
    assert (cache.key.shape, cache.value.shape) == ((2, 1, LENGTH, LATENT), (2, 1, LENGTH, ROTATED))


@pytest.mark.parametrize("scale", [None, 0.9])
def test_scale_is_that_of_whole_queries(scale: float | None) -> None:
    """A query has head_dim + rotary_dim numbers, also where it is multiplied by W^UK."""
    same, x = make(scale=(PLAIN + ROTATED) ** -0.5 if scale is None else scale), inputs()
    assert_close(make(scale=scale)(x), same(x))
    assert_close(make(scale=scale)(x, cache=LayerCache()), same(x))


def test_interleaved_pairs_are_halves_of_reordered_ones() -> None:
    x = torch.randn(2, 3, LENGTH, 6, dtype=torch.float64)
    turned = RotaryPositions(6)(torch.arange(LENGTH)[None], torch.float64)
    order = [0, 2, 4, 1, 3, 5]
    assert_close(apply_rotary(x, turned, interleaved=True), apply_rotary(x[..., order], turned))


def test_adapters_leave_the_expansion_alone() -> None:
    """Its weight is read by itself, where an adapter would have no effect."""
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([make()])})
    add_adapters(model, LowRankSettings(rank=2), (), 0)
    adapted = {name for name, part in model.named_modules() if isinstance(part, LowRankLinear)}
    assert adapted == {"blocks.0.query", "blocks.0.down", "blocks.0.output"}
