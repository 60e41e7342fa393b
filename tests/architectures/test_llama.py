"""Llama against transformers' Llama, Mistral and Qwen with the same weights, and invariances of a causal decoder."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import LlamaConfig as TheirLlamaConfig
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.architectures.test_gpt import in_calls, padding_of, tokens
from zoo.checkpoints import Exact
from zoo_plugins.llama.config import LlamaConfig
from zoo_plugins.llama.model import Llama

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "max_seq_len": 16,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "intermediate_size": 40,
    "norm_eps": 1e-3,
    "rope_theta": 50.0,
}
LLAMA3 = {
    "rope_scaling": "llama3",
    "rope_factor": 4.0,
    "rope_low_freq_factor": 0.5,
    "rope_high_freq_factor": 2.0,
    "rope_original_length": 9,
}
ROPE_NAMES = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}
MODULES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Names of a block's modules in transformers."""
MIXED = (0, 3, 3)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, every head its own keys": ("llama", {"num_kv_heads": None}),
    "llama, one head of keys": ("llama", {"num_kv_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 10}),
    "llama, biases": ("llama", {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_embeddings": True}),
    "llama, linear": ("llama", {"rope_scaling": "linear", "rope_factor": 2.5}),
    "llama 3.1": ("llama", LLAMA3),
    **{f"llama, {name}": ("llama", {"activation": name}) for name in ("gelu", "gelu_tanh", "relu")},
    "mistral": ("mistral", {"sliding_windows": (4,)}),
    "mistral without a window": ("mistral", {}),
    "qwen 2": ("qwen2", {"attention_bias": True}),
    "qwen 2, local layers": ("qwen2", {"attention_bias": True, "sliding_windows": MIXED}),
    "qwen 3": ("qwen3", {"qk_norm": True, "head_dim": 10}),
    "qwen 3, biases": (
        "qwen3",
        {"qk_norm": True, "attention_bias": True, "attention_output_bias": True, "tie_embeddings": True},
    ),
}
"""Model family in transformers, and options of ours."""


def make(**options: object) -> Llama:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = Llama(LlamaConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def transformers_twin(ours: Llama, family: str = "llama") -> PreTrainedModel:
    """Build transformers' model of a family with our weights, in float64."""
    c = ours.config
    kind = {"none": "default"}.get(c.rope_scaling, c.rope_scaling)
    wanted = {"default": [], "linear": ["rope_factor"], "llama3": [*ROPE_NAMES]}[kind]
    options: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_seq_len,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "hidden_act": ACTIVATIONS[c.activation],
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": {
            "rope_type": kind,
            "rope_theta": c.rope_theta,
            **{ROPE_NAMES[name]: getattr(c, name) for name in wanted},
        },
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    windows = {
        "use_sliding_window": any(c.sliding_windows),
        "sliding_window": max(c.sliding_windows) or None,
        "layer_types": ["full_attention" if c.window(n) is None else "sliding_attention" for n in range(c.num_layers)],
    }
    theirs: PreTrainedModel
    if family == "llama":
        biases = {"attention_bias": c.attention_bias, "mlp_bias": c.mlp_bias}
        theirs = LlamaForCausalLM(TheirLlamaConfig(**options, **biases))
    elif family == "mistral":
        theirs = MistralForCausalLM(MistralConfig(**options, sliding_window=c.window(0)))
    elif family == "qwen2":
        theirs = Qwen2ForCausalLM(Qwen2Config(**options, **windows))
    else:
        theirs = Qwen3ForCausalLM(Qwen3Config(**options, **windows, attention_bias=c.attention_bias))
    names = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for layer in range(c.num_layers):
        names |= {f"blocks.{layer}.{mine}": f"model.layers.{layer}.{its}" for mine, its in MODULES.items()}
    weights = {}
    for name, tensor in ours.state_dict().items():
        module, _, kind = name.rpartition(".")
        weights[f"{names[module]}.{kind}"] = tensor
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    return theirs


def logits_of(theirs: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    """Compute transformers' logits with only rotary angles rounded to float32."""
    with Exact(theirs):
        logits: Tensor = theirs(ids, use_cache=False, **options).logits
    return logits


@pytest.mark.parametrize(("family", "options"), VARIANTS.values(), ids=VARIANTS)
def test_equals_transformers(family: str, options: dict[str, Any]) -> None:
    """For every family and option, with and without a mask of ones."""
    ours, ids = make(**options), tokens(2, 11)
    expected = logits_of(transformers_twin(ours, family), ids)
    assert expected.std() > 0.1
    assert_close(ours(ids), expected, atol=1e-10, rtol=0)
    assert_close(ours(ids, torch.ones_like(ids)), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_equals_transformers_over_shapes(batch: int, length: int) -> None:
    """From one token to all positions."""
    ours, ids = make(), tokens(batch, length)
    assert_close(ours(ids), logits_of(transformers_twin(ours), ids), atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", ["llama 3.1", "mistral", "qwen 2, local layers", "qwen 3"])
def test_equals_transformers_with_padding(side: str, variant: str) -> None:
    """At every token. transformers needs explicit positions that skip padding; our model computes them."""
    family, options = VARIANTS[variant]
    ours, ids, padding = make(**options), tokens(4, 8), padding_of([8, 5, 1, 7], 8, side)
    positions = torch.tensor([[max(sum(row[: t + 1]) - 1, 0) for t in range(8)] for row in padding.tolist()])
    theirs = transformers_twin(ours, family)
    expected = logits_of(theirs, ids, attention_mask=padding, position_ids=positions)
    actual = ours(ids, padding)
    assert_close(actual[padding.bool()], expected[padding.bool()], atol=1e-10, rtol=0)
    assert actual.isfinite().all()


OPTIONS = [{}, LLAMA3, {"sliding_windows": (4,)}, {"sliding_windows": MIXED, "qk_norm": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_strictly_causal(options: dict[str, object]) -> None:
    """Tokens after t do not change outputs up to t, and token t + 1 changes the output at t + 1."""
    model, ids = make(**options), tokens(2, 9)
    before = model(ids)
    for t in range(8):
        changed = ids.clone()
        changed[:, t + 1 :] = (ids[:, t + 1 :] + 1) % SIZES["vocab_size"]
        after = model(changed)
        assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-12, rtol=0)
        assert (after[:, t + 1 :] - before[:, t + 1 :]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("window", [1, 2, 4])
def test_receptive_field_is_the_sum_of_windows(window: int) -> None:
    """Each of three layers passes on tokens up to ``window - 1`` before, and none from further back."""
    model, ids = make(sliding_windows=(window,)), tokens(1, 16)
    reach = 3 * (window - 1)
    before = model(ids)[0, -1]
    for distance in range(16):
        changed = ids.clone()
        changed[0, 15 - distance] = (ids[0, 15 - distance] + 1) % SIZES["vocab_size"]
        moved = float((model(changed)[0, -1] - before).abs().max())
        assert moved > 1e-6 if distance <= reach else moved == 0, distance


def test_window_over_all_tokens_equals_no_window() -> None:
    ids = tokens(2, 16)
    assert_close(make(sliding_windows=(16,))(ids), make()(ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padding_changes_nothing(side: str, options: dict[str, object]) -> None:
    """A sequence has the same logits alone and padded in a batch, with any padding token."""
    model, lengths = make(**options), [8, 5, 1]
    ids, padding = tokens(3, 8), padding_of(lengths, 8, side)
    for filler in (0, 7):
        logits = model(ids.masked_fill(padding == 0, filler), padding)
        for row in range(len(lengths)):
            kept = padding[row].bool()
            assert_close(logits[row, kept], model(ids[row : row + 1, kept])[0], atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=25)
@given(
    splits=st.sets(st.integers(1, 9)),
    options=st.sampled_from(OPTIONS),
    side=st.sampled_from(["left", "right", None]),
)
def test_cached_decoding_equals_the_full_pass(splits: set[int], options: dict[str, Any], side: str | None) -> None:
    """For any split of the sequence into calls, with and without padding: cached keys keep their own rotation."""
    model, ids = make(**options), tokens(3, 10)
    padding = padding_of([10, 6, 3], 10, side) if side else None
    actual, expected = in_calls(model, ids, padding, sorted(splits)), model(ids, padding)
    assert_close(actual, expected, atol=1e-11, rtol=0)


def test_cached_decoding_equals_transformers() -> None:
    """Token by token, against transformers' full pass."""
    ours, ids = make(sliding_windows=(4,)), tokens(2, 12)
    expected = logits_of(transformers_twin(ours, "mistral"), ids)
    assert_close(in_calls(ours, ids, None, range(1, 12)), expected, atol=1e-10, rtol=0)


def test_head_is_separate_unless_tied() -> None:
    """The head shares the embedding or not; its own adds vocabulary x width parameters."""
    untied, tied = make(), make(tie_embeddings=True)
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == SIZES["vocab_size"] * SIZES["hidden_size"]


def test_initial_weights_have_the_spread_of_transformers() -> None:
    """N(0, 0.02^2) for weights, 0 for biases and 1 for norms."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 600, "hidden_size": 96, "intermediate_size": 200, "attention_bias": True}
    ours = Llama(LlamaConfig(**{**SIZES, **sizes}))
    theirs = transformers_twin(ours, "qwen2")  # our initial weights under transformers' names
    drawn = Qwen2ForCausalLM(theirs.config).state_dict()
    for name, weight in theirs.state_dict().items():
        expected = drawn[name].double()
        assert weight.std().item() == pytest.approx(expected.std().item(), rel=0.06, abs=1e-12), name
        assert weight.mean().item() == pytest.approx(expected.mean().item(), abs=2e-3), name


def test_dropout_acts_in_training_only() -> None:
    """Two passes in training differ; two in evaluation do not."""
    model, ids = make(dropout=0.5), tokens(1, 6)
    assert model(ids).equal(model(ids))
    model.train()
    assert not model(ids).equal(model(ids))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_heads": 5, "num_kv_heads": None}, "hidden_size 24 is not divisible by num_heads 5"),
    "groups": ({"num_kv_heads": 4}, "num_heads 6 is not divisible by num_kv_heads 4"),
    "odd": ({"head_dim": 5}, "head_dim must be even for rotary positions, got 5"),
    "part": ({"rotary_dim": 6}, "rotary_dim must be even and at most head_dim 4, got 6"),
    "odd part": ({"rotary_dim": 3}, "rotary_dim must be even and at most head_dim 4, got 3"),
    "no layers": ({"rope_layers": ()}, r"rope_layers must be one or more booleans, got \(\)"),
    "cap": ({"attention_softcap": 0.0}, "attention_softcap must be positive, got 0.0"),
    "turns": ({"rope_high_freq_factor": 1.0}, "rope_high_freq_factor 1.0 must exceed rope_low_freq_factor 1.0"),
    "factor": ({"rope_factor": 0.0}, "rope_factor must be positive, got 0.0"),
    "window": ({"sliding_windows": (4, -1)}, r"non-negative numbers, got \(4, -1\)"),
    "no norms": ({"pre_norms": False}, "pre_norms False needs post_norms"),
    "a bias of a shared head": ({"head_bias": True, "tie_embeddings": True}, "head_bias or tie_embeddings"),
    "factor of embeddings": ({"embedding_multiplier": 0.0}, "embedding_multiplier must be positive, got 0.0"),
    "factor of outputs": ({"residual_multiplier": -1.0}, "residual_multiplier must be positive, got -1.0"),
    "factor of logits": ({"logit_multiplier": 0.0}, "logit_multiplier must be positive, got 0.0"),
    "no windows": ({"sliding_windows": ()}, r"one or more non-negative numbers, got \(\)"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_configurations_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**{**SIZES, **options})


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 7))
def test_windows_are_repeated_over_the_layers(windows: list[int], layers: int) -> None:
    """They are reduced to their shortest period, so that equivalent configurations are equal."""
    config = LlamaConfig.from_dict({**SIZES, "num_layers": layers, "sliding_windows": windows})
    each = [windows[layer % len(windows)] for layer in range(layers)]
    assert [config.window(layer) or 0 for layer in range(layers)] == each
    assert config == LlamaConfig.from_dict({**SIZES, "num_layers": layers, "sliding_windows": each})
