"""Attention against torch.nn.MultiheadAttention and numpy, and its invariances."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.nn import (
    LayerCache,
    MultiHeadAttention,
    RotaryPositions,
    attention_weights,
    build_mask,
    scaled_dot_product_attention,
)

HIDDEN = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal float64 numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(num_heads: int, **options: object) -> MultiHeadAttention:
    """Build a float64 layer in evaluation mode with random weights and biases."""
    layer = MultiHeadAttention(HIDDEN, num_heads, **options).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return layer.requires_grad_(False)


def torch_twin(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    """Build torch's layer with the same weights; it stacks query, key and value into one matrix."""
    bias = ours.query.bias is not None
    theirs = nn.MultiheadAttention(HIDDEN, ours.num_heads, bias=bias, batch_first=True, dtype=torch.float64)
    projections = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.data = torch.cat([part.weight for part in projections])
    theirs.out_proj.weight.data = ours.output.weight.data
    if bias:
        theirs.in_proj_bias.data = torch.cat([part.bias for part in projections])
        theirs.out_proj.bias.data = ours.output.bias.data
    return theirs.requires_grad_(False)


def numpy_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute equation 1, one query at a time; query head h reads key-value head h // (H / K)."""
    q, k, v, seen = (tensor.numpy() for tensor in (query, key, value, mask))
    batch, heads, length, size = q.shape
    result = np.zeros((batch, heads, length, v.shape[-1]))
    for b, h, t in np.ndindex(batch, heads, length):
        group = h // (heads // k.shape[1])
        visible = np.flatnonzero(seen[b, 0, t])
        if visible.size:
            scores = k[b, group, visible] @ q[b, h, t] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            result[b, h, t] = weights / weights.sum() @ v[b, group, visible]
    return torch.from_numpy(result)


@pytest.mark.parametrize("num_heads", [1, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_self_attention_equals_torch(num_heads: int, bias: bool, causal: bool, padded: bool) -> None:
    """Output and weights, for all combinations of causal mask and right padding."""
    ours, x, length = make(num_heads, bias=bias), normal(3, 5, HIDDEN), 5
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    mask = build_mask(length, length, padding=padding if padded else None, causal=causal)
    expected, weights = torch_twin(ours)(
        x,
        x,
        x,
        key_padding_mask=padding == 0 if padded else None,
        attn_mask=torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None,
        average_attn_weights=False,
    )
    assert_close(ours(x, mask=mask), expected, atol=1e-12, rtol=0)
    assert_close(ours.with_weights(x, mask=mask)[1], weights, atol=1e-12, rtol=0)


@pytest.mark.parametrize("padding", [None, [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]])
def test_cross_attention_equals_torch(padding: list[list[int]] | None) -> None:
    """Four queries attend to seven keys of another sequence, padded left or right."""
    ours, x, memory = make(3), normal(2, 4, HIDDEN), normal(2, 7, HIDDEN, seed=2)
    tokens = None if padding is None else torch.tensor(padding)
    expected, weights = torch_twin(ours)(
        x,
        memory,
        memory,
        key_padding_mask=None if tokens is None else tokens == 0,
        average_attn_weights=False,
    )
    mask, keys_values = build_mask(4, 7, padding=tokens), ours.keys_values(memory)
    assert_close(ours(x, memory=keys_values, mask=mask), expected, atol=1e-12, rtol=0)
    assert_close(ours.with_weights(x, memory=keys_values, mask=mask)[1], weights, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_grouped_query_equals_numpy(num_kv_heads: int) -> None:
    """Six query heads on K key-value heads, values wider than keys, a random mask and a masked row."""
    query, key = normal(2, 6, 4, 5), normal(2, num_kv_heads, 7, 5, seed=1)
    value = normal(2, num_kv_heads, 7, 3, seed=2)
    mask = normal(2, 1, 4, 7, seed=3) > 0
    mask[0, 0, 2] = False
    expected = numpy_attention(query, key, value, mask)
    assert_close(scaled_dot_product_attention(query, key, value, mask=mask), expected, atol=1e-12, rtol=0)
    weights = attention_weights(query, key, mask=mask)
    assert_close(weights @ value.repeat_interleave(6 // num_kv_heads, dim=1), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_grouped_layer_equals_the_layer_with_repeated_projections(num_kv_heads: int) -> None:
    """Repeating each key-value head for every query head that reads it changes nothing."""
    grouped, full, x = make(6, num_kv_heads=num_kv_heads), make(6), normal(2, 5, HIDDEN)
    for name in ("query", "output"):
        getattr(full, name).load_state_dict(getattr(grouped, name).state_dict())
    for name in ("key", "value"):
        part, size = getattr(grouped, name), HIDDEN // 6
        rows = [head // (6 // num_kv_heads) * size + row for head in range(6) for row in range(size)]
        getattr(full, name).load_state_dict({"weight": part.weight[rows], "bias": part.bias[rows]})
    mask = build_mask(5, 5, causal=True)
    expected, _ = torch_twin(full)(x, x, x, attn_mask=~mask[0, 0])
    assert_close(grouped(x, mask=mask), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("value_head_dim", [None, 5])
def test_with_weights_is_forward_and_rows_sum_to_one(num_kv_heads: int, value_head_dim: int | None) -> None:
    """Both paths agree, and each row of weights sums to 1, or to 0 if the query sees no key."""
    layer, x = make(4, num_kv_heads=num_kv_heads, value_head_dim=value_head_dim), normal(2, 6, HIDDEN)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    mask = build_mask(6, 6, padding=padding, causal=True)
    output, weights = layer.with_weights(x, mask=mask)
    assert_close(output, layer(x, mask=mask), atol=1e-12, rtol=0)
    sums = mask.any(-1).double().expand(-1, 4, -1)
    assert sums.unique().tolist() == [0, 1]
    assert_close(weights.sum(-1), sums, atol=1e-12, rtol=0)
    assert weights.min() >= 0
    assert not weights.masked_select(~mask).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_fully_masked_rows_are_zero(dtype: torch.dtype, num_kv_heads: int) -> None:
    """A query that sees no key gives exactly 0, with gradient 0, on both paths; never NaN."""
    query = normal(1, 4, 3, 8).to(dtype).requires_grad_()
    key, value = (normal(1, num_kv_heads, 5, 8, seed=seed).to(dtype) for seed in (1, 2))
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[:, :, 1] = False
    output = scaled_dot_product_attention(query, key, value, mask=mask)
    weights = attention_weights(query, key, mask=mask)
    gradients = [torch.autograd.grad(tensor.square().sum(), query)[0] for tensor in (output, weights)]
    for tensor in (output, weights, *gradients):
        assert tensor.isfinite().all()
        assert not tensor[:, :, 1].any()
        assert tensor[:, :, [0, 2]].any()


def test_fully_masked_row_of_a_layer_gives_the_output_bias() -> None:
    """W^O maps 0 to its bias on both paths."""
    layer, x = make(3), normal(2, 4, HIDDEN)
    mask = build_mask(4, 4, padding=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    for output in (layer(x, mask=mask), layer.with_weights(x, mask=mask)[0]):
        assert_close(output[1], layer.output.bias.expand(4, -1), atol=0, rtol=0)


@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(7)), num_kv_heads=st.sampled_from([1, 2, 4]))
def test_permutation_equivariance(order: list[int], num_kv_heads: int) -> None:
    """Permuting the tokens permutes the output; permuting only the keys changes nothing."""
    layer, x, memory = make(4, num_kv_heads=num_kv_heads), normal(2, 7, HIDDEN), normal(2, 7, HIDDEN, seed=2)
    assert_close(layer(x[:, order]), layer(x)[:, order], atol=1e-12, rtol=0)
    shuffled, plain = layer.keys_values(memory[:, order]), layer.keys_values(memory)
    assert_close(layer(x, memory=shuffled), layer(x, memory=plain), atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=40)
@given(
    num_heads=st.integers(1, 5),
    head_dim=st.integers(1, 4),
    length=st.integers(1, 6),
    memory=st.integers(0, 6),
    bias=st.booleans(),
)
def test_stacked_single_heads_equal_the_fused_layer(
    num_heads: int, head_dim: int, length: int, memory: int, bias: bool
) -> None:
    """With W^O = I the layer is the concatenation of its heads, each a separate layer with its slice of the weights.

    For causal self-attention and for cross-attention.
    """
    hidden = num_heads * head_dim
    generator = torch.Generator().manual_seed(7)
    fused = MultiHeadAttention(hidden, num_heads, bias=bias, output_bias=False).double().requires_grad_(False)
    for parameter in fused.parameters():
        nn.init.normal_(parameter, generator=generator)
    fused.output.weight.copy_(torch.eye(hidden))
    x = normal(2, length, hidden)
    other = normal(2, memory, hidden, seed=2) if memory else None

    def attend(layer: MultiHeadAttention) -> Tensor:
        if other is None:
            return layer(x, mask=build_mask(length, length, causal=True))
        return layer(x, memory=layer.keys_values(other))

    heads = []
    for head in range(num_heads):
        single = MultiHeadAttention(hidden, 1, head_dim=head_dim, bias=bias).double().requires_grad_(False)
        rows = slice(head * head_dim, (head + 1) * head_dim)
        for name in ("query", "key", "value"):
            for part, parameter in getattr(single, name).named_parameters():
                parameter.copy_(getattr(getattr(fused, name), part)[rows])
        single.output = nn.Identity()  # (B, T, D), which W^O = I would leave as it is
        heads.append(attend(single))
    assert_close(torch.cat(heads, dim=-1), attend(fused), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("inputs", "outputs", "num_heads"), [(3, 2, 1), (7, 12, 4), (16, 6, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_size_equals_teaching_code(inputs: int, outputs: int, num_heads: int, bias: bool) -> None:
    """Attention from d_in to d_out: heads of d_out / H, and a square output projection, one head at a time."""
    layer = MultiHeadAttention(inputs, num_heads, output_size=outputs, bias=bias, output_bias=True)
    layer = layer.double().requires_grad_(False)
    x, size, heads = normal(2, 5, inputs), outputs // num_heads, []
    assert layer.output.weight.shape == (outputs, outputs)
    for head in range(num_heads):
        rows = slice(head * size, (head + 1) * size)
        query, key, value = (
            x @ part.weight[rows].T + (part.bias[rows] if bias else 0) for part in (layer.query, layer.key, layer.value)
        )
        scores = (query @ key.mT / math.sqrt(size)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ value)
    expected = torch.cat(heads, -1) @ layer.output.weight.T + layer.output.bias
    assert_close(layer(x, mask=build_mask(5, 5, causal=True)), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("biases", [(True, False, True), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("output_bias", [None, True, False])
def test_mixed_biases_equal_torch(biases: tuple[bool, bool, bool], output_bias: bool | None) -> None:
    """Each projection with or without its own bias, which torch holds as zeros."""
    ours, x = make(3, bias=biases, output_bias=output_bias), normal(2, 5, HIDDEN)
    parts = (ours.query, ours.key, ours.value)
    assert tuple(part.bias is not None for part in parts) == biases
    assert (ours.output.bias is not None) == (biases[0] if output_bias is None else output_bias)
    theirs = nn.MultiheadAttention(HIDDEN, 3, batch_first=True, dtype=torch.float64)
    theirs.in_proj_weight.data = torch.cat([part.weight for part in parts])
    theirs.out_proj.weight.data = ours.output.weight
    zeros = torch.zeros(HIDDEN, dtype=torch.float64)
    theirs.in_proj_bias.data = torch.cat([zeros if part.bias is None else part.bias for part in parts])
    theirs.out_proj.bias.data = zeros if ours.output.bias is None else ours.output.bias
    assert_close(ours(x), theirs(x, x, x)[0], atol=1e-12, rtol=0)


def test_memory_with_a_cache_is_rejected() -> None:
    """A cache would append the whole memory at each call."""
    layer, x = make(2), normal(1, 3, HIDDEN)
    with pytest.raises(ValueError, match=r"^memory and cache exclude each other"):
        layer(x, memory=layer.keys_values(x), cache=LayerCache())


def test_head_dim_and_value_head_dim() -> None:
    """d_k and d_v differ from E / H and from each other; the scale is 1 / sqrt(d_k)."""
    layer, x = make(5, head_dim=3, value_head_dim=4), normal(2, 6, HIDDEN)
    shapes = [tuple(part.weight.shape) for part in (layer.query, layer.key, layer.value, layer.output)]
    assert shapes == [(15, HIDDEN), (15, HIDDEN), (20, HIDDEN), (HIDDEN, 20)]
    query, key, value = (
        part(x).view(2, 6, 5, size).transpose(1, 2)
        for part, size in ((layer.query, 3), (layer.key, 3), (layer.value, 4))
    )
    heads = numpy_attention(query, key, value, torch.ones(2, 1, 6, 6, dtype=torch.bool))
    assert_close(layer(x), layer.output(heads.transpose(1, 2).reshape(2, 6, 20)), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "options", "message"),
    [
        (10, 3, {}, "hidden_size 10 is not divisible by num_heads 3"),
        (12, 4, {"num_kv_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3"),
        (12, 4, {"num_kv_heads": 8}, "num_heads 4 is not divisible by num_kv_heads 8"),
    ],
)
def test_indivisible_sizes(hidden_size: int, num_heads: int, options: dict[str, int], message: str) -> None:
    """The message names both values."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        MultiHeadAttention(hidden_size, num_heads, **options)


def test_explicit_head_dim_needs_no_divisibility() -> None:
    """With an explicit d_k, E need not be a multiple of H."""
    assert MultiHeadAttention(10, 3, head_dim=4)(torch.zeros(1, 2, 10)).shape == (1, 2, 10)


@settings(deadline=None, max_examples=40)
@given(
    splits=st.sets(st.integers(1, 8)),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    padded=st.integers(0, 4),
    left=st.booleans(),
)
def test_cached_decoding_equals_the_full_pass(splits: set[int], num_kv_heads: int, padded: int, left: bool) -> None:
    """Any split of nine tokens into cached calls gives the outputs of a single pass."""
    layer, x, length = make(4, num_kv_heads=num_kv_heads), normal(2, 9, HIDDEN), 9
    padding = torch.ones(2, length, dtype=torch.long)
    padding[1, slice(0, padded) if left else slice(length - padded, length)] = 0
    expected = layer(x, mask=build_mask(length, length, padding=padding, causal=True))
    cache, outputs, bounds = LayerCache(), [], [0, *sorted(splits), length]
    for start, stop in pairwise(bounds):
        mask = build_mask(stop - start, stop, padding=padding[:, :stop], causal=True)
        outputs.append(layer(x[:, start:stop], mask=mask, cache=cache))
        assert cache.key is not None
        assert cache.key.shape == (2, num_kv_heads, stop, HIDDEN // 4)
    assert_close(torch.cat(outputs, dim=1), expected, atol=1e-12, rtol=0)


def test_dropout_acts_in_training_only_and_keeps_the_mean() -> None:
    """Uniform weights over values of 1 give (keys kept) / (S (1 - p)): multiples of 1/5, and 1 in evaluation."""
    layer = MultiHeadAttention(HIDDEN, 4, bias=False, dropout=0.5).double().requires_grad_(False)
    nn.init.zeros_(layer.query.weight)
    layer.output = nn.Identity()
    x = normal(64, 10, HIDDEN)
    memory = (layer.keys_values(x)[0], torch.ones(64, 4, 10, 3, dtype=torch.float64))
    torch.manual_seed(0)
    for path in (layer, lambda x, **options: layer.with_weights(x, **options)[0]):
        layer.train()
        kept = path(x, memory=memory) * 5
        assert_close(kept, kept.round(), atol=1e-9, rtol=0)
        assert kept.unique().numel() > 5
        # 2,560 rows of 10 fair draws: the mean of the outputs has a standard error of 0.0063.
        assert abs(kept.mean() / 5 - 1) < 0.03
        layer.eval()
        assert_close(path(x, memory=memory), torch.ones_like(kept), atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_bias_and_scale(num_kv_heads: int, scale: float | None) -> None:
    """Equal to softmax(scale x Q K^T + bias) V. Masked keys ignore the bias, and fully masked rows give 0."""
    query, key, value = normal(2, 4, 5, 3), normal(2, num_kv_heads, 7, 3, seed=1), normal(2, num_kv_heads, 7, 6, seed=2)
    bias, mask = 3 * normal(1, 4, 5, 7, seed=3), normal(2, 1, 5, 7, seed=4) > -0.5
    mask[1, 0, 2] = False
    repeated = [tensor.repeat_interleave(4 // num_kv_heads, dim=1) for tensor in (key, value)]
    factor = 1 / math.sqrt(3) if scale is None else scale
    exponentials = torch.exp(factor * torch.einsum("bhtd,bhsd->bhts", query, repeated[0]) + bias) * mask
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    result = scaled_dot_product_attention(query, key, value, mask=mask, bias=bias, scale=scale)
    assert_close(result, weights @ repeated[1])
    assert_close(attention_weights(query, key, mask=mask, bias=bias, scale=scale), weights)
    assert not result[1, :, 2].any()


def test_weights_with_bias_scale_and_rotation_reproduce_the_output() -> None:
    layer = make(4, head_dim=6, num_kv_heads=2, scale=0.7, output_bias=False, qk_norm=1e-6)
    assert layer.output.bias is None
    assert layer.query.bias is not None
    x, bias, mask = normal(2, 5, HIDDEN), normal(1, 4, 5, 5, seed=1), build_mask(5, 5, causal=True)
    rotation = RotaryPositions(6)(torch.arange(5)[None], torch.float64)
    result, weights = layer.with_weights(x, mask=mask, bias=bias, rotation=rotation)
    assert_close(result, layer(x, mask=mask, bias=bias, rotation=rotation))
    assert not weights[0, :, 0, 1:].any()
    without = layer.with_weights(x, mask=mask)[1]
    assert not torch.allclose(weights, without)


def test_queries_and_keys_are_normalised_before_rotation() -> None:
    """Equal to Qwen3's attention, which normalises each head, always in float32."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config, Qwen3RotaryEmbedding

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-3,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Qwen3Attention(config, layer_idx=0).double().eval()
    ours = MultiHeadAttention(12, 4, num_kv_heads=2, head_dim=6, bias=False, qk_norm=1e-3).double().eval()
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    for name, other in (names | {"query_norm": "q_norm", "key_norm": "k_norm"}).items():
        nn.init.normal_(theirs.get_submodule(other).weight)
        ours.get_submodule(name).weight.data = theirs.get_submodule(other).weight.data
    x, positions = normal(2, 5, 12), torch.arange(5)[None]
    turns = Qwen3RotaryEmbedding(config)(x, positions)
    causal = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, turns, causal)[0]
    rotation = RotaryPositions(6, config.rope_parameters["rope_theta"])(positions, torch.float64)
    assert_close(ours(x, mask=build_mask(5, 5, causal=True), rotation=rotation), expected, rtol=0, atol=1e-5)
