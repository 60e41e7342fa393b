"""Product-key memory against an exhaustive search, its decoder against transformers' XLM, and its invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import XLMConfig, XLMWithLMHeadModel

from zoo.checkpoints import Exact
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.nn import ProductKeyMemory
from zoo.registry import registry
from zoo_plugins.product_key_memory.config import ProductKeyMemoryConfig
from zoo_plugins.product_key_memory.model import ProductKeyMemoryDecoder

SIZES = {
    "vocab_size": 31,
    "max_seq_len": 16,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 3,
    "intermediate_size": 10,
    "memory_keys": 5,
    "memory_top_k": 3,
    "memory_heads": 2,
    "memory_query_size": 6,
    "norm_eps": 1e-4,
}


def make(**options: object) -> ProductKeyMemoryDecoder:
    """Build a small float64 model in evaluation mode with random weights."""
    model = ProductKeyMemoryDecoder(ProductKeyMemoryConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.requires_grad_(False)


def make_memory(num_keys: int, top_k: int, num_heads: int = 2, seed: int = 0) -> ProductKeyMemory:
    """Build a random float64 memory of width 7 in evaluation mode, with random running statistics."""
    torch.manual_seed(seed)
    memory = ProductKeyMemory(7, num_keys=num_keys, top_k=top_k, num_heads=num_heads, query_size=6).double().eval()
    for parameter in memory.parameters():
        nn.init.normal_(parameter)
    memory.query_norm.running_mean.normal_()
    memory.query_norm.running_var.uniform_(0.5, 2)
    return memory.requires_grad_(False)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


def exhaustive(memory: ProductKeyMemory, x: Tensor) -> tuple[Tensor, Tensor]:
    """Find slots and output by building every key [c_i ; c'_j] and scoring all n^2 of them."""
    norm, n = memory.query_norm, memory.num_keys
    query = memory.query(x.flatten(0, 1))
    query = (query - norm.running_mean) / torch.sqrt(norm.running_var + norm.eps) * norm.weight + norm.bias
    heads = query.chunk(memory.num_heads, dim=-1)
    slots, read = [], torch.zeros(len(query), x.shape[-1], dtype=x.dtype)
    for head, part in enumerate(heads):
        first, second = memory.keys[:, head]
        keys = torch.stack([torch.cat((first[i], second[j])) for i in range(n) for j in range(n)])  # (n^2, Q)
        best = (part @ keys.T).sort(descending=True)
        slots.append(best.indices[:, : memory.top_k])
        shares = best.values[:, : memory.top_k].exp()
        shares = shares / shares.sum(-1, keepdim=True)
        for k in range(memory.top_k):
            read += shares[:, k, None] * memory.values.weight[slots[-1][:, k]]
    return torch.stack(slots, 1), read.view(x.shape)


@settings(deadline=None, max_examples=30)
@given(data=st.data(), num_keys=st.integers(1, 6), heads=st.integers(1, 3), seed=st.integers(0, 999))
def test_equals_the_exhaustive_search(data: st.DataObject, num_keys: int, heads: int, seed: int) -> None:
    """The same slots in the same order for any n and k."""
    memory = make_memory(num_keys, data.draw(st.integers(1, num_keys)), heads, seed)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    slots, read = exhaustive(memory, x)
    assert memory.search(x)[1].equal(slots)
    assert_close(memory(x), read, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), num_keys=st.integers(1, 6))
def test_tied_scores_are_still_the_best(data: st.DataObject, num_keys: int) -> None:
    """Small integer keys cause many ties. The choice of slots is then open, but their scores are not."""
    memory = make_memory(num_keys, data.draw(st.integers(1, num_keys)))
    memory.query_norm.reset_running_stats()
    nn.init.ones_(memory.query_norm.weight)
    nn.init.zeros_(memory.query_norm.bias)
    memory.query_norm.eps = 0.0
    generator = torch.Generator().manual_seed(num_keys)
    for parameter in (memory.query.weight, memory.query.bias, memory.keys):
        parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    x = torch.randint(-1, 2, (1, 8, 7), generator=generator).double()
    scores, slots = memory.search(x)
    halves = memory.query(x[0]).unflatten(-1, (2, 2, 3))  # (M, H, half, Q / 2)
    every = torch.einsum("mhaq,ahnq->amhn", halves, memory.keys)
    every = (every[0].unsqueeze(-1) + every[1].unsqueeze(-2)).flatten(-2)  # (M, H, n^2)
    assert scores.equal(every.sort(descending=True).values[..., : memory.top_k])
    assert every.gather(-1, slots).equal(scores)
    assert all(len(set(row)) == memory.top_k for row in slots.flatten(0, 1).tolist())


def test_equals_the_package() -> None:
    """Build product-key-memory, without its batch norm, and with one query network for all heads."""
    package = pytest.importorskip("product_key_memory")
    ours = make_memory(9, 4)
    theirs = package.PKM(dim=7, heads=2, num_keys=9, topk=4, dim_head=3, use_layernorm=False).double().eval()
    theirs.norm = nn.Identity()
    theirs.use_layernorm = True  # only disables the mask of its norm
    nn.init.zeros_(ours.query.bias)
    ours.query_norm = nn.Identity()
    weights = ours.query.weight.unflatten(0, (2, 2, 3)).transpose(0, 1).flatten(0, 2)  # (half, head, Q / 2)
    keys = ours.keys.permute(1, 2, 0, 3)  # (H, n, half, Q / 2)
    theirs.load_state_dict({"to_queries.weight": weights, "keys": keys, "values.weight": ours.values.weight})
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    assert_close(ours(x), theirs(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_without_memories_equals_xlm(padded: bool) -> None:
    """Build transformers' XLM, a post-norm causal decoder with normalised embeddings, with the same weights."""
    ours, ids = make(memory_layers=(), intermediate_size=4 * 12), tokens(2, 9)
    c = ours.config
    theirs = XLMWithLMHeadModel(
        XLMConfig(
            vocab_size=c.vocab_size,
            emb_dim=c.hidden_size,
            n_layers=c.num_layers,
            n_heads=c.num_heads,
            causal=True,
            gelu_activation=True,
            n_langs=1,
            use_lang_emb=False,
            max_position_embeddings=c.max_seq_len,
            layer_norm_eps=c.norm_eps,
        )
    )
    names = {
        "token_embedding": "transformer.embeddings",
        "position_embedding": "transformer.position_embeddings",
        "embedding_norm": "transformer.layer_norm_emb",
        "head": "pred_layer.proj",
    }
    parts = {"query": "q_lin", "key": "k_lin", "value": "v_lin", "output": "out_lin"}
    for layer in range(c.num_layers):
        block = f"blocks.{layer}"
        names |= {f"{block}.attention.{x}": f"transformer.attentions.{layer}.{y}" for x, y in parts.items()}
        names |= {f"{block}.mlp.{x}": f"transformer.ffns.{layer}.{y}" for x, y in (("up", "lin1"), ("down", "lin2"))}
        names[f"{block}.attention_residual.norm"] = f"transformer.layer_norm1.{layer}"
        names[f"{block}.mlp_residual.norm"] = f"transformer.layer_norm2.{layer}"
    state = {}
    for name, tensor in ours.state_dict().items():
        module, _, kind = name.rpartition(".")
        state[f"{names[module]}.{kind}"] = tensor
    state["pred_layer.proj.bias"] = torch.zeros(c.vocab_size)
    theirs = theirs.double().eval().requires_grad_(False)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("position_ids" in name for name in missing)
    padding = torch.tensor([[1] * 9, [1] * 6 + [0] * 3]) if padded else torch.ones_like(ids)
    with Exact(theirs):
        expected = theirs(ids, attention_mask=padding).logits
    counted = padding.bool()
    assert_close(ours(ids, padding)[counted], expected[counted], atol=1e-10, rtol=0)


def test_batch_norm_breaks_causality_in_training_only() -> None:
    """In training, later tokens and other rows affect earlier outputs; in evaluation they do not."""
    model, ids = make(dropout=0.0), tokens(2, 9)
    later, other = ids.clone(), ids.clone()
    later[:, 8], other[1] = (ids[:, 8] + 1) % 31, (ids[1] + 1) % 31
    for training in (True, False):
        model.train(training)
        before = model(ids)
        by_later = (model(later)[:, :8] - before[:, :8]).abs().amax().item()
        by_other = (model(other)[0] - before[0]).abs().amax().item()
        if training:
            assert min(by_later, by_other) > 1e-3
        else:
            assert max(by_later, by_other) < 1e-12


def test_gradients_reach_only_selected_values() -> None:
    """Exactly the values and half-keys that were read have gradients."""
    memory = make_memory(20, 3).requires_grad_(True)
    x = torch.randn(1, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slots = memory.search(x)[1]
    memory(x).square().sum().backward()
    read = set(slots.flatten().tolist())
    assert set(memory.values.weight.grad.abs().sum(-1).nonzero().flatten().tolist()) == read
    assert len(read) < 400
    for side, of in enumerate((slots // 20, slots % 20)):
        for head in range(2):
            moved = memory.keys.grad[side, head].abs().sum(-1).nonzero().flatten().tolist()
            assert set(moved) == set(of[:, head].flatten().tolist())


def test_batch_norm_learns_the_mean_of_queries() -> None:
    """In training, queries are normalised over the batch, and the running statistics are updated."""
    memory, x = make_memory(6, 2).train(), torch.randn(4, 50, 7, dtype=torch.float64)
    for _ in range(150):
        memory(x)
    queries = memory.query(x.flatten(0, 1))
    assert_close(memory.query_norm.running_mean, queries.mean(0), atol=1e-5, rtol=0)
    assert_close(memory.query_norm.running_var, queries.var(0), atol=1e-5, rtol=0)
    trained, evaluated = memory(x), memory.eval()(x)
    assert (trained - evaluated).abs().median() < 0.02  # the variance with n - 1 instead of n


def test_half_precision_searches_in_float32() -> None:
    """Scores with float16 weights are not rounded to float16, in which many would tie."""
    memory = make_memory(9, 4).half()
    assert memory.search(torch.randn(1, 3, 7).half())[0].dtype == torch.float32
    assert memory(torch.randn(1, 3, 7).half()).dtype == torch.float16


@pytest.mark.parametrize(("name", "width"), [("product-key-memory-12l", 1024), ("product-key-memory-12l-wide", 1600)])
def test_published_sizes(name: str, width: int) -> None:
    """V E + T E, eleven feed-forward networks, twelve attentions, and one memory of 512 x 512 values."""
    attention, feed_forward = 4 * (width**2 + width), 8 * width**2 + 5 * width
    memory = 512**2 * width + 4 * 512 * (width + 1) + 2 * 4 * 512 + 2 * 4 * 512 * 256
    blocks = 12 * (attention + 4 * width) + 11 * feed_forward + memory
    assert parameter_count(registry().resolve(name)) == (60000 + 512 + 2) * width + blocks


def test_top_k_above_the_number_of_half_keys_is_rejected() -> None:
    with pytest.raises(ValueError, match="top_k 6 is above num_keys 5"):
        ProductKeyMemory(7, num_keys=5, top_k=6)
    with pytest.raises(ValueError, match="query_size must be even, got 7"):
        ProductKeyMemory(7, num_keys=5, top_k=5, query_size=7)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("memory_top_k=17", "memory_top_k 17 is above memory_keys 16"),
        ("memory_keys=3", "memory_top_k 4 is above memory_keys 3"),
        ("memory_keys=0", "memory_keys must be positive, got 0"),
        ("memory_query_size=5", "memory_query_size must be even, got 5"),
        ("memory_layers=[2]", r"memory_layers \(2,\) must be different numbers from 0 to 1, since num_layers is 2"),
        ("memory_layers=[0, 0]", r"memory_layers \(0, 0\) must be different"),
    ],
)
def test_invalid_sizes_are_rejected(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry().resolve("product-key-memory-tiny", [setting])
