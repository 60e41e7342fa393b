"""GPT against transformers' GPT-2 and GPT-Neo with the same weights, and invariances of a causal decoder."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

from zoo.checkpoints import Exact
from zoo.nn import Cache
from zoo_plugins.gpt.config import GPTConfig
from zoo_plugins.gpt.model import GPT

SIZES = {
    "vocab_size": 53,
    "max_seq_len": 16,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 3,
    "intermediate_size": 40,
    "norm_eps": 1e-4,
}
# Names of the activations in transformers.
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}


def make(**options: object) -> GPT:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = GPT(GPTConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def transformers_twin(ours: GPT) -> GPT2LMHeadModel:
    """Build transformers' GPT-2 with our weights. Its Conv1D is [in, out], and fuses query, key and value."""
    c = ours.config
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.max_seq_len,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=c.intermediate_size,
            activation_function=ACTIVATIONS[c.activation],
            layer_norm_epsilon=c.norm_eps,
            scale_attn_weights=c.attention_scale is None,
            tie_word_embeddings=c.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
    )
    weights = {
        "transformer.wte.weight": ours.token_embedding.weight,
        "transformer.wpe.weight": ours.position_embedding.weight,
        "lm_head.weight": ours.head.weight,
    }

    def norm(name: str, layer: nn.LayerNorm) -> None:
        weights.update({f"{name}.weight": layer.weight, f"{name}.bias": layer.bias})

    def conv_1d(name: str, *layers: nn.Linear) -> None:
        weights[f"{name}.weight"] = torch.cat([layer.weight for layer in layers]).T
        weights[f"{name}.bias"] = torch.cat([layer.bias for layer in layers])

    norm("transformer.ln_f", ours.norm)
    for index, block in enumerate(ours.blocks):
        name, attention = f"transformer.h.{index}", block.attention
        norm(f"{name}.ln_1", block.norm_1)
        norm(f"{name}.ln_2", block.norm_2)
        conv_1d(f"{name}.attn.c_attn", attention.query, attention.key, attention.value)
        conv_1d(f"{name}.attn.c_proj", attention.output)
        conv_1d(f"{name}.mlp.c_fc", block.mlp.up)
        conv_1d(f"{name}.mlp.c_proj", block.mlp.down)
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    return theirs


def neo_twin(ours: GPT) -> GPTNeoForCausalLM:
    """Build transformers' GPT-Neo with our weights: dense layers, and local layers at given places."""
    c = ours.config
    kinds = ["global" if c.window(layer) is None else "local" for layer in range(c.num_layers)]
    theirs = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=c.vocab_size,
            max_position_embeddings=c.max_seq_len,
            hidden_size=c.hidden_size,
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            intermediate_size=c.intermediate_size,
            attention_types=[[kinds, 1]],
            window_size=max(c.sliding_windows) or 256,
            activation_function=ACTIVATIONS[c.activation],
            layer_norm_epsilon=c.norm_eps,
            tie_word_embeddings=c.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    parts = {
        "norm_1": "ln_1", "norm_2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        "attention.query": "attn.attention.q_proj", "attention.key": "attn.attention.k_proj",
        "attention.value": "attn.attention.v_proj", "attention.output": "attn.attention.out_proj",
    }  # fmt: skip
    names = {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    for layer in range(c.num_layers):
        names |= {f"blocks.{layer}.{mine}": f"transformer.h.{layer}.{its}" for mine, its in parts.items()}
    weights = {}
    for name, tensor in ours.state_dict().items():
        module, _, kind = name.rpartition(".")
        weights[f"{names[module]}.{kind}"] = tensor
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    return theirs


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Draw random token ids, (batch, length)."""
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def padding_of(lengths: Sequence[int], total: int, side: str) -> Tensor:
    """Build a padding mask with a row of each length, padded to ``total`` on ``side``."""
    rows = [[1] * length + [0] * (total - length) for length in lengths]
    return torch.tensor([row[::-1] if side == "left" else row for row in rows])


def in_calls(model: GPT, ids: Tensor, padding: Tensor | None, splits: Sequence[int]) -> Tensor:
    """Compute the logits of ``ids`` with a cache, in calls cut at ``splits``."""
    cache, outputs = Cache.empty(model.config.num_layers), []
    for start, stop in pairwise([0, *splits, ids.shape[1]]):
        seen = None if padding is None else padding[:, :stop]
        outputs.append(model(ids[:, start:stop], seen, cache))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_equals_transformers(activation: str, tie_embeddings: bool) -> None:
    """For every activation, with tied and untied heads."""
    ours = make(activation=activation, tie_embeddings=tie_embeddings)
    ids = tokens(2, 9)
    assert_close(ours(ids), transformers_twin(ours)(ids).logits, atol=1e-10, rtol=0)


def test_unscaled_scores_equal_transformers() -> None:
    ours, ids = make(attention_scale=1.0), tokens(2, 9)
    assert_close(ours(ids), transformers_twin(ours)(ids).logits, atol=1e-10, rtol=0)


def band(length: int, window: int) -> Tensor:
    """Build a mask (length, length), True where t - window < s <= t."""
    return torch.tensor([[t - window < s <= t for s in range(length)] for t in range(length)])


def with_band_masks(model: GPT, ids: Tensor) -> Tensor:
    """Compute the logits from the weights with dense scores and a mask per layer, without our blocks."""
    c, width = model.config, model.config.hidden_size

    def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * layer.weight + layer.bias

    def dense(x: Tensor, layer: nn.Linear) -> Tensor:
        return x @ layer.weight.T + layer.bias

    x = model.token_embedding.weight[ids] + model.position_embedding.weight[: ids.shape[1]]
    for number, block in enumerate(model.blocks):
        window = c.sliding_windows[number % len(c.sliding_windows)] or ids.shape[1]
        y, part = norm(x, block.norm_1), block.attention
        query, key, value = (
            dense(y, layer).unflatten(-1, (c.num_heads, -1)) for layer in (part.query, part.key, part.value)
        )
        assert query.shape[-1] == (c.head_dim or width // c.num_heads)
        scores = torch.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
        weights = scores.where(band(ids.shape[1], window), -torch.inf).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + dense(torch.einsum("bhts,bshd->bthd", weights, value).flatten(2), part.output)
        y = dense(norm(x, block.norm_2), block.mlp.up)
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + dense(y, block.mlp.down)
    return norm(x, model.norm) @ model.head.weight.T


GPT_3 = {"sliding_windows": (0, 3), "num_layers": 4, "num_heads": 3, "head_dim": 10}
"""Sliding-window layers alternating with dense ones, and heads that do not add up to the width of 24."""


@pytest.mark.parametrize("windows", [(0, 3), (3, 0), (1,), (2, 5, 0), (16,), (0,)])
@pytest.mark.parametrize("head_dim", [10, None])
def test_banded_layer_equals_dense_attention_with_a_band_mask(windows: tuple[int, ...], head_dim: int | None) -> None:
    ours, ids = make(**{**GPT_3, "sliding_windows": windows, "head_dim": head_dim}), tokens(2, 12)
    assert_close(ours(ids), with_band_masks(ours, ids), atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [12, 13, 1000])
def test_window_as_long_as_the_text_equals_dense_attention(window: int) -> None:
    banded, dense, ids = make(sliding_windows=(0, window)), make(), tokens(2, 12)
    assert_close(banded(ids), dense(ids), atol=1e-12, rtol=0)
    assert (make(sliding_windows=(0, 11))(ids)[:, -1] - dense(ids)[:, -1]).abs().max() > 1e-4


@settings(deadline=None, max_examples=20)
@given(
    windows=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), num_layers=st.integers(1, 3),
    changed=st.integers(0, 11),
)  # fmt: skip
def test_tokens_outside_the_receptive_field_have_no_effect(
    windows: tuple[int, ...], num_layers: int, changed: int
) -> None:
    """Each layer passes on tokens less than its window away; the total reach is their sum, and is attained."""
    model, ids = make(**{**GPT_3, "sliding_windows": windows, "num_layers": num_layers}), tokens(1, 12)
    other = ids.clone()
    other[0, changed] = (ids[0, changed] + 1) % SIZES["vocab_size"]
    moved = (model(other) - model(ids)).abs().amax(-1)[0]
    reach = sum(windows[layer % len(windows)] - 1 for layer in range(num_layers))
    seen = [changed <= position <= changed + reach for position in range(12)]
    assert moved[~torch.tensor(seen)].lt(1e-12).all()
    assert moved[torch.tensor(seen)].gt(1e-6).all()


def test_default_head_dim_divides_the_width() -> None:
    """Configurations written before ``head_dim`` existed still load."""
    assert GPTConfig(hidden_size=24, num_heads=3).head_dim == 8
    assert GPTConfig(hidden_size=25, num_heads=3, head_dim=8).head_dim == 8
    older = {key: value for key, value in GPTConfig().to_dict().items() if key != "head_dim"}
    assert GPTConfig.from_dict(older) == GPTConfig()
    with pytest.raises(ValueError, match="hidden_size 25 is not divisible by num_heads 3"):
        GPTConfig(hidden_size=25, num_heads=3)
    with pytest.raises(ValueError, match="head_dim must be positive, got 0"):
        GPTConfig(head_dim=0)


NEO = {"attention_bias": False, "attention_scale": 1.0, "sliding_windows": (0, 3)}


@pytest.mark.parametrize("windows", [(0, 3), (3,), (0, 3, 3), (0,)])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_equals_gpt_neo(windows: tuple[int, ...], side: str | None) -> None:
    """Unscaled scores, no biases on queries, keys and values, and local layers anywhere; with and without padding."""
    ours, ids = make(**{**NEO, "sliding_windows": windows}, num_layers=4), tokens(4, 12)
    padding = torch.ones_like(ids) if side is None else padding_of([12, 7, 1, 9], 12, side)
    theirs, positions = neo_twin(ours), (padding.cumsum(-1) - 1).clamp(min=0)
    with Exact(theirs):
        expected = theirs(ids, attention_mask=padding, position_ids=positions, use_cache=False).logits
    actual = ours(ids, padding)
    assert_close(actual[padding.bool()], expected[padding.bool()], atol=1e-10, rtol=0)
    assert actual.isfinite().all()


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_equals_transformers_over_shapes(batch: int, length: int) -> None:
    """From one token to all positions. A mask of ones equals no mask."""
    ours, ids = make(), tokens(batch, length)
    expected = transformers_twin(ours)(ids).logits
    assert_close(ours(ids), expected, atol=1e-10, rtol=0)
    assert_close(ours(ids, torch.ones_like(ids)), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_equals_transformers_with_padding(side: str) -> None:
    """At every token. transformers needs explicit positions that skip padding; our model computes them."""
    ours, ids, padding = make(), tokens(4, 8), padding_of([8, 5, 1, 7], 8, side)
    positions = torch.tensor([[max(sum(row[: t + 1]) - 1, 0) for t in range(8)] for row in padding.tolist()])
    expected = transformers_twin(ours)(ids, attention_mask=padding, position_ids=positions).logits
    actual = ours(ids, padding)
    assert_close(actual[padding.bool()], expected[padding.bool()], atol=1e-10, rtol=0)
    assert actual.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"tie_embeddings": False}, NEO, GPT_3])
def test_strictly_causal(options: dict[str, object]) -> None:
    """Tokens after t do not change outputs up to t, and token t + 1 changes the outputs from t + 1 on."""
    model, ids = make(**options), tokens(2, 9)
    before = model(ids)
    for t in range(8):
        changed = ids.clone()
        changed[:, t + 1 :] = (ids[:, t + 1 :] + 1) % SIZES["vocab_size"]
        after = model(changed)
        assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-12, rtol=0)
        assert (after[:, t + 1 :] - before[:, t + 1 :]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_kv_heads", [3, 1])
def test_padding_changes_nothing(side: str, num_kv_heads: int) -> None:
    """A sequence has the same logits alone and padded in a batch, with any padding token."""
    model, lengths = make(num_kv_heads=num_kv_heads), [8, 5, 1]
    ids, padding = tokens(3, 8), padding_of(lengths, 8, side)
    for filler in (0, 7):
        logits = model(ids.masked_fill(padding == 0, filler), padding)
        for row in range(len(lengths)):
            kept = padding[row].bool()
            assert_close(logits[row, kept], model(ids[row : row + 1, kept])[0], atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=25)
@given(
    splits=st.sets(st.integers(1, 9)),
    options=st.sampled_from([{}, {"num_kv_heads": 1}, NEO, GPT_3]),
    side=st.sampled_from(["left", "right", None]),
)
def test_cached_decoding_equals_the_full_pass(splits: set[int], options: dict[str, object], side: str | None) -> None:
    """For any split of the sequence into calls, with and without padding."""
    model, ids = make(**options), tokens(3, 10)
    padding = padding_of([10, 6, 3], 10, side) if side else None
    actual, expected = in_calls(model, ids, padding, sorted(splits)), model(ids, padding)
    assert_close(actual, expected, atol=1e-11, rtol=0)


def test_mask_of_only_the_new_token_is_rejected() -> None:
    model, cache, ids = make(), Cache.empty(SIZES["num_layers"]), torch.ones(2, 6, dtype=torch.long)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="the padding mask has length 1, but there are 7 past and new tokens"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)


def test_cached_decoding_equals_transformers() -> None:
    """Token by token, against transformers' full pass."""
    ours, ids = make(), tokens(2, 12)
    expected = transformers_twin(ours)(ids).logits
    assert_close(in_calls(ours, ids, None, range(1, 12)), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_grouped_query_equals_transformers_with_repeated_heads(num_kv_heads: int) -> None:
    """GPT-2 has no grouped heads, but repeating keys and values within a group is equivalent."""
    sizes = {"num_heads": 6, "hidden_size": 24}
    grouped, full = make(**sizes, num_kv_heads=num_kv_heads), make(**sizes)
    state = grouped.state_dict()
    for name, tensor in state.items():
        if ".attention.key." in name or ".attention.value." in name:
            heads = tensor.unflatten(0, (num_kv_heads, 4))
            state[name] = heads[[head * num_kv_heads // 6 for head in range(6)]].flatten(0, 1)
    full.load_state_dict(state)
    ids = tokens(2, 9)
    assert_close(grouped(ids), transformers_twin(full)(ids).logits, atol=1e-10, rtol=0)


def test_head_shares_the_token_embedding_unless_untied() -> None:
    """The head shares the embedding; an untied head adds vocabulary x width parameters."""
    tied, untied = make(), make(tie_embeddings=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == SIZES["vocab_size"] * SIZES["hidden_size"]


def test_initial_weights_have_the_spread_of_transformers() -> None:
    """Same distribution as GPT-2's own initialisation for each tensor: 0.02, less in the last layers of branches."""
    torch.manual_seed(0)
    ours = GPT(GPTConfig(**{**SIZES, "vocab_size": 600, "hidden_size": 96, "max_seq_len": 100}))
    theirs = transformers_twin(ours)  # our initial weights under transformers' names
    drawn = GPT2LMHeadModel(theirs.config).state_dict()
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
