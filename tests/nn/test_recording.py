"""Recorded attention weights reproduce the output, and recording does not change anything else."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.contract import Graph, attentions, floats
from zoo.nn import (
    LocalAttention,
    LongformerAttention,
    LSHAttention,
    MultiHeadAttention,
    PerformerAttention,
    call_graph,
    cropped_attentions,
    recorded_attentions,
    recorded_scores,
    scaled_dot_product_attention,
    unrecorded_attentions,
)

HIDDEN, HEADS, CHUNK = 12, 3, 4
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "longformer": lambda: LongformerAttention(HIDDEN, HEADS, 4),
    "performer": lambda: PerformerAttention(HIDDEN, HEADS, 7),
    "local": lambda: LocalAttention(HIDDEN, HEADS, head_dim=5, chunk_length=CHUNK),
    "hashes": lambda: LSHAttention(
        HIDDEN, HEADS, head_dim=5, chunk_length=CHUNK, num_hashes=3, num_buckets=(4,), wrap=True
    ),
}


def ending_earlier(rows: int, length: int) -> Tensor:
    """Build a mask with fewer tokens from row to row."""
    ends = torch.linspace(length, 1, rows).round().long()
    return torch.arange(length) < ends.unsqueeze(1)


def split(part: nn.Module, x: Tensor) -> Tensor:
    """Split a projection into heads, (B, H, T, D)."""
    return part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("name", LAYERS)
@given(chunks=st.integers(1, 3), rows=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_weights_times_values_equal_the_output(name: str, chunks: int, rows: int, seed: int) -> None:
    """Also for attention that never computes weights (chunks, features, hashes). Padding has weight 0."""
    torch.manual_seed(seed)
    length = chunks * CHUNK
    layer, x = LAYERS[name]().double(), torch.randn(rows, length, HIDDEN, dtype=torch.float64)
    mask = ending_earlier(rows, length)
    options = {"mask": mask} if name in ("longformer", "performer") else {"tokens": mask}
    with recorded_attentions() as weights:
        output = layer(x, **options)
    assert_close(output, layer(x, **options), atol=1e-12, rtol=0)
    assert [tuple(item.shape) for item in weights] == [(rows, HEADS, length, length)]
    made = layer.output((weights[0] @ split(layer.value, x)).transpose(1, 2).flatten(2))
    assert_close(made[mask], output[mask], atol=1e-12, rtol=0)
    assert not (weights[0] * (mask[:, None, :, None] & ~mask[:, None, None, :])).any()


def test_weights_of_global_tokens_use_their_own_projections() -> None:
    torch.manual_seed(0)
    layer = LongformerAttention(HIDDEN, HEADS, 4, global_tokens=2).double()
    x = torch.randn(2, 11, HIDDEN, dtype=torch.float64)
    with recorded_attentions() as weights:
        output = layer(x)
    query, key, value = (split(part, x) for part in (layer.global_query, layer.global_key, layer.global_value))
    seen = torch.softmax(query[:, :, :2] @ key.transpose(-2, -1) * query.shape[-1] ** -0.5, -1)
    assert_close(weights[0][:, :, :2], seen, atol=1e-12, rtol=0)
    parts = torch.cat((seen @ value, weights[0][:, :, 2:] @ split(layer.value, x)), 2)
    assert_close(layer.output(parts.transpose(1, 2).flatten(2)), output, atol=1e-12, rtol=0)
    places = torch.arange(11)
    near = (places - places.unsqueeze(1)).abs() <= 2
    near[:, :2] = near[:2] = True
    assert ((weights[0] > 0) == near).all()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_keys_hidden_by_a_bias_have_zero_weight(num_kv_heads: int) -> None:
    """If all keys of a query are hidden, its weights and output are 0, as without recording."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, num_kv_heads, 6, 3, generator=generator, dtype=torch.float64)
    bias = torch.randn(1, 4, 5, 6, generator=generator, dtype=torch.float64)
    bias[0, :, 1, 2:] = bias[0, :, 3] = -torch.inf
    plain = scaled_dot_product_attention(query, key, value, bias=bias)
    with recorded_attentions() as weights:
        assert_close(scaled_dot_product_attention(query, key, value, bias=bias), plain, atol=1e-14, rtol=0)
    sums = weights[0].sum(-1)
    assert_close(sums[:, :, [0, 1, 2, 4]], torch.ones(2, 4, 4, dtype=torch.float64))
    assert not sums[:, :, 3].any()
    assert not weights[0][:, :, 1, 2:].any()


def test_only_active_recordings_collect() -> None:
    """Nothing is recorded after the block, in unrecorded blocks or in other threads; inner blocks have own records."""
    layer, x = MultiHeadAttention(HIDDEN, HEADS), torch.randn(1, 5, HIDDEN)
    with recorded_attentions() as outer:
        layer(x)
        with recorded_attentions() as inner:
            layer(x)
        with unrecorded_attentions():
            layer(x)
        with cropped_attentions(2):
            layer(x)
        thread = threading.Thread(target=layer, args=(x,))
        thread.start()
        thread.join()
    layer(x)
    assert [tuple(item.shape[2:]) for item in outer] == [(5, 5), (2, 2)]
    assert len(inner) == 1


def test_error_ends_the_recording() -> None:
    layer, x = MultiHeadAttention(HIDDEN, HEADS), torch.randn(1, 5, HIDDEN)
    with pytest.raises(ZeroDivisionError), recorded_attentions() as weights:
        raise ZeroDivisionError
    layer(x)
    assert weights == []


def test_recorded_weights_have_gradients() -> None:
    """They can be used in a loss or for attribution."""
    layer, x = MultiHeadAttention(HIDDEN, HEADS), torch.randn(1, 5, HIDDEN)
    with recorded_attentions() as weights:
        layer(x)
    weights[0][..., 0].sum().backward()
    assert layer.query.weight.grad.abs().max() > 0


def test_recording_check_does_not_break_compiled_graphs() -> None:
    """The test for an active recording does not break the graph: it is False while compiling."""
    layer, x = MultiHeadAttention(HIDDEN, HEADS).eval(), torch.randn(1, 5, HIDDEN)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close(compiled(x), layer(x))
    with recorded_attentions() as weights:
        compiled(x)
    assert weights == []


class Twice(nn.Module):
    """A model that calls one attention twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(HIDDEN, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.attention(x))


class Stacks(nn.Module):
    """Attention inside lists of blocks, before and after an unnamed call of a method."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Twice() for _ in range(2))
        self.cross_attention = MultiHeadAttention(HIDDEN, HEADS)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        states = self.encode(x)
        return self.cross_attention(x, memory=self.cross_attention.keys_values(states))


def test_recorded_weights_have_the_paths_of_their_modules() -> None:
    """A module that is called again has a number after its path. Hooks are removed in the end."""
    model, x = Stacks(), torch.randn(1, 5, HIDDEN)
    first, second = "encoder.0.attention", "encoder.1.attention"
    names = [first, f"{first}#2", second, f"{second}#2", "cross_attention"]
    with recorded_attentions(model) as weights:
        model(x)
    with recorded_attentions() as plain:
        model(x)
    assert weights.names == names
    assert plain.names == [f"attentions.{place}" for place in range(5)]
    assert list(weights.by_name()) == names
    for place, (name, item) in enumerate(zip(names, plain, strict=True)):
        assert weights[name] is weights[place]
        assert torch.equal(weights[name], item)
    with pytest.raises(KeyError, match="'decoder' was not recorded, but"):
        weights["decoder"]
    with recorded_scores(model) as scores:
        model.encode(x)  # a method runs no hook of the model, but those of its blocks
    assert scores.names == names[:4]
    with recorded_attentions(model.cross_attention) as alone, cropped_attentions(2):
        model.cross_attention(x)
        model.cross_attention(x)
    assert alone.names == ["MultiHeadAttention", "MultiHeadAttention#2"]
    assert alone["MultiHeadAttention#2"].shape[2:] == (2, 2)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_paths_after_a_module_that_failed_and_in_other_threads() -> None:
    model, x = nn.ModuleDict({"fails": Fails(), "attention": MultiHeadAttention(HIDDEN, HEADS)}), torch.randn(1, 5, 12)
    with recorded_attentions(model) as weights:
        with pytest.raises(ZeroDivisionError):
            model["fails"](x)
        scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
        thread = threading.Thread(target=model["attention"], args=(x,))
        thread.start()
        thread.join()
        model["attention"].with_weights(x)  # a recording of its own
        model["attention"](x)
    assert weights.names == ["attentions.0", "attention"]


def attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class Calls(nn.Module):
    """Calls what it is given, then its own attention in two ways, and computes attention itself."""

    def __init__(self, *others: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block = Twice()
        self.others = others  # a tuple is no submodule

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(x)
        x = self.block.attention(x)
        return attend(self.block.attention.forward(x))


def test_attention_outside_the_module_has_a_neutral_name() -> None:
    """Be it computed before or after a call, or by another module that is called during one."""
    encoder, other, x = MultiHeadAttention(HIDDEN, HEADS), Twice(), torch.randn(1, 5, HIDDEN)
    model = Calls(other, lambda x: other.attention.forward(x))
    model.others += (copy.deepcopy(model.block),)
    with recorded_attentions(model) as weights:
        model(encoder(x))
        attend(x)
        model.block.attention.forward(x)
        other(x)
        copied = copy.deepcopy(model.block)
        copied(x)
        model.block(x)
    called = [None, None, None, "Calls", None, None, "block.attention", "Calls#2", "Calls#3"]
    after = [*[None] * 6, "block.attention#2", "block.attention#3"]
    assert weights.names == [name or f"attentions.{place}" for place, name in enumerate(called + after)]
    assert not copied.attention._forward_hooks
    assert not copied.attention._forward_pre_hooks


def test_names_of_modules_that_are_added_or_replaced() -> None:
    """The names are the paths that the modules have when they are called."""
    model, x = Stacks(), torch.randn(1, 5, HIDDEN)
    with recorded_attentions(model) as weights:
        replaced, model.encoder[0] = model.encoder[0], MultiHeadAttention(HIDDEN, HEADS)
        model.encoder.append(MultiHeadAttention(HIDDEN, HEADS))
        model(x)
        replaced(x)
    second = "encoder.1.attention"
    names = ["encoder.0", second, f"{second}#2", "encoder.2", "cross_attention", "attentions.5", "attentions.6"]
    assert weights.names == names


def test_names_after_an_interrupted_call_and_of_cropped_weights() -> None:
    def interrupt(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    attention, x = MultiHeadAttention(HIDDEN, HEADS), torch.randn(1, 5, HIDDEN)
    stopped = Calls(interrupt)
    model = nn.Sequential(stopped, nn.ModuleDict({"inner#2": Twice()}))
    with recorded_attentions(model) as weights:
        with pytest.raises(KeyboardInterrupt):
            stopped(x)
        stopped.others = ()
        stopped(x)
        attention(x)
        with cropped_attentions(2):
            attention(x)
            model[1]["inner#2"](x)
    names = ["0.block.attention", "0", "0#2", "attentions.3", "attentions.4"]
    assert weights.names == [*names, "1.inner#2.attention", "1.inner#2.attention#2"]
    assert [item.shape[2] for item in weights] == [5] * 4 + [2] * 3
    assert weights.by_name().keys() == set(weights.names)


@pytest.mark.parametrize("declared", [1, 3])
def test_graph_must_declare_all_recorded_weights(declared: int) -> None:
    x = floats("x", "batch", "sequence", HIDDEN)
    graph = Graph(inputs=(x,), outputs=(floats("y", *x.dims),), attentions=attentions(declared, HEADS))
    feeds = {"x": torch.randn(2, 5, HIDDEN)}
    assert call_graph(Twice(), graph, feeds).keys() == {"y"}
    with pytest.raises(ValueError, match=f"graph 'model' declares {declared} attention outputs but computes 2"):
        call_graph(Twice(), graph.with_attentions(), feeds)
    found = call_graph(
        Twice(), Graph(inputs=(x,), outputs=graph.outputs, attentions=attentions(2, HEADS)).with_attentions(), feeds
    )
    assert list(found) == ["y", "attentions.0", "attentions.1"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_scores_give_the_weights(masked: bool, biased: bool, softcap: float | None) -> None:
    """Written out for single numbers; a bias of -inf hides a key, as a mask does."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 5).double(), torch.randn(2, 2, 6, 5).double()
    mask = torch.rand(2, 1, 3, 6) < 0.7 if masked else None
    bias = torch.randn(1, 4, 3, 6).double() if biased else None
    if mask is not None:
        mask[0, 0, 1] = False
    if bias is not None:
        bias[0, 1, 2, 3] = -math.inf
    with recorded_scores() as recorded:
        scaled_dot_product_attention(query, key, key, mask=mask, bias=bias, scale=0.3, softcap=softcap)
    (found,) = recorded
    assert found.query is not None and found.key is not None
    assert (found.bias is None, found.seen is None) == (not biased, not (masked or biased))
    assert all(part is None or part.isfinite().all() for part in (found.query, found.key, found.bias))
    for row, head, t in itertools.product(range(2), range(4), range(3)):
        shares = []
        for s in range(6):
            score = found.scale * sum((found.query[row, head, t] * found.key[row, head // 2, s]).tolist())
            score = score if softcap is None else softcap * math.tanh(score / softcap)
            if found.bias is not None:
                score += found.bias[row, head, t, s].item()
            at = 0 if found.seen is None or found.seen.shape[1] == 1 else head
            shares.append(math.exp(score) if found.seen is None or found.seen[row, at, t, s] else 0.0)
        wanted = torch.tensor(shares, dtype=torch.float64) / (sum(shares) or 1)
        assert_close(found.weights[row, head, t], wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_attention_of_another_kind_has_weights_alone(name: str) -> None:
    layer, x = LAYERS[name](), torch.randn(1, 2 * CHUNK, HIDDEN)
    options = {} if name in ("longformer", "performer") else {"tokens": torch.ones(1, 2 * CHUNK, dtype=torch.bool)}
    with recorded_scores() as found, recorded_attentions() as inner:
        layer(x, **options)
    assert (len(inner), len(found)) == (1, 0)  # a recording inside another has its own list
    with recorded_scores() as found:
        layer(x, **options)
    assert [(item.query, item.weights.shape) for item in found] == [(None, inner[0].shape)]


def test_cropped_scores() -> None:
    attention = MultiHeadAttention(HIDDEN, HEADS)
    x, mask = torch.randn(2, 6, HIDDEN), torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with recorded_scores() as whole:
        attention(x, mask=mask)
    with recorded_scores() as found, cropped_attentions(4):
        attention(x, mask=mask)
    (item,) = found
    for part, shape in (("weights", (2, HEADS, 4, 4)), ("seen", (2, 1, 4, 4)), ("query", (2, HEADS, 4, 4))):
        short = getattr(item, part)
        assert short.shape == shape
        assert_close(short, getattr(whole[0], part)[tuple(map(slice, shape))])
    assert item.bias is None
