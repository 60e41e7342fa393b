"""T5 against transformers with the same weights, and invariances of an encoder-decoder."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel, T5EncoderModel, T5ForConditionalGeneration
from transformers import T5Config as OriginalConfig

from zoo.checkpoints.exact import Exact
from zoo.errors import UsageError
from zoo.nn import Cache
from zoo.registry import registry
from zoo_plugins.t5.config import T5Config
from zoo_plugins.t5.model import T5

SIZES = {
    "vocab_size": 53,
    "max_seq_len": 16,
    "hidden_size": 20,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "head_dim": 7,
    "intermediate_size": 28,
    "relative_buckets": 6,
    "relative_max_distance": 5,
    "norm_eps": 1e-3,
    "dropout": 0.0,
}
# Names of the activations in transformers.
ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu_new", "gelu": "gelu", "silu": "silu"}
SOURCE_LENGTHS, TARGET_LENGTHS = [12, 4, 1], [11, 6, 2]


def make(**options: object) -> T5:
    """Build a small float64 model in evaluation mode with random weights and norms."""
    model = T5(T5Config(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def transformers_twin(ours: T5) -> PreTrainedModel:
    """Build transformers' T5 with our weights."""
    c = ours.config
    config = OriginalConfig(
        vocab_size=c.vocab_size,
        d_model=c.hidden_size,
        d_kv=c.head_dim,
        d_ff=c.intermediate_size,
        num_layers=c.num_layers,
        num_decoder_layers=c.num_decoder_layers,
        num_heads=c.num_heads,
        relative_attention_num_buckets=c.relative_buckets,
        relative_attention_max_distance=c.relative_max_distance,
        dropout_rate=0.0,
        layer_norm_epsilon=c.norm_eps,
        feed_forward_proj=("gated-" if c.gated else "") + ACTIVATIONS[c.activation],
        dense_act_fn=ACTIVATIONS[c.activation],  # otherwise gated-gelu means gelu_new
        tie_word_embeddings=c.tie_embeddings,
        attn_implementation="eager",
    )
    theirs = (T5ForConditionalGeneration if c.has_decoder else T5EncoderModel)(config)
    weights = {"shared.weight": ours.token_embedding.weight, "encoder.embed_tokens.weight": ours.token_embedding.weight}

    def attention(name: str, module: nn.Module) -> None:
        for its, mine in zip("qkvo", ("query", "key", "value", "output"), strict=True):
            weights[f"{name}.{its}.weight"] = module.get_submodule(mine).weight

    def feed_forward(name: str, module: nn.Module) -> None:
        weights[f"{name}.wo.weight"] = module.down.weight
        weights[f"{name}.{'wi_1' if c.gated else 'wi'}.weight"] = module.up.weight
        if c.gated:
            weights[f"{name}.wi_0.weight"] = module.gate.weight

    for stack in ("encoder", "decoder") if c.has_decoder else ("encoder",):
        weights[f"{stack}.final_layer_norm.weight"] = ours.get_submodule(f"{stack}_norm").weight
        table = ours.get_submodule(f"{stack}_positions").table.weight
        weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = table
        for number, block in enumerate(ours.get_submodule(stack)):
            name, last = f"{stack}.block.{number}.layer", 2 if stack == "decoder" else 1
            attention(f"{name}.0.SelfAttention", block.attention)
            feed_forward(f"{name}.{last}.DenseReluDense", block.mlp)
            for place in range(last + 1):
                weights[f"{name}.{place}.layer_norm.weight"] = block.get_submodule(f"norm_{place + 1}").weight
            if stack == "decoder":
                attention(f"{name}.1.EncDecAttention", block.cross)
    if c.has_decoder:
        weights["decoder.embed_tokens.weight"] = ours.token_embedding.weight
        weights["lm_head.weight"] = ours.head.weight
        if not c.tie_embeddings:
            theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.clone())  # it always ties them
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    return theirs


def original_logits(ours: T5, source: Tensor, target: Tensor, *masks: Tensor) -> Tensor:
    """Return transformers' logits, without the float32 of its norms and softmax."""
    theirs = transformers_twin(ours)
    named = dict(zip(("attention_mask", "decoder_attention_mask"), masks, strict=False))
    with Exact(theirs):
        return theirs(input_ids=source, decoder_input_ids=target, **named).logits


def padding_of(lengths: Sequence[int], side: str = "right") -> Tensor:
    """Build a padding mask with a row of each length."""
    rows = [[1] * length + [0] * (max(lengths) - length) for length in lengths]
    return torch.tensor([row[::-1] if side == "left" else row for row in rows])


def pair() -> tuple[Tensor, Tensor]:
    """Draw a batch of random sources and targets."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(0, SIZES["vocab_size"], (len(lengths), max(lengths)), generator=generator)
        for lengths in (SOURCE_LENGTHS, TARGET_LENGTHS)
    )
    return source, target


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_equals_transformers(activation: str, gated: bool, tie_embeddings: bool) -> None:
    """For both versions and combinations of their features; texts exceed the maximum distance of the buckets."""
    ours, (source, target) = make(activation=activation, gated=gated, tie_embeddings=tie_embeddings), pair()
    assert ours.config.scale_head == tie_embeddings
    assert_close(ours(source, target), original_logits(ours, source, target), atol=1e-10, rtol=0)


@pytest.mark.parametrize("sides", [("left", "left"), ("right", "left"), ("right", "right")])
def test_equals_transformers_with_padding(sides: tuple[str, str]) -> None:
    """At tokens; outputs at padding are undefined."""
    ours, (source, target) = make(), pair()
    masks = (padding_of(SOURCE_LENGTHS, sides[0]), padding_of(TARGET_LENGTHS, sides[1]))
    expected, kept = original_logits(ours, source, target, *masks), masks[1].bool()
    assert_close(ours(source, target, *masks)[kept], expected[kept], atol=1e-10, rtol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_encoder_only_equals_transformers(gated: bool) -> None:
    """The encoder has no decoder weights, and gives the same hidden states as the encoder of the whole model."""
    ours, (source, _) = make(task="feature-extraction", gated=gated), pair()
    assert not any(name.startswith(("decoder", "head")) for name in ours.state_dict())
    mask = padding_of(SOURCE_LENGTHS)
    theirs = transformers_twin(ours)
    with Exact(theirs):
        expected = theirs(input_ids=source, attention_mask=mask).last_hidden_state
    assert_close(ours(source, attention_mask=mask)[mask.bool()], expected[mask.bool()], atol=1e-10, rtol=0)
    whole = make(gated=gated)
    whole.load_state_dict(ours.state_dict(), strict=False)
    assert whole(source, attention_mask=mask).equal(ours(source, attention_mask=mask))


@pytest.mark.parametrize("scale_head", [True, False])
def test_head_scaling_follows_the_configuration(scale_head: bool) -> None:
    """By default only a tied head scales its input; either can be set."""
    logits = [make(tie_embeddings=tie, scale_head=scale_head)(*pair()) for tie in (True, False)]
    others = [make(tie_embeddings=tie, scale_head=not scale_head)(*pair()) for tie in (True, False)]
    factor = math.sqrt(SIZES["hidden_size"]) ** (1 if scale_head else -1)
    for mine, other in zip(logits, others, strict=True):
        assert_close(mine * factor, other, atol=1e-11, rtol=0)


@pytest.mark.parametrize("sides", [("left", "right"), ("right", "left")])
def test_padding_changes_nothing(sides: tuple[str, str]) -> None:
    """A source-target pair has the same logits alone and padded in a batch, with any padding token."""
    model, (source, target) = make(), pair()
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


def test_later_target_tokens_do_not_change_earlier_outputs() -> None:
    """Output t depends on tokens up to t, and on all of them: the bias hides none."""
    model, (source, target) = make(), pair()
    before = model(source, target)
    for t in range(target.shape[1] - 1):
        changed = target.clone()
        changed[:, t + 1 :] = (target[:, t + 1 :] + 1) % SIZES["vocab_size"]
        after = model(source, changed)
        assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-12, rtol=0)
        assert (after[:, t + 1 :] - before[:, t + 1 :]).abs().amax(-1).min() > 1e-4


def test_order_matters_only_through_the_bias() -> None:
    """There are no other positions: with a constant bias the encoder is permutation-equivariant."""
    model, (source, _) = make(), pair()
    order = torch.randperm(source.shape[1], generator=torch.Generator().manual_seed(2))
    assert (model(source[:, order]) - model(source)[:, order]).abs().max() > 1e-2
    model.encoder_positions.table.weight.fill_(0.7)
    assert_close(model(source[:, order]), model(source)[:, order], atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=25)
@given(splits=st.sets(st.integers(1, 10)), side=st.sampled_from(["left", "right", None]))
def test_cached_decoding_equals_forward(splits: set[int], side: str | None) -> None:
    """One encoding, then the target in calls cut anywhere, equals a single call."""
    model, (source, target) = make(), pair()
    masks = (padding_of(SOURCE_LENGTHS, side), padding_of(TARGET_LENGTHS, side)) if side else (None, None)
    cross = model.encode(source, masks[0])["cross_key_values"]
    past, outputs = Cache.empty(SIZES["num_decoder_layers"]), []
    for start, stop in pairwise([0, *sorted(splits), target.shape[1]]):
        seen = None if masks[1] is None else masks[1][:, :stop]
        outputs.append(model.decode(target[:, start:stop], cross, seen, masks[0], past))
    assert_close(torch.cat(outputs, dim=1), model(source, target, *masks), atol=1e-11, rtol=0)


def test_float16_stays_finite() -> None:
    """Residuals beyond the range of float16 are clamped, and the norms rescale them."""
    model, (source, target) = make(), pair()
    for block in (*model.encoder, *model.decoder):
        block.mlp.up.weight.mul_(100)
        block.mlp.down.weight.mul_(1000)
    x = model.encoder[0](model.token_embedding(source), model.encoder_positions(12, 12), None)
    assert x.abs().max() > 2 * torch.finfo(torch.float16).max
    logits = model.half()(source, target)
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_initial_weights_have_the_spread_of_the_paper() -> None:
    """Each matrix has the standard deviation of transformers' initialisation, and logits are of order one."""
    sizes = {**SIZES, "hidden_size": 96, "head_dim": 16, "num_heads": 6, "intermediate_size": 160}
    sizes |= {"relative_buckets": 32, "relative_max_distance": 64}
    torch.manual_seed(0)
    ours = T5(T5Config(**sizes))
    drawn, names = transformers_twin(ours), transformers_twin(ours).state_dict()
    drawn.apply(drawn._init_weights)
    for name, weight in drawn.state_dict().items():
        if weight.numel() > 100 and "norm" not in name:
            assert names[name].std() == pytest.approx(weight.std(), rel=0.25), name
    for options in ({"tie_embeddings": True}, {"tie_embeddings": False}):
        fresh = T5(T5Config(**{**sizes, **options})).eval()
        assert 0.3 < fresh(*pair()).std() < 3


def test_tying() -> None:
    """Source embedding, target embedding and head share one matrix, or the head has its own."""
    tied, untied = make(), make(tie_embeddings=False)
    assert tied.head.weight is tied.token_embedding.weight
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert counts[1] - counts[0] == SIZES["vocab_size"] * SIZES["hidden_size"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decoder_start_token_id=260"], "decoder_start_token_id 260 lies outside vocab_size 260"),
        (["head_dim=0"], "head_dim must be positive, got 0"),
        (["relative_buckets=3"], "relative_buckets 3 must be 4 or more"),
        (["relative_max_distance=8"], "relative_max_distance 8 more than half of them"),
        (["activation=tanh"], "one of 'gelu', 'gelu_tanh', 'gelu_sigmoid', 'relu', 'relu_squared', 'silu', got 'tanh'"),
    ],
)
def test_invalid_configurations(overrides: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve("t5-tiny", overrides)


def test_dropout_acts_in_training_only() -> None:
    """Two passes in training differ; two in evaluation do not."""
    model, (source, target) = make(dropout=0.5), pair()
    assert model(source, target).equal(model(source, target))
    model.train()
    assert not model(source, target).equal(model(source, target))
