"""The encoder-decoder Transformer against torch.nn.Transformer with the same weights, and its invariances."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.errors import UsageError
from zoo.nn import Cache, MultiHeadAttention
from zoo.registry import registry
from zoo_plugins.transformer.config import TransformerConfig
from zoo_plugins.transformer.model import Transformer

SIZES = {
    "vocab_size": 53,
    "max_seq_len": 16,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 40,
    "norm_eps": 1e-4,
    "dropout": 0.0,
}
# As functions: a copied nn.TransformerDecoderLayer replaces an activation that is a module by relu.
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
SOURCE_LENGTHS, TARGET_LENGTHS = [7, 4, 1], [5, 6, 2]


def make(**options: object) -> Transformer:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = Transformer(TransformerConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def torch_twin(ours: Transformer) -> nn.Transformer:
    """Build torch's Transformer with our weights.

    By default it adds a final norm to both stacks even when each layer ends with one. The paper does not, so the stacks
    are built separately. In training mode, without dropout, it does not take the fused path.
    """
    c = ours.config
    options = {
        "d_model": c.hidden_size,
        "dropout": 0.0,
        "activation": ACTIVATIONS[c.activation],
        "layer_norm_eps": c.norm_eps,
        "batch_first": True,
        "norm_first": c.norm_first,
    }

    def final_norm() -> nn.LayerNorm | None:
        return nn.LayerNorm(c.hidden_size, eps=c.norm_eps) if c.final_norm else None

    encoder_layer = nn.TransformerEncoderLayer(nhead=c.num_heads, dim_feedforward=c.intermediate_size, **options)
    decoder_layer = nn.TransformerDecoderLayer(
        nhead=c.num_decoder_heads,
        dim_feedforward=c.decoder_intermediate_size,
        **options,
    )
    theirs = nn.Transformer(
        nhead=c.num_heads,
        **options,
        custom_encoder=nn.TransformerEncoder(
            encoder_layer, c.num_layers, norm=final_norm(), enable_nested_tensor=False
        ),
        custom_decoder=nn.TransformerDecoder(decoder_layer, c.num_decoder_layers, norm=final_norm()),
    )
    theirs = theirs.double().requires_grad_(False)
    for mine, its in zip((*ours.encoder, *ours.decoder), (*theirs.encoder.layers, *theirs.decoder.layers), strict=True):
        copy_attention(mine.attention, its.self_attn)
        its.norm1.load_state_dict(mine.residual_1.norm.state_dict())
        its.norm2.load_state_dict(mine.residual_2.norm.state_dict())
        its.linear1.load_state_dict(mine.mlp.up.state_dict())
        its.linear2.load_state_dict(mine.mlp.down.state_dict())
        if isinstance(its, nn.TransformerDecoderLayer):
            copy_attention(mine.cross, its.multihead_attn)
            its.norm3.load_state_dict(mine.residual_3.norm.state_dict())
    if c.final_norm:
        theirs.encoder.norm.load_state_dict(ours.encoder_norm.state_dict())
        theirs.decoder.norm.load_state_dict(ours.decoder_norm.state_dict())
    return theirs


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    """torch stacks query, key and value, and has biases, which are 0 if ours has none."""
    projections = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in projections]))
    theirs.out_proj.weight.copy_(ours.output.weight)
    theirs.in_proj_bias.zero_()
    theirs.out_proj.bias.zero_()
    if ours.output.bias is not None:
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in projections]))
        theirs.out_proj.bias.copy_(ours.output.bias)


def embed(ours: Transformer, side: str, ids: Tensor, mask: Tensor) -> Tensor:
    """sqrt(E) times the token's row plus PE(position), with padding skipped; optionally normalised."""
    c, layer = ours.config, getattr(ours, f"{side}_embedding")
    x = layer.token.weight[ids] * (math.sqrt(c.hidden_size) if c.scale_embeddings else 1)
    half = c.hidden_size // 2
    for b, row in enumerate(mask.tolist()):
        for t in range(len(row)):
            position = max(sum(row[: t + 1]) - 1, 0)
            if c.positions == "learned":
                x[b, t] += layer.position.weight[position + c.position_offset]
                continue
            for i in range(half):
                angle = position / 10000 ** (2 * i / c.hidden_size)
                if c.positions == "sinusoidal":
                    x[b, t, 2 * i] += math.sin(angle)
                    x[b, t, 2 * i + 1] += math.cos(angle)
                else:  # published as float32 tables
                    x[b, t, i] += float(np.float32(math.sin(angle)))
                    x[b, t, half + i] += float(np.float32(math.cos(angle)))
    return F.layer_norm(x, x.shape[-1:], layer.norm.weight, layer.norm.bias, c.norm_eps) if c.embedding_norm else x


def expected_logits(ours: Transformer, source: Tensor, target: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
    """Run torch's Transformer between our embeddings and head. Its masks are True at hidden positions."""
    length = target.shape[1]
    output = torch_twin(ours)(
        embed(ours, "encoder", source, masks[0]),
        embed(ours, "decoder", target, masks[1]),
        tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
        src_key_padding_mask=masks[0] == 0,
        tgt_key_padding_mask=masks[1] == 0,
        memory_key_padding_mask=masks[0] == 0,
    )
    logits = output @ ours.head.weight.T
    return logits if ours.head.bias is None else logits + ours.head.bias


def padding_of(lengths: Sequence[int], side: str = "right") -> Tensor:
    """Build a padding mask with a row of each length."""
    rows = [[1] * length + [0] * (max(lengths) - length) for length in lengths]
    return torch.tensor([row[::-1] if side == "left" else row for row in rows])


def tokens(lengths: Sequence[int], seed: int) -> Tensor:
    """Draw random token ids, as long as the longest row."""
    shape = (len(lengths), max(lengths))
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[Tensor, Tensor]:
    """Draw a batch of sources and targets."""
    return tokens(SOURCE_LENGTHS, 0), tokens(TARGET_LENGTHS, 1)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_equals_torch(norm_first: bool, attention_bias: bool, positions: str, tie_embeddings: bool) -> None:
    """For every option, with no masks and with both."""
    ours = make(
        norm_first=norm_first,
        attention_bias=attention_bias,
        positions=positions,
        tie_embeddings=tie_embeddings,
    )
    source, target = pair()
    everything = (torch.ones_like(source), torch.ones_like(target))
    assert_close(ours(source, target), expected_logits(ours, source, target, everything), atol=1e-10, rtol=0)
    masks = (padding_of(SOURCE_LENGTHS), padding_of(TARGET_LENGTHS))
    expected, kept = expected_logits(ours, source, target, masks), masks[1].bool()
    assert_close(ours(source, target, *masks)[kept], expected[kept], atol=1e-10, rtol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [{"num_layers": 1, "num_heads": 1}, {"hidden_size": 30, "num_heads": 5}])
def test_equals_torch_at_other_sizes(activation: str, sizes: dict[str, int]) -> None:
    """Other activations, a single head, and an odd number of heads."""
    ours, (source, target) = make(activation=activation, **sizes), pair()
    masks = (torch.ones_like(source), torch.ones_like(target))
    assert_close(ours(source, target), expected_logits(ours, source, target, masks), atol=1e-10, rtol=0)


FAMILIES = {
    "BART": {
        "positions": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "scale_embeddings": False,
        "attention_bias": True,
        "head_bias": True,
        "activation": "gelu",
    },
    "mBART": {
        "positions": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "attention_bias": True,
        "norm_first": True,
        "head_bias": True,
    },
    "Marian": {
        "positions": "sinusoidal-halves",
        "attention_bias": True,
        "head_bias": True,
        "activation": "silu",
    },
    "Marian of two vocabularies": {
        "positions": "sinusoidal-halves",
        "attention_bias": True,
        "target_vocab_size": 61,
        "head_bias": True,
    },
    "torch.nn.Transformer": {
        "attention_bias": True,
        "final_norm": True,
        "tie_embeddings": False,
        "target_vocab_size": 61,
        "head_bias": True,
    },
}
LOPSIDED = {"num_layers": 1, "num_decoder_layers": 2, "num_decoder_heads": 4, "decoder_intermediate_size": 56}


@pytest.mark.parametrize("sizes", [{}, LOPSIDED], ids=["even", "lopsided"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_torch(family: str, sizes: dict[str, int]) -> None:
    """Configurations of BART, mBART and Marian, with decoders that differ from their encoders."""
    ours, (source, target) = make(**FAMILIES[family], **sizes), pair()
    masks = (padding_of(SOURCE_LENGTHS), padding_of(TARGET_LENGTHS))
    logits, expected, kept = ours(source, target, *masks), expected_logits(ours, source, target, masks), masks[1].bool()
    assert logits.shape[-1] == ours.config.decoder.vocab_size
    assert_close(logits[kept], expected[kept], atol=1e-10, rtol=0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_left_padded_source_equals_torch(norm_first: bool) -> None:
    """Padding before the source is skipped in positions, too."""
    ours, (source, target) = make(norm_first=norm_first), pair()
    masks = (padding_of(SOURCE_LENGTHS, "left"), torch.ones_like(target))
    expected = expected_logits(ours, source, target, masks)
    assert_close(ours(source, target, *masks), expected, atol=1e-10, rtol=0)
    encoded = ours.encode(source, masks[0])["last_hidden_state"]
    memory = torch_twin(ours).encoder(embed(ours, "encoder", source, masks[0]), src_key_padding_mask=masks[0] == 0)
    assert_close(encoded[masks[0].bool()], memory[masks[0].bool()], atol=1e-10, rtol=0)


@pytest.mark.parametrize("sides", [("left", "left"), ("left", "right"), ("right", "left"), ("right", "right")])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_padding_changes_nothing(sides: tuple[str, str], positions: str) -> None:
    """A source-target pair has the same logits alone and padded in a batch, with any padding token."""
    model, (source, target) = make(positions=positions), pair()
    source_mask, target_mask = padding_of(SOURCE_LENGTHS, sides[0]), padding_of(TARGET_LENGTHS, sides[1])
    for filler in (0, 7):
        logits = model(
            source.masked_fill(source_mask == 0, filler),
            target.masked_fill(target_mask == 0, filler),
            source_mask,
            target_mask,
        )
        for row in range(len(source)):
            kept = target_mask[row].bool()
            alone = model(source[row : row + 1, source_mask[row].bool()], target[row : row + 1, kept])
            assert_close(logits[row, kept], alone[0], atol=1e-11, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_later_target_tokens_do_not_change_earlier_outputs(padded: bool, norm_first: bool) -> None:
    """With or without padding, output t depends on tokens up to t only: padding does not replace the causal mask."""
    model, (source, target) = make(norm_first=norm_first), pair()
    masks = (padding_of(SOURCE_LENGTHS), torch.ones_like(target)) if padded else (None, None)
    before = model(source, target, *masks)
    for t in range(target.shape[1] - 1):
        changed = target.clone()
        changed[:, t + 1 :] = (target[:, t + 1 :] + 1) % SIZES["vocab_size"]
        after = model(source, changed, *masks)
        assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-12, rtol=0)
        assert (after[:, t + 1 :] - before[:, t + 1 :]).abs().amax(-1).min() > 1e-3


def test_every_output_sees_the_whole_source() -> None:
    """The encoder is not causal: its last token affects the first output."""
    model, (source, target) = make(), pair()
    changed = source.clone()
    changed[:, -1] = (source[:, -1] + 1) % SIZES["vocab_size"]
    assert (model(changed, target) - model(source, target)).abs().amax(-1).min() > 1e-3


@settings(deadline=None, max_examples=25)
@given(
    splits=st.sets(st.integers(1, 5)),
    side=st.sampled_from(["left", "right", None]),
    options=st.sampled_from(
        [
            {},
            {"norm_first": True, "positions": "learned"},
            {"head_dim": 5, "value_head_dim": 7},
            *({**family, **LOPSIDED} for family in FAMILIES.values()),
        ]
    ),
)
def test_cached_decoding_equals_forward(splits: set[int], side: str | None, options: dict[str, object]) -> None:
    """One encoding, then the target in calls cut anywhere, equals a single call."""
    model, (source, target) = make(**options), pair()
    masks = (padding_of(SOURCE_LENGTHS, side), padding_of(TARGET_LENGTHS, side)) if side else (None, None)
    cross = model.encode(source, masks[0])["cross_key_values"]
    past, outputs = Cache.empty(model.config.decoder.num_layers), []
    for start, stop in pairwise([0, *sorted(splits), target.shape[1]]):
        seen = None if masks[1] is None else masks[1][:, :stop]
        outputs.append(model.decode(target[:, start:stop], cross, seen, masks[0], past))
    assert_close(torch.cat(outputs, dim=1), model(source, target, *masks), atol=1e-11, rtol=0)
    assert cross.length == source.shape[1]


def test_three_way_tying_shares_one_parameter() -> None:
    """Source embedding, target embedding and head are one matrix with one gradient."""
    tied, untied = make(), make(tie_embeddings=False)
    for model, distinct in ((tied, 1), (untied, 3)):
        owners = (model.encoder_embedding.token, model.decoder_embedding.token, model.head)
        assert len({owner.weight for owner in owners}) == distinct
        assert len({owner.weight.data_ptr() for owner in owners}) == distinct
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    source, target = pair()
    tied.requires_grad_()(source, target).square().mean().backward()
    torch.optim.SGD(tied.parameters(), lr=0.1).step()
    assert tied.encoder_embedding.token.weight.equal(tied.head.weight)


def test_sharing_and_tying_are_independent() -> None:
    """Sharing of source and target embedding and tying of target embedding and head are independent."""
    for share, tie in product((False, True), repeat=2):
        model = make(share_embeddings=share, tie_embeddings=tie)
        source, target, head = (
            layer.weight for layer in (model.encoder_embedding.token, model.decoder_embedding.token, model.head)
        )
        assert (source is target, target is head) == (share, tie)
        assert sum(parameter.numel() for parameter in model.parameters()) == model.config.cost().parameters


@pytest.mark.parametrize("position_offset", [0, 2])
def test_rows_before_the_position_offset_are_unused(position_offset: int) -> None:
    """There is a row for every position up to the last, and no more."""
    model = make(positions="learned", position_offset=position_offset)
    source = torch.arange(SIZES["max_seq_len"])[None]
    before = model(source, source)
    for layer in (model.encoder_embedding, model.decoder_embedding):
        assert len(layer.position.weight) == SIZES["max_seq_len"] + position_offset
        layer.position.weight[:position_offset] = math.nan
    assert model(source, source).equal(before)


@pytest.mark.parametrize("hidden_size", [6, 24])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_embeddings_are_scaled_by_the_root_of_the_width(hidden_size: int, positions: str) -> None:
    """Token embeddings are scaled, positions are not (section 3.4)."""
    model, ids = make(hidden_size=hidden_size, positions=positions), tokens(TARGET_LENGTHS, 1)
    every = torch.arange(ids.shape[1]).expand_as(ids)
    for side in ("encoder", "decoder"):
        expected = embed(model, side, ids, torch.ones_like(ids))
        assert_close(getattr(model, f"{side}_embedding")(ids, every), expected, atol=1e-12, rtol=0)


def test_source_and_target_have_separate_learned_positions() -> None:
    """Source and target each learn max_seq_len rows; sinusoids have no parameters."""
    learned, fixed = make(positions="learned"), make()
    names = learned.state_dict().keys() - fixed.state_dict().keys()
    assert names == {"encoder_embedding.position.weight", "decoder_embedding.position.weight"}
    for name in names:
        assert learned.state_dict()[name].shape == (SIZES["max_seq_len"], SIZES["hidden_size"])


def test_only_pre_norm_has_final_norms() -> None:
    """Two more LayerNorms, each with weight and bias."""
    counts = [
        sum(parameter.numel() for parameter in make(norm_first=norm_first).parameters()) for norm_first in (False, True)
    ]
    assert counts[1] - counts[0] == 2 * 2 * SIZES["hidden_size"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_heads=5"], "hidden_size 64 is not divisible by num_heads 5"),
        (["hidden_size=33", "num_heads=3"], "sinusoidal positions need an even hidden_size, got 33"),
        (["decoder_start_token_id=260"], "decoder_start_token_id 260 lies outside vocab_size 260"),
        (["target_vocab_size=100"], "decoder_start_token_id 257 lies outside target_vocab_size 100"),
        (["num_decoder_heads=5"], "hidden_size 64 is not divisible by num_decoder_heads 5"),
        (["num_decoder_layers=0"], "num_decoder_layers must be positive, got 0"),
        (
            ["target_vocab_size=300", "share_embeddings=true"],
            "share_embeddings needs one vocabulary, got vocab_size 260 and target_vocab_size 300",
        ),
        (["position_offset=2"], "position_offset 2 is for learned positions, not sinusoidal"),
        (["position_offset=-1", "positions=learned"], "position_offset must not be negative, got -1"),
        (
            ["positions=rotary"],
            "positions must be one of 'learned', 'sinusoidal', 'sinusoidal-halves', 'sinus.*got 'rotary'",
        ),
        (["position_offset=2", "positions=sinusoidal-halves"], "position_offset 2 is for learned positions, not sinus"),
    ],
)
def test_invalid_configurations(overrides: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve("transformer-tiny", overrides)


def test_dropout_acts_in_training_only() -> None:
    """Two passes in training differ; two in evaluation do not."""
    model, (source, target) = make(dropout=0.5), pair()
    assert model(source, target).equal(model(source, target))
    model.train()
    assert not model(source, target).equal(model(source, target))
