"""All-attention against the paper's equations in scalar loops, and properties of persistent memory."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.architectures.span_reference import layer_norm, span_attention
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.nn import SpanAttention, build_mask, distances_of
from zoo.registry import registry
from zoo_plugins.all_attention.config import AllAttentionConfig
from zoo_plugins.all_attention.model import AllAttention

SIZES = {
    "vocab_size": 31,
    "max_seq_len": 32,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 3,
    "num_memories": 5,
    "span": 7,
    "norm_eps": 1e-4,
}


def make(**options: object) -> AllAttention:
    """Build a small float64 model in evaluation mode with random weights."""
    model = AllAttention(AllAttentionConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.requires_grad_(False)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


def reference(model: AllAttention, ids: list[int], padding: list[int]) -> np.ndarray:
    """Compute the logits of one row."""
    c = model.config
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    x = weights["token_embedding.weight"][ids]
    for layer in range(c.num_layers):
        prefix = f"blocks.{layer}."
        w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        attention = {name.removeprefix("attention."): value for name, value in w.items()}
        table = weights["distance_embedding.weight"]
        x = x + span_attention(x, attention, table, padding, c.num_heads, c.span_ramp)
        x = layer_norm(x, w, "residual", c.norm_eps)
    return x @ weights["head.weight"].T


@pytest.mark.parametrize("padding", [[1] * 12, [0] * 3 + [1] * 9, [1] * 8 + [0] * 4])
@pytest.mark.parametrize("options", [{}, {"num_memories": 0}, {"span_ramp": 3}])
def test_equals_the_papers_equations(padding: list[int], options: dict[str, object]) -> None:
    """With and without memory, with a fixed span and with learned spans, initially 0."""
    model, ids = make(**options), tokens(2, 12)
    actual = model(ids, torch.tensor([padding, [1] * 12]))
    for row, mask in enumerate((padding, [1] * 12)):
        expected = torch.from_numpy(reference(model, ids[row].tolist(), mask))
        counted = torch.tensor(mask).bool()
        assert_close(actual[row][counted], expected[counted], atol=1e-11, rtol=0)


def attention_and_input(num_memories: int, span: int = 9) -> tuple[SpanAttention, Tensor, Tensor]:
    """Build a random float64 attention of width 12, a text, and zero distance embeddings."""
    torch.manual_seed(4)
    attention = SpanAttention(12, 3, span=span, num_memories=num_memories).double().requires_grad_(False)
    return attention, torch.randn(2, 9, 12, dtype=torch.float64), torch.zeros(span, 4, dtype=torch.float64)


def test_without_memory_equals_plain_attention() -> None:
    """Equals torch's attention if distance embeddings are 0."""
    attention, x, positions = attention_and_input(0)
    theirs = nn.MultiheadAttention(12, 3, bias=False, batch_first=True, dtype=torch.float64)
    parts = (attention.query.weight, attention.key.weight, attention.value.weight)
    theirs.load_state_dict({"in_proj_weight": torch.cat(parts), "out_proj.weight": attention.output.weight})
    mask = build_mask(9, 9, causal=True)
    actual = attention(x, positions, distances_of(9, 9), mask=mask)
    assert_close(actual, theirs(x, x, x, attn_mask=~mask[0, 0])[0], atol=1e-12, rtol=0)


def test_equals_x_transformers() -> None:
    """x-transformers also places its memory before the tokens' keys."""
    theirs = pytest.importorskip("x_transformers.x_transformers").Attention(
        12, heads=3, dim_head=4, causal=True, num_mem_kv=5, flash=False
    )
    attention, x, positions = attention_and_input(5)
    theirs = theirs.double()
    theirs.attend.attn_fn = partial(torch.softmax, dim=-1)  # its default rounds to float32
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out": "output"}
    state = {f"{its}.weight": getattr(attention, ours).weight for its, ours in names.items()}
    theirs.load_state_dict({**state, "mem_k": attention.memory_key, "mem_v": attention.memory_value})
    actual = attention(x, positions, distances_of(9, 9), mask=build_mask(9, 9, causal=True))
    assert_close(actual, theirs(x), atol=1e-12, rtol=0)


def test_memory_is_visible_to_all_queries() -> None:
    """From the first token, beyond the span, and in rows of padding only, which see only the memory."""
    attention, x, positions = attention_and_input(5, span=2)
    padding = torch.tensor([[1] * 9, [0] * 9])
    mask, distances = build_mask(9, 9, padding=padding, causal=True), distances_of(9, 9, padding=padding)
    weights = attention.weights(x, positions, distances, mask=mask)
    assert weights.shape == (2, 3, 9, 5 + 9)
    assert (weights[..., :5] > 0).all()
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-12, rtol=0)
    assert (weights[1, ..., 5:] == 0).all()
    query = (x[1] @ attention.query.weight.T).unflatten(-1, (3, 4)).transpose(0, 1)
    alone = torch.softmax(query @ attention.memory_key.transpose(1, 2) / 2, dim=-1) @ attention.memory_value
    expected = alone.transpose(0, 1).flatten(1) @ attention.output.weight.T
    assert_close(attention(x, positions, distances, mask=mask)[1], expected, atol=1e-12, rtol=0)


def test_blocks_have_no_feed_forward_network() -> None:
    """A block has four projections, the memory and a norm: 4 E^2 + 2 N E + 2 E parameters."""
    c = AllAttentionConfig(**SIZES)
    blocks = AllAttention(c).blocks
    assert {name.split(".", 1)[1].rsplit(".", 1)[0] for name, _ in blocks.named_parameters()} == {
        "attention", "attention.query", "attention.key", "attention.value", "attention.output", "residual.norm",
    }  # fmt: skip
    assert sum(p.numel() for p in blocks[0].parameters()) == 4 * 12**2 + 2 * 5 * 12 + 2 * 12


@pytest.mark.parametrize(
    ("name", "layers", "memories", "millions"),
    [("all-attention-18l", 18, 1024, 39), ("all-attention-36l", 36, 2048, 114)],
)
def test_published_sizes(name: str, layers: int, memories: int, millions: int) -> None:
    """39 and 114 million in table 1 of the paper."""
    block = 4 * 512**2 + 2 * memories * 512 + 2 * 512 + 8
    parameters = parameter_count(registry().resolve(name))
    assert parameters == 2 * 205 * 512 + 8192 * 64 + layers * block
    assert round(parameters / 1e6) == millions


def test_initial_memory_has_the_variance_of_keys() -> None:
    """The memory has variance 1, like keys and values of normalised tokens."""
    torch.manual_seed(0)
    attention = AllAttention(AllAttentionConfig(hidden_size=128, num_layers=1, span=4)).blocks[0].attention
    x = nn.functional.layer_norm(torch.randn(500, 128), (128,))
    for layer, memory in ((attention.key, attention.memory_key), (attention.value, attention.memory_value)):
        assert memory.var().item() == pytest.approx(1, rel=0.05)
        assert layer(x).var().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_memories=-1", "num_memories must not be negative, got -1"),
        ("span=0", "span must be positive, got 0"),
        ("span_ramp=-3", "span_ramp must be positive, got -3"),
        ("intermediate_size=4", "unknown key 'intermediate_size'"),
    ],
)
def test_invalid_sizes_are_rejected(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry().resolve("all-attention-tiny", [setting])
