"""The Reformer against transformers and against explicit loops, and its invariances."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import ReformerConfig as TheirConfig
from transformers import ReformerModelWithLMHead

from zoo.errors import UsageError
from zoo.models import create, persist
from zoo.models.count import parameter_count
from zoo.nn import LSHAttention
from zoo.registry import registry
from zoo_plugins.reformer.config import ReformerConfig
from zoo_plugins.reformer.model import Reformer

SIZES = {
    "vocab_size": 29, "max_seq_len": 48, "hidden_size": 24, "num_layers": 4, "attention_kinds": ["local", "lsh"],
    "num_heads": 3, "head_dim": 6, "intermediate_size": 20, "local_chunk_length": 4, "lsh_chunk_length": 8,
    "num_hashes": 2, "num_buckets": [6], "axial_shape": [6, 8], "axial_sizes": [10, 14], "dropout": 0.0,
}  # fmt: skip


def make(*, seed: int = 1, std: float = 0.4, **changes: object) -> Reformer:
    """Build a small float64 model in evaluation mode."""
    model = Reformer(ReformerConfig.from_dict({**SIZES, **changes})).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    for name, buffer in model.named_buffers():
        assert name.endswith("rotations")
        nn.init.normal_(buffer, generator=generator)
    return model


def batch(length: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    """Draw ids, and a mask with right padding that grows from row to row."""
    ids = torch.randint(0, 29, (rows, length), generator=torch.Generator().manual_seed(length))
    lengths = torch.tensor([max(1, length - (length // rows) * row) for row in range(rows)])
    return ids, (torch.arange(length) < lengths.unsqueeze(1)).long()


def twin(ours: Reformer) -> ReformerModelWithLMHead:
    """Build the transformers model with our weights; ours takes over its random rotations."""
    c, seed = ours.config, 5
    theirs = ReformerModelWithLMHead(
        TheirConfig(
            attn_layers=[c.kind(layer) for layer in range(c.num_layers)], attention_head_size=c.head_dim,
            axial_pos_embds=c.positions == "axial", axial_pos_shape=c.axial_shape, axial_pos_embds_dim=c.axial_sizes,
            feed_forward_size=c.intermediate_size, hash_seed=seed, hidden_act=c.activation, hidden_size=c.hidden_size,
            is_decoder=True, layer_norm_eps=c.norm_eps, local_attn_chunk_length=c.local_chunk_length,
            lsh_attn_chunk_length=c.lsh_chunk_length, max_position_embeddings=c.max_seq_len,
            num_attention_heads=c.num_heads, num_hashes=c.num_hashes, vocab_size=c.vocab_size, use_cache=False,
            num_buckets=list(c.num_buckets) if len(c.num_buckets) > 1 else c.num_buckets[0],
        )
    )  # fmt: skip
    weights: dict[str, Tensor] = {"lm_head.bias": theirs.lm_head.bias.double()}

    def copy(name: str, layer: nn.Module) -> None:
        weights.update({f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()})

    copy("reformer.embeddings.word_embeddings", ours.token_embedding)
    places = ours.position_embedding
    if isinstance(places, nn.Embedding):
        copy("reformer.embeddings.position_embeddings.embedding", places)
    else:
        weights["reformer.embeddings.position_embeddings.weights.0"] = places.row.weight.unsqueeze(1)
        weights["reformer.embeddings.position_embeddings.weights.1"] = places.column.weight.unsqueeze(0)
    for index, block in enumerate(ours.blocks):
        layer = f"reformer.encoder.layers.{index}"
        copy(f"{layer}.attention.layer_norm", block.norm_1)
        for name in ("query", "key", "query_key", "value"):
            if hasattr(block.attention, name):
                copy(f"{layer}.attention.self_attention.{name}", getattr(block.attention, name))
        copy(f"{layer}.attention.output.dense", block.attention.output)
        copy(f"{layer}.feed_forward.layer_norm", block.norm_2)
        copy(f"{layer}.feed_forward.dense.dense", block.mlp.up)
        copy(f"{layer}.feed_forward.output.dense", block.mlp.down)
        if isinstance(block.attention, LSHAttention):
            torch.manual_seed(seed)
            drawn = torch.randn(c.num_heads, c.head_dim, c.num_hashes, sum(c.num_buckets) // 2, dtype=torch.float64)
            block.attention.rotations.copy_(drawn.flatten(2))
    copy("reformer.encoder.layer_norm", ours.norm)
    copy("lm_head.decoder", ours.head)
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_kinds": ["lsh"], "num_hashes": 1, "num_layers": 2},
        {"attention_kinds": ["local"], "num_layers": 2},
        {"num_hashes": 4, "num_buckets": [4, 6], "num_layers": 2},
        {"positions": "learned", "activation": "gelu", "norm_eps": 1e-3, "num_layers": 2},
        pytest.param({"lsh_chunk_length": 6, "num_heads": 2, "head_dim": 9}, marks=pytest.mark.slow),
    ],
)
def test_equals_transformers(changes: dict[str, object]) -> None:
    """The whole language model with wrapped rounds, within 1e-10: whole chunks, partial chunks, and padding."""
    ours = make(wrap_rounds=True, **changes)
    theirs = twin(ours)
    for length in (1, 7, 24, 29, 48):
        ids, mask = batch(length)
        for chosen in (None, mask):
            expected = theirs(input_ids=ids, attention_mask=chosen).logits
            kept = mask.bool() if chosen is not None else torch.ones_like(ids, dtype=torch.bool)
            assert_close(ours(ids, chosen)[kept], expected[kept], atol=1e-10, rtol=0)


def test_published_size() -> None:
    """The count of the enwik8 model, less a bias that transformers has but never adds."""
    names = ["local", "local", "lsh", "local"] * 3
    with torch.device("meta"):
        theirs = ReformerModelWithLMHead(
            TheirConfig(
                attn_layers=names, attention_head_size=128, axial_pos_embds_dim=[256, 768], axial_pos_shape=[128, 512],
                feed_forward_size=4096, hidden_size=1024, is_decoder=True, max_position_embeddings=65536,
                num_attention_heads=8, num_buckets=512, num_hashes=4, vocab_size=258,
            )
        )  # fmt: skip
    expected = sum(parameter.numel() for parameter in theirs.parameters()) - 258
    assert parameter_count(registry().resolve("reformer-enwik8")) == expected == 149_182_464


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_kinds": ["lsh"], "num_buckets": [4, 6]}, {"attention_kinds": ["local"], "num_layers": 3},
     {"task": "feature-extraction", "positions": "learned"}, {"max_seq_len": 45, "lsh_chunk_length": 6}],
)  # fmt: skip
def test_cost(changes: dict[str, object]) -> None:
    """Parameters, and FLOPs per token of the longest text, against the module."""
    model = make(**changes)
    longest = model.config.max_seq_len
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, longest, dtype=torch.long))
    cost = model.config.cost()
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.flops == counter.get_total_flops() // longest


def attend_by_loops(layer: LSHAttention, x: Tensor, tokens: Tensor) -> Tensor:
    """Compute one text, (T, E) and (T,), by definition: per head, round and token, without wrapping."""
    length, size = x.shape[0], layer.chunk_length
    heads = []
    for head, rotation in enumerate(layer.rotations):
        width = rotation.shape[0]
        rows = slice(head * width, (head + 1) * width)
        shared, value = x @ layer.query_key.weight[rows].T, x @ layer.value.weight[rows].T
        key = shared / ((shared**2).mean(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(width)
        sums, weights = [], []
        for matrix in rotation.chunk(layer.num_hashes, dim=1):
            turned = shared @ matrix
            hashes = torch.cat((turned, -turned), 1).argmax(1).tolist()
            order = sorted(range(length), key=lambda t, h=hashes: (h[t] if tokens[t] else math.inf, t))
            chunk_of = {token: place // size for place, token in enumerate(order)}
            found, weight = [], []
            for t in range(length):
                seen = [s for s in range(t) if tokens[s] and chunk_of[t] - chunk_of[s] in (0, 1)]
                scores = shared[t] @ key[seen].T if seen else torch.tensor([-1e4], dtype=x.dtype)
                found.append(scores.softmax(0) @ value[seen or [t]])
                weight.append(scores.logsumexp(0))
            sums.append(torch.stack(found))
            weights.append(torch.stack(weight))
        share = torch.stack(weights).softmax(0)  # (R, T)
        heads.append((torch.stack(sums) * share.unsqueeze(-1)).sum(0))
    return torch.cat(heads, 1) @ layer.output.weight.T


def attention(chunk_length: int, num_hashes: int = 2, *, seed: int = 0) -> LSHAttention:
    """Build a float64 layer."""
    torch.manual_seed(seed)
    layer = LSHAttention(
        12, 2, head_dim=5, chunk_length=chunk_length, num_hashes=num_hashes, num_buckets=[6], wrap=False
    )
    return layer.double().eval().requires_grad_(False)


@pytest.mark.parametrize(("chunk_length", "num_hashes"), [(4, 1), (4, 3), (3, 2), (6, 4)])
def test_attention_equals_loops(chunk_length: int, num_hashes: int) -> None:
    """With padding at arbitrary positions."""
    layer = attention(chunk_length, num_hashes)
    x = 2 * torch.randn(2, 24, 12, dtype=torch.float64)
    tokens = torch.rand(2, 24) > torch.tensor([[0.0], [0.3]])
    expected = torch.stack([attend_by_loops(layer, *row) for row in zip(x, tokens, strict=True)])
    found = layer(x, tokens)
    assert_close(found[tokens], expected[tokens], atol=1e-12, rtol=0)


@settings(max_examples=8, deadline=None)
@given(num_hashes=st.integers(1, 4), wrap=st.booleans(), seed=st.integers(0, 99))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1.5e-6)])
def test_one_chunk_is_full_attention(dtype: torch.dtype, bound: float, num_hashes: int, wrap: bool, seed: int) -> None:
    """Full attention with shared, unit-length queries and keys. Only the first token attends to itself."""
    layer = attention(16, num_hashes, seed=seed).to(dtype)
    layer.wrap = wrap
    x = torch.randn(2, 16, 12, dtype=dtype)
    shared, value = (part(x).unflatten(-1, (2, 5)).transpose(1, 2) for part in (layer.query_key, layer.value))
    scores = shared @ layer._unit(shared).transpose(-2, -1)
    before = torch.ones(16, 16, dtype=torch.bool).tril(-1)
    before[0, 0] = True
    weights = scores.masked_fill(~before, -math.inf).softmax(-1)
    expected = layer.output((weights @ value).transpose(1, 2).flatten(2))
    assert_close(layer(x, torch.ones(2, 16, dtype=torch.bool)), expected, atol=bound, rtol=0)


MODEL = make(num_layers=2)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 40), padding=st.integers(0, 8), filler=st.integers(0, 28))
def test_padding_changes_nothing(length: int, padding: int, filler: int) -> None:
    """Right padding, including that to whole chunks, is sorted last, so that chunks do not change."""
    ids = batch(length)[0]
    padded = nn.functional.pad(ids, (0, padding), value=filler)
    mask = nn.functional.pad(torch.ones_like(ids), (0, padding))
    assert_close(MODEL(padded, mask)[:, :length], MODEL(ids), atol=1e-10, rtol=0)


SORTED = make(attention_kinds=["lsh"], num_layers=2)


@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 32), left=st.integers(0, 8), right=st.integers(0, 8))
def test_left_padding_changes_nothing_without_local_layers(length: int, left: int, right: int) -> None:
    """LSH attention sorts padding last; local attention counts chunks from the left, padding included."""
    ids = batch(length)[0]
    padded, mask = (nn.functional.pad(tensor, (left, right)) for tensor in (ids, torch.ones_like(ids)))
    assert_close(SORTED(padded, mask)[:, left : left + length], SORTED(ids), atol=1e-10, rtol=0)


def test_row_of_padding_stays_finite() -> None:
    """Other rows are not affected."""
    ids, mask = batch(29)
    expected = MODEL(ids, mask)
    mask[1] = 0
    found = MODEL(ids, mask)
    assert found.isfinite().all()
    assert_close(found[[0, 2]], expected[[0, 2]], atol=1e-12, rtol=0)


@pytest.mark.parametrize(("kinds", "chunk"), [(["local"], 8), (["lsh"], 48)])
def test_strictly_causal(kinds: list[str], chunk: int) -> None:
    """In local attention, and with a single chunk, later tokens do not change earlier outputs."""
    model, ids = make(attention_kinds=kinds, lsh_chunk_length=chunk), batch(48)[0]
    expected = model(ids)
    for place in (1, 7, 8, 30, 47):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 29
        found = model(changed)
        assert_close(found[:, :place], expected[:, :place], atol=1e-12, rtol=0)
        assert (found[:, place:] - expected[:, place:]).abs().amax() > 1e-6


def test_sorting_is_not_strictly_causal() -> None:
    """A later token may move others to another chunk, so the model is not declared causal."""
    ids = batch(48)[0]
    expected = MODEL(ids)
    moved = 0.0
    for token in range(8):
        changed = ids.clone()
        changed[:, 30] = token
        moved = max(moved, float((MODEL(changed) - expected)[:, :30].abs().max()))
    assert moved > 1e-3
    assert MODEL.config.graphs()[0].causal is None
    assert make(attention_kinds=["local"]).config.graphs()[0].causal is True


def test_later_tokens_have_zero_gradient() -> None:
    """Later tokens may affect which tokens are seen, but outputs have zero gradient with respect to them."""
    layer = attention(4, 3)
    x = torch.randn(1, 24, 12, dtype=torch.float64)
    tokens = torch.ones(1, 24, dtype=torch.bool)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, tokens)[0].sum(-1), x)[:, 0].abs().sum(-1)
    assert not jacobian.triu(1).any()
    assert (jacobian.diagonal() > 0).any()


def test_evaluation_is_reproducible(tmp_path: Path) -> None:
    """Rotations are drawn once from the seed, and saved with the weights."""
    spec = registry().resolve("reformer-tiny")
    model = create.build(spec, seed=3, dtype="float32").eval()
    ids = torch.arange(100).unsqueeze(0)
    persist.save_spec(spec, model, tmp_path / "model")
    with torch.no_grad():
        expected = model(ids)
        assert model(ids).equal(expected)
        assert persist.load(tmp_path / "model").eval()(ids).equal(expected)
        other = create.build(spec, seed=4, dtype="float32")
    assert not other.blocks[1].attention.rotations.equal(model.blocks[1].attention.rotations)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["num_buckets=[7]"], r"num_buckets must be even positive numbers, got \(7,\)"),
        (["num_buckets=[]"], r"num_buckets must be even positive numbers, got \(\)"),
        (["num_hashes=0"], "num_hashes must be positive, got 0"),
        (["lsh_chunk_length=0"], "lsh_chunk_length must be positive, got 0"),
        (["num_heads=5"], "hidden_size 64 is not divisible by num_heads 5"),
        (["axial_sizes=[1, 2]"], r"axial_sizes \(1, 2\) do not add up to hidden_size 64"),
        (["axial_shape=[2, 3]"], r"axial_shape \(2, 3\) has no room for max_seq_len 128"),
        (["axial_shape=[128]"], "must be two positive numbers"),
        (["attention_kinds=[]"], "attention_kinds must be one or more of 'local' and 'lsh', got none"),
        (['attention_kinds=["hash"]'], "attention_kinds"),
    ],
)
def test_invalid_configurations(settings: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve("reformer-tiny", settings)


def test_attention_needs_even_buckets() -> None:
    """A hash and its opposite form a pair."""
    with pytest.raises(ValueError, match=r"num_buckets must be even positive numbers, got \(4, 3\)"):
        LSHAttention(8, 2, head_dim=4, chunk_length=4, num_hashes=1, num_buckets=[4, 3])
