"""Longformer against masked full attention, and against transformers with the same weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import LongformerConfig, LongformerModel

from zoo.errors import UsageError
from zoo.nn import LongformerAttention, MultiHeadAttention
from zoo.registry import registry
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.model import BERT

SIZES = {
    "vocab_size": 53,
    "type_vocab_size": 2,
    "max_seq_len": 40,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 40,
    "skip_padding": True,
    "pad_token_id": 1,
    "attention": "longformer",
}


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.double().eval().requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)


def dense(module: LongformerAttention, x: Tensor, tokens: Tensor) -> Tensor:
    """Compute all pairs, head by head: softmax over the window and the global tokens, then the global rows."""
    length, count = x.shape[1], module.global_tokens
    place = torch.arange(length)
    seen = ((place[:, None] - place).abs() <= module.reach) | (place < count)
    heads = []
    for head in range(module.num_heads):
        part = slice(8 * head, 8 * head + 8)
        query, key, value = (layer(x)[..., part] for layer in (module.query, module.key, module.value))
        scores = query @ key.transpose(1, 2) / 8**0.5
        mixed = scores.masked_fill(~(seen & tokens[:, None]), -torch.inf).softmax(-1) @ value
        if count:
            layers = (module.global_query, module.global_key, module.global_value)
            query, key, value = (layer(x)[..., part] for layer in layers)
            scores = query[:, :count] @ key.transpose(1, 2) / 8**0.5
            mixed[:, :count] = scores.masked_fill(~tokens[:, None], -torch.inf).softmax(-1) @ value
        heads.append(mixed)
    return module.output(torch.cat(heads, -1))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 30), reach=st.integers(1, 12), data=st.data())
def test_equals_masked_full_attention(length: int, reach: int, data: st.DataObject) -> None:
    """For any window and number of global tokens, and lengths that no chunk divides or that are shorter than one."""
    count = data.draw(st.integers(0, reach))
    module = LongformerAttention(16, 2, 2 * reach, global_tokens=count)
    randomise(module)
    x = torch.randn(3, length, 16, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    tokens = torch.arange(length) < torch.tensor([[length], [data.draw(st.integers(1, length))], [1]])
    found, expected = module(x, mask=tokens.long()), dense(module, x, tokens)
    assert found.shape == expected.shape
    assert found.isfinite().all()
    assert_close(found[tokens], expected[tokens], atol=1e-12, rtol=0)
    assert_close(module(x)[0], found[0], atol=1e-12, rtol=0)


def test_window_over_all_tokens_equals_full_attention() -> None:
    """Without global tokens, with the same weights."""
    module, full = LongformerAttention(24, 3, 40), MultiHeadAttention(24, 3).double()
    randomise(module)
    full.load_state_dict(module.state_dict())
    x = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(module(x), full(x), atol=1e-12, rtol=0)


def test_tokens_beyond_the_window_have_no_effect() -> None:
    """Token 10 affects only tokens within 3 of it and, if there is one, the global token."""
    x = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = x.clone()
    other[0, 10] += 1
    for count in (0, 1):
        module = LongformerAttention(24, 3, 6, global_tokens=count)
        randomise(module)
        changed = (module(x) != module(other)).any(-1)[0].nonzero().flatten().tolist()
        assert changed == [*range(count), *range(7, 14)]


def twin(ours: BERT) -> LongformerModel:
    """Build the transformers model with our weights."""
    c = ours.config
    theirs = LongformerModel(
        LongformerConfig(
            vocab_size=c.vocab_size,
            type_vocab_size=c.type_vocab_size,
            max_position_embeddings=c.position_rows,
            hidden_size=c.hidden_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            intermediate_size=c.intermediate_size,
            attention_window=c.attention_window,
            pad_token_id=c.pad_token_id,
        )
    )
    names = {
        "embeddings.token.": "embeddings.word_embeddings.",
        "embeddings.position.": "embeddings.position_embeddings.",
        "embeddings.token_type.": "embeddings.token_type_embeddings.",
        "embeddings.norm.": "embeddings.LayerNorm.",
        "blocks.": "encoder.layer.",
        "attention.output.": "attention.output.dense.",
        "norm_1.": "attention.output.LayerNorm.",
        "mlp.up.": "intermediate.dense.",
        "mlp.down.": "output.dense.",
        "norm_2.": "output.LayerNorm.",
        "pooler.": "pooler.dense.",
        **{f"attention.{name}.": f"attention.self.{name}." for name in ("query", "key", "value")},
        **{f"attention.global_{name}.": f"attention.self.{name}_global." for name in ("query", "key", "value")},
    }
    weights = {}
    for name, tensor in ours.state_dict().items():
        for mine, its in names.items():
            name = name.replace(mine, its, 1)
        weights[name] = tensor
    theirs = theirs.double().eval().requires_grad_(False)
    missing = theirs.load_state_dict(weights, strict=False)
    assert missing.unexpected_keys == []
    assert all("_global" in name for name in missing.missing_keys)
    assert bool(missing.missing_keys) == (c.global_tokens == 0)
    return theirs


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("length", [5, 16, 37])
def test_equals_transformers(count: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local and global, with and without padding. transformers' rounding of the softmax to float32 is patched out."""
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    ours = BERT(BERTConfig(**SIZES, attention_window=8, global_tokens=count, norm_eps=1e-12))
    randomise(ours)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 53, (3, length), generator=generator)
    types = torch.randint(0, 2, ids.shape, generator=generator)
    mask = (torch.arange(length) < torch.tensor([[length], [4], [length - 1]])).long()
    ids = ids.masked_fill(mask == 0, 1)
    everywhere = (torch.arange(length) < count).long().expand_as(ids)
    found = ours(ids, mask, types)
    expected = twin(ours)(ids, mask, global_attention_mask=everywhere, token_type_ids=types)
    kept = mask.bool()
    assert_close(found["last_hidden_state"][kept], expected.last_hidden_state[kept], atol=1e-10, rtol=0)
    assert_close(found["pooler_output"], expected.pooler_output, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("longformer-tiny", ["attention_window=7"], "attention_window must be even, half on either side, got 7"),
        ("longformer-tiny", ["attention_window=0"], "attention_window must be positive, got 0"),
        ("longformer-tiny", ["global_tokens=9"], "global_tokens 9 lies outside 0 ... half of window 16"),
        ("longformer-tiny", ["attention_rank=4"], "attention 'longformer' has no rank, but attention_rank is 4"),
        ("bert-tiny", ["global_tokens=1"], "attention 'full' has no window, but .* global_tokens is 1"),
        ("performer-tiny", ["attention_window=8"], "attention 'performer' has no window, but attention_window is 8"),
    ],
)
def test_invalid_configurations(name: str, settings: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve(name, settings)


@pytest.mark.parametrize(
    ("window", "count", "message"),
    [(7, 0, "window must be even and positive, got 7"), (8, 5, "global_tokens 5 lies outside 0 ... half of window 8")],
)
def test_invalid_blocks(window: int, count: int, message: str) -> None:
    """The block itself rejects it, too."""
    with pytest.raises(ValueError, match=message):
        LongformerAttention(24, 3, window, global_tokens=count)
