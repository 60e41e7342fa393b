"""Masks, positions, feed-forward, residual, pooling, initialisation and cache, against plain reimplementations."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.activations import QuickGELUActivation, ReLUSquaredActivation

import zoo
from zoo import Initializer
from zoo.nn import (
    Cache,
    FeedForward,
    GatedFeedForward,
    LayerCache,
    Residual,
    RotaryPositions,
    SinusoidalPositions,
    apply_rotary,
    build_mask,
    initialize,
    interpolate_frequencies,
    llama3_rope_scaling,
    normalize,
    pool,
    positions_of,
    sinusoids,
    tied_linear,
)
from zoo.nn.pooling import Pooling

quick = settings(deadline=None, max_examples=50)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal float64 numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def paddings(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Draw a query length, a key length, and a padding mask of 1 to 3 rows, with padding anywhere."""
    key_length = draw(st.integers(1, 6))
    query_length = draw(st.integers(1, key_length))
    row = st.lists(st.integers(0, 1), min_size=key_length, max_size=key_length)
    return query_length, key_length, draw(st.lists(row, min_size=1, max_size=3))


@quick
@given(paddings(), st.booleans(), st.booleans())
def test_build_mask(case: tuple[int, int, list[list[int]]], padded: bool, causal: bool) -> None:
    """A query sees a key if the key is a token and, when causal, does not come after the query."""
    query_length, key_length, rows = case
    padding = torch.tensor(rows) if padded else None
    mask = build_mask(query_length, key_length, padding=padding, causal=causal)
    if not padded and not causal:
        assert mask is None
        return
    assert mask is not None
    assert mask.dtype == torch.bool
    assert mask.shape == (len(rows) if padded else 1, 1, query_length, key_length)
    for b, row in enumerate(rows if padded else [[1] * key_length]):
        for t in range(query_length):
            own_position = key_length - query_length + t
            seen = [bool(row[s]) and (s <= own_position or not causal) for s in range(key_length)]
            assert mask[b, 0, t].tolist() == seen


@quick
@given(paddings(), st.integers(1, 7))
def test_window_hides_earlier_keys(case: tuple[int, int, list[list[int]]], window: int) -> None:
    """A query sees its own key and the ``window - 1`` keys before it."""
    query_length, key_length, rows = case
    mask = build_mask(query_length, key_length, padding=torch.tensor(rows), causal=True, window=window)
    assert mask is not None
    for b, row in enumerate(rows):
        for t in range(query_length):
            own_position = key_length - query_length + t
            seen = [bool(row[s]) and own_position - window < s <= own_position for s in range(key_length)]
            assert mask[b, 0, t].tolist() == seen


@quick
@given(paddings(), st.booleans())
def test_positions_count_preceding_tokens(case: tuple[int, int, list[list[int]]], padded: bool) -> None:
    """The position of a token is the number of tokens before it, for the last T of S tokens."""
    query_length, key_length, rows = case
    positions = positions_of(query_length, key_length, padding=torch.tensor(rows) if padded else None)
    assert positions.shape == (len(rows) if padded else 1, query_length)
    for b, row in enumerate(rows if padded else [[1] * key_length]):
        for t, s in enumerate(range(key_length - query_length, key_length)):
            if row[s]:
                assert positions[b, t] == sum(row[:s])
            assert 0 <= positions[b, t] < key_length


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
        ([1, 1, 1, 0, 0], [0, 1, 2, 2, 2]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
    ids=["none", "full", "left", "right", "all"],
)
def test_positions_of(padding: list[int] | None, expected: list[int]) -> None:
    """Padding on either side, for a whole sequence and for the last tokens of a cached call."""
    rows = None if padding is None else torch.tensor([padding])
    assert positions_of(5, 5, padding=rows).tolist() == [expected]
    assert positions_of(2, 5, padding=rows).tolist() == [expected[3:]]


@pytest.mark.parametrize("length", [1, 6, 8])
@pytest.mark.parametrize("function", [partial(build_mask, causal=True), build_mask, positions_of])
def test_padding_of_another_length_is_rejected(function: Callable[..., Any], length: int) -> None:
    """A mask of only the new tokens would broadcast, or yield no positions."""
    with pytest.raises(ValueError, match=f"^the padding mask has length {length}, but there are 7 past and new"):
        function(1, 7, padding=torch.ones(2, length))


def test_positions_trace_without_a_guard_on_the_length() -> None:
    """Tracing keeps the lengths of the tokens and of their mask as separate dimensions."""

    class Positions(torch.nn.Module):
        def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return positions_of(ids.shape[1], ids.shape[1], padding=padding)

    lengths = {name: {1: torch.export.Dim.DYNAMIC} for name in ("ids", "padding")}
    program = torch.export.export(Positions(), (torch.ones(2, 7), torch.ones(2, 7)), dynamic_shapes=lengths)
    ids, padding = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    assert str(ids.shape[1]) != str(padding.shape[1])


@pytest.mark.parametrize("hidden_size", [2, 6, 64])
def test_sinusoids_equal_a_plain_loop(hidden_size: int) -> None:
    """Section 3.5, number by number; float32 is the float64 value rounded once."""
    positions = [0, 1, 2, 7, 100, 511, 4095]
    expected = np.empty((len(positions), hidden_size))
    for row, position in enumerate(positions):
        for i in range(hidden_size // 2):
            angle = position / 10000 ** (2 * i / hidden_size)
            expected[row, 2 * i], expected[row, 2 * i + 1] = math.sin(angle), math.cos(angle)
    table = sinusoids(torch.tensor(positions), hidden_size, torch.float64)
    assert_close(table, torch.from_numpy(expected), atol=1e-11, rtol=0)
    rounded = SinusoidalPositions(hidden_size)(torch.tensor([positions]), torch.float32)
    assert_close(rounded, torch.from_numpy(expected).float()[None], atol=6e-8, rtol=0)


@pytest.mark.parametrize(("positions", "hidden_size"), [(512, 512), (1024, 1024), (48, 6)])
def test_sinusoids_in_halves_equal_published_tables(positions: int, hidden_size: int) -> None:
    """Bit for bit: they are made with numpy and kept in float32, at any dtype of the model."""
    angles = np.arange(positions)[:, None] / np.power(10000, np.arange(0, hidden_size, 2) / hidden_size)
    expected = torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32))
    for dtype in (torch.float32, torch.float64):
        table = SinusoidalPositions(hidden_size, interleaved=False)(torch.arange(positions), dtype)
        assert table.equal(expected.to(dtype))


@quick
@given(st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([2, 8, 32]))
def test_sinusoids_rotate_with_position(position: int, shift: int, hidden_size: int) -> None:
    """PE(pos + k) = R_k PE(pos): each pair turns by k times its frequency, wherever it stands."""
    before, after = sinusoids(torch.tensor([position, position + shift]), hidden_size, torch.float64).numpy()
    rotation = np.zeros((hidden_size, hidden_size))
    for i in range(hidden_size // 2):
        angle = shift * 10000 ** (-2 * i / hidden_size)
        pair = slice(2 * i, 2 * i + 2)
        rotation[pair, pair] = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    np.testing.assert_allclose(rotation @ before, after, atol=1e-10, rtol=0)


def test_sinusoids_need_an_even_width() -> None:
    """An odd width would leave a sine without its cosine. The module has no weights."""
    with pytest.raises(ValueError, match="even hidden_size, got 7"):
        SinusoidalPositions(7)
    assert not SinusoidalPositions(8).state_dict()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "module"),
    [
        ("gelu", nn.GELU()),
        ("gelu_tanh", nn.GELU("tanh")),
        ("gelu_sigmoid", QuickGELUActivation()),
        ("relu", nn.ReLU()),
        ("relu_squared", ReLUSquaredActivation()),
        ("silu", nn.SiLU()),
    ],
)
def test_feed_forward_equals_sequential(activation: str, module: nn.Module, bias: bool) -> None:
    """The reference is dense, activation, dense."""
    ours = FeedForward(6, 10, activation=activation, bias=bias).double()
    theirs = nn.Sequential(nn.Linear(6, 10, bias=bias), module, nn.Linear(10, 6, bias=bias)).double()
    for mine, its in ((ours.up, theirs[0]), (ours.down, theirs[2])):
        its.load_state_dict(mine.state_dict())
    x = normal(2, 3, 6)
    assert_close(ours(x), theirs(x), atol=1e-14, rtol=0)


def test_gated_feed_forward_equals_llama() -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    torch.manual_seed(0)
    theirs = LlamaMLP(LlamaConfig(hidden_size=6, num_attention_heads=1, intermediate_size=10)).double()
    ours = GatedFeedForward(6, 10, activation="silu").double().eval()
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    ours.load_state_dict({f"{ours}.weight": theirs.get_parameter(f"{name}.weight") for ours, name in names.items()})
    x = normal(2, 3, 6)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (6, 10000.0), (64, 500000.0)])
def test_rotary_positions_equal_llama(head_dim: int, theta: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"rope_type": "default", "rope_theta": theta}
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, rope_parameters=parameters))
    positions = torch.tensor([[0, 1, 2, 5, 4095], [7, 0, 0, 1, 2]])
    query, key = normal(2, 3, 5, head_dim), normal(2, 1, 5, head_dim, seed=1)
    cosine, sine = theirs(query, positions)
    expected = apply_rotary_pos_emb(query, key, cosine, sine)
    rotation = RotaryPositions(head_dim, theta)(positions, torch.float64)
    assert torch.equal(apply_rotary(query, rotation), expected[0])
    assert torch.equal(apply_rotary(key, rotation), expected[1])


PUBLISHED = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("head_dim", "theta", "parameters"),
    [
        (64, 500000.0, {"rope_type": "llama3", **PUBLISHED}),
        (128, 500000.0, {"rope_type": "llama3", **PUBLISHED, "factor": 8.0}),
        (10, 30.0, {"rope_type": "llama3", **PUBLISHED, "factor": 3.0, "original_max_position_embeddings": 20}),
        (128, 10000.0, {"rope_type": "linear", "factor": 2.5}),
    ],
)
def test_scaled_rotary_positions_equal_llama(head_dim: int, theta: float, parameters: dict[str, Any]) -> None:
    """Equal to the last bit, because positions multiply any difference."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, rope_parameters={**parameters, "rope_theta": theta}))
    if parameters["rope_type"] == "linear":
        scale = partial(interpolate_frequencies, factor=parameters["factor"])
    else:
        scale = partial(
            llama3_rope_scaling,
            factor=parameters["factor"],
            low=parameters["low_freq_factor"],
            high=parameters["high_freq_factor"],
            original_length=parameters["original_max_position_embeddings"],
        )
    ours = RotaryPositions(head_dim, theta, scale=scale)
    assert ours.frequencies == tuple(theirs.inv_freq.tolist())
    assert ours.frequencies != RotaryPositions(head_dim, theta).frequencies
    positions, x = torch.tensor([[0, 1, 2, 131071]]), normal(1, 1, 4, head_dim)
    for mine, its in zip(ours(positions, torch.float64), theirs(x, positions), strict=True):
        assert torch.equal(mine[:, 0], its)


@quick
@given(st.floats(1, 64), st.floats(0.5, 2), st.floats(2.5, 8), st.integers(16, 10000))
def test_only_low_frequencies_are_interpolated(factor: float, low: float, high: float, length: int) -> None:
    """Low frequencies are divided by the factor, high ones unchanged, and the others in between."""
    frequencies = torch.logspace(1, -7, 50)
    scaled = llama3_rope_scaling(frequencies, factor=factor, low=low, high=high, original_length=length)
    turns = length * frequencies / (2 * math.pi)
    seldom, often = turns < 0.999 * low, turns > 1.001 * high
    assert_close(scaled[seldom], frequencies[seldom] / factor, rtol=1e-6, atol=0)
    assert_close(scaled[often], frequencies[often], rtol=1e-6, atol=0)
    assert (scaled <= frequencies * (1 + 1e-6)).all()
    assert (scaled >= frequencies / factor * (1 - 1e-6)).all()


def test_frequencies_exist_on_the_meta_device() -> None:
    """Frequencies are constants, not weights, and so exist on the meta device, too."""
    with torch.device("meta"):
        made = RotaryPositions(64, 500000.0)
    assert made.frequencies == RotaryPositions(64, 500000.0).frequencies
    assert not list(made.state_dict())


@quick
@given(st.integers(0, 500), st.integers(0, 500), st.integers(-200, 200))
def test_rotated_products_depend_only_on_distance(first: int, second: int, shift: int) -> None:
    shift = max(shift, -first, -second)
    rotary, query, key = RotaryPositions(8), normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def product(m: int, n: int) -> Tensor:
        turned = [apply_rotary(x, rotary(torch.tensor([[at]]), torch.float64)) for x, at in ((query, m), (key, n))]
        return (turned[0] * turned[1]).sum()

    assert_close(product(first, second), product(first + shift, second + shift), rtol=0, atol=1e-3)
    assert_close(product(first, first), (query * key).sum(), rtol=0, atol=1e-5)


def test_part_of_a_head_is_rotated() -> None:
    """The rest is unchanged; transformers' Phi-3 does the same."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    positions, query = torch.arange(5)[None], normal(2, 3, 5, 10)
    rotation = RotaryPositions(4)(positions, torch.float64)
    expected, _ = apply_rotary_pos_emb(query, query, *(part[:, 0] for part in rotation))
    assert torch.equal(apply_rotary(query, rotation), expected)


def test_rotary_positions_need_an_even_head() -> None:
    with pytest.raises(ValueError, match="even head_dim, got 5"):
        RotaryPositions(5)


def test_feed_forward_drops_after_the_activation_in_training_only() -> None:
    """With identity matrices, outputs are 0 or f(1) / (1 - p), not f(1 / (1 - p))."""
    layer = FeedForward(50, 50, activation="silu", bias=False, dropout=0.75).double().requires_grad_(False)
    for part in (layer.up, layer.down):
        part.weight.copy_(torch.eye(50))
    x, silu_of_1 = torch.ones(2, 3, 50, dtype=torch.float64), 1 / (1 + math.exp(-1))
    torch.manual_seed(0)
    assert layer(x).unique().tolist() == pytest.approx([0, 4 * silu_of_1], abs=1e-12)
    assert layer.eval()(x).unique().tolist() == pytest.approx([silu_of_1], abs=1e-12)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("norm_first", [True, False])
def test_residual(norm_first: bool, eps: float) -> None:
    """LN(x + f(x)) or x + f(LN(x)), where LN uses the biased variance and eps inside the root."""
    layer, x = Residual(6, eps=eps, norm_first=norm_first).double(), normal(2, 3, 6)
    for seed, parameter in enumerate(layer.norm.parameters()):
        parameter.data = normal(6, seed=seed + 1)
    scale, shift = (parameter.detach().numpy() for parameter in (layer.norm.weight, layer.norm.bias))

    def layer_norm(y: np.ndarray) -> np.ndarray:
        centred = y - y.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + shift

    y = x.numpy()
    expected = y + layer_norm(y) ** 3 if norm_first else layer_norm(y + y**3)
    assert_close(layer(x, lambda z: z**3), torch.from_numpy(expected), atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm_first", [True, False])
def test_residual_drops_the_branch_only(norm_first: bool) -> None:
    """Dropout applies to f, not to x, and only in training."""
    layer = Residual(50, eps=1e-5, norm_first=norm_first, dropout=0.5).double()
    layer.norm = nn.Identity()
    x = torch.ones(2, 3, 50, dtype=torch.float64)
    torch.manual_seed(0)
    assert layer(x, lambda y: 3 * y).unique().tolist() == [1, 7]
    assert layer.eval()(x, lambda y: 3 * y).unique().tolist() == [4]


@quick
@given(paddings())
def test_pool(case: tuple[int, int, list[list[int]]]) -> None:
    """The first or last token, or a mean or maximum over tokens that are not padding, 0 if there are none."""
    _, length, rows = case
    x, padding = normal(len(rows), length, 4), torch.tensor(rows)
    expected = {how: torch.zeros(len(rows), 4, dtype=torch.float64) for how in get_args(Pooling)}
    expected["cls"], expected["last"] = x[:, 0], x[:, 0].clone()
    for b, row in enumerate(rows):
        places = [t for t in range(length) if row[t]]
        if not places:
            continue
        tokens, ranks = [x[b, t] for t in places], [t + 1 for t in places]
        expected["mean"][b] = sum(tokens) / len(tokens)
        expected["mean_sqrt_len"][b] = sum(tokens) / len(tokens) ** 0.5
        expected["weighted_mean"][b] = sum(n * token for n, token in zip(ranks, tokens, strict=True)) / sum(ranks)
        expected["max"][b] = torch.stack(tokens).max(0).values
        expected["last"][b] = tokens[-1]
    for how, wanted in expected.items():
        assert_close(pool(x, padding, how), wanted, atol=1e-14, rtol=0)
        assert_close(pool(x, None, how), pool(x, torch.ones(len(rows), length), how), atol=1e-14, rtol=0)
    assert_close(pool(x, None, "mean"), sum(x[:, t] for t in range(length)) / length, atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_normalize(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]], dtype=dtype)
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]], dtype=dtype)
    assert_close(normalize(x), expected, atol=float(torch.finfo(dtype).eps), rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_tied_linear_shares_the_parameter(bias: bool) -> None:
    """The matrix is counted once, gets gradients from both layers, and stays shared when the dtype changes."""
    embedding = nn.Embedding(7, 3)
    model = nn.Sequential(embedding, tied_linear(embedding, bias=bias)).double()
    assert model[1].weight is model[0].weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 7 * 3 + (7 if bias else 0)
    ids, weight = torch.tensor([[2, 5]]), embedding.weight.detach().clone()
    assert_close(model(ids), weight[[2, 5]] @ weight.T + torch.zeros(1, 2, 7), atol=1e-14, rtol=0)
    model(ids).square().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.ne(0).any(-1).all(), "rows that were not looked up get gradients from the head"
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


class Parts(nn.Module):
    """One layer of each kind, with a tied or untied head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 200)
        self.wide = nn.Linear(200, 600)
        self.norm = nn.LayerNorm(200)
        self.head = tied_linear(self.embedding, bias=True) if tied else nn.Linear(200, 400)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 3.0)


# The standard error of the standard deviation of 80,000 numbers is 1 / sqrt(160,000) = 0.25 %; 2 % is eight times that.
CLOSE = 0.02


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("name", "spread"),
    # Truncation at two standard deviations scales the standard deviation by sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)).
    [("normal", 1.0), ("truncated_normal", 0.8796)],
)
def test_normal_initialisers(name: Initializer, spread: float, tied: bool) -> None:
    """Mean, standard deviation and tails of the weights; biases are 0, and norms are unchanged."""
    torch.manual_seed(0)
    parts = Parts(tied)
    initialize(parts, name, std=0.02)
    for weight in (parts.embedding.weight, parts.wide.weight, parts.head.weight):
        assert abs(weight.mean()) < 0.02 * 0.02
        assert weight.std().item() == pytest.approx(0.02 * spread, rel=CLOSE)
        beyond = weight.abs().gt(0.04).double().mean().item()
        assert beyond == (pytest.approx(0.0455, rel=0.1) if name == "normal" else 0)
    assert not parts.wide.bias.any()
    assert not parts.head.bias.any()
    assert parts.norm.weight.eq(3).all()


def scales(name: str, inputs: int, outputs: int) -> float:
    """The standard deviation of the weights of a dense layer, from the papers."""
    return math.sqrt(2 / (inputs + outputs)) if name.startswith("xavier") else math.sqrt(1 / inputs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["xavier_uniform", "xavier_normal", "lecun_uniform", "lecun_normal"])
def test_scaled_initialisers(name: Initializer, tied: bool) -> None:
    """Variance 2 / (in + out) or 1 / in for dense layers; embeddings and tied heads are N(0, 1 / E)."""
    torch.manual_seed(0)
    parts = Parts(tied)
    initialize(parts, name)
    for layer in (parts.wide, *([] if tied else [parts.head])):
        wanted = scales(name, layer.in_features, layer.out_features)
        weight = layer.weight
        assert weight.std().item() == pytest.approx(wanted, rel=CLOSE)
        if name.endswith("uniform"):
            assert weight.abs().max().item() == pytest.approx(math.sqrt(3) * wanted, rel=1e-3)
        else:
            assert weight.abs().gt(2 * wanted).double().mean().item() == pytest.approx(0.0455, rel=0.1)
    assert parts.embedding.weight.std().item() == pytest.approx(200**-0.5, rel=CLOSE)
    assert parts.embedding.weight.abs().max() > 3 * 200**-0.5
    assert not parts.wide.bias.any()
    assert not parts.head.bias.any()
    assert parts.norm.weight.eq(3).all()


@pytest.mark.parametrize("model", ["gpt-tiny", "bert-tiny", "transformer-tiny"])
@pytest.mark.parametrize("name", get_args(Initializer))
def test_models_are_initialised_by_name(model: str, name: Initializer) -> None:
    """A query projection, square of width 64, has the deviation of the named distribution."""
    weights = [
        tensor
        for tensor_name, tensor in zoo.create_model(model, initializer=name).state_dict().items()
        if tensor_name.endswith("attention.query.weight")
    ]
    wanted = {"normal": 0.02, "truncated_normal": 0.02 * 0.8796}.get(name, 1 / 8)
    assert torch.cat(weights).std().item() == pytest.approx(wanted, rel=0.03)


def test_empty_cache() -> None:
    """An empty cache has layers, length 0, and no keys and values."""
    cache = Cache.empty(3)
    assert len(cache) == 3
    assert cache.length == 0
    assert len({id(cache[layer]) for layer in range(3)}) == 3
    with pytest.raises(ValueError, match="empty"):
        list(cache.pairs())
    assert Cache(()).length == 0


def test_cache_appends_along_time() -> None:
    """Each layer appends in the order of the calls; values may be wider than keys."""
    cache, pieces = (
        Cache.empty(2),
        [(normal(2, 3, n, 4, seed=n), normal(2, 3, n, 5, seed=n + 9)) for n in (2, 1, 3)],
    )
    for key, value in pieces:
        for layer in range(2):
            keys, values = cache[layer].extend(key + layer, value - layer)
    assert cache.length == 6
    for layer, (key, value) in enumerate(cache.pairs()):
        assert_close(key, torch.cat([piece[0] for piece in pieces], dim=2) + layer, atol=0, rtol=0)
        assert_close(value, torch.cat([piece[1] for piece in pieces], dim=2) - layer, atol=0, rtol=0)
    assert keys is cache[1].key
    assert values is cache[1].value


def test_cache_from_pairs() -> None:
    """A cache made from tensors returns the same tensors, and a single layer works by itself."""
    pairs = [(normal(1, 2, 3, 4, seed=n), normal(1, 2, 3, 4, seed=n + 5)) for n in range(2)]
    cache = Cache(pairs)
    assert (len(cache), cache.length) == (2, 3)
    for (key, value), (kept_key, kept_value) in zip(pairs, cache.pairs(), strict=True):
        assert key is kept_key
        assert value is kept_value
    layer = LayerCache(*pairs[0])
    assert layer.extend(*pairs[1])[0].shape == (1, 2, 6, 4)


@pytest.mark.parametrize(("heads", "size"), [(1, 16), (4, 8)])
def test_keys_that_do_not_fit_the_past_are_refused_by_name(heads: int, size: int) -> None:
    past = torch.zeros(2, 4, 3, 16)
    new = torch.zeros(2, heads, 1, size)
    with pytest.raises(
        ValueError, match=rf"past has 4 heads of size 16, new keys and values have {heads} of size {size}"
    ):
        LayerCache(past, past).extend(new, new)
