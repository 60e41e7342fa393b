"""BERT variants: RoBERTa, DistilBERT, ALBERT, ELECTRA, MPNet, Nomic BERT and RoFormer. Checkpoint tests compare their
heads with transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.architectures.test_bert import LENGTHS, SIZES, batch, make
from zoo.nn import recorded_attentions, relative_buckets
from zoo_plugins.bert.config import BERTConfig

PAD = 2
ROBERTA = {"skip_padding": True, "pad_token_id": PAD, "type_vocab_size": 1}


def words() -> tuple[Tensor, Tensor]:
    """Draw token ids without padding tokens, and a mask of :data:`LENGTHS`."""
    ids, mask, _ = batch()
    return ids.masked_fill(ids == PAD, PAD + 1), mask


# RoBERTa: positions.


def test_positions_skip_padding() -> None:
    positions = make(skip_padding=True, pad_token_id=1).embeddings.positions(torch.tensor([[0, 5, 6, 2, 1, 1]]))
    assert positions.tolist() == [[2, 3, 4, 5, 1, 1]]


@given(ids=st.lists(st.integers(0, 6), min_size=1, max_size=12), pad=st.integers(0, 6))
def test_positions_count_tokens_only(ids: list[int], pad: int) -> None:
    """Padding may be anywhere, and the last position has a row."""
    embeddings = make(skip_padding=True, pad_token_id=pad, num_layers=1).embeddings
    (positions,) = embeddings.positions(torch.tensor([ids])).tolist()
    kept = [position for position, token in zip(positions, ids, strict=True) if token != pad]
    assert kept == list(range(pad + 1, pad + 1 + len(kept)))
    assert all(position == pad for position, token in zip(positions, ids, strict=True) if token == pad)
    assert embeddings.position.num_embeddings == SIZES["max_seq_len"] + pad + 1 > max(positions)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    """BERT's positions would shift with padding on the left."""
    model, (ids, mask) = make(**ROBERTA), words()
    for row, length in enumerate(LENGTHS):
        alone = model(ids[row : row + 1, :length])["last_hidden_state"][0]
        if side == "right":
            padded, kept = ids.masked_fill(mask == 0, PAD), slice(length)
            found = model(padded, mask)["last_hidden_state"][row, kept]
        else:
            rows = torch.full_like(ids, PAD)
            rows[row, ids.shape[1] - length :] = ids[row, :length]
            found = model(rows, (rows != PAD).long())["last_hidden_state"][row, ids.shape[1] - length :]
        assert_close(found, alone, atol=1e-11, rtol=0)


def test_roberta_without_padding_equals_bert_at_later_positions() -> None:
    ours, (ids, _) = make(**ROBERTA), words()
    bert = make(type_vocab_size=1)
    state = ours.state_dict()
    state["embeddings.position.weight"] = state["embeddings.position.weight"][PAD + 1 :]
    bert.load_state_dict(state)
    assert_close(ours(ids)["last_hidden_state"], bert(ids)["last_hidden_state"], atol=1e-12, rtol=0)


# DistilBERT: no segments, another pooler.


def test_no_segments_equal_one_zero_segment() -> None:
    ours, (ids, mask, _) = make(type_vocab_size=0, pooler=False), batch()
    bert = make(type_vocab_size=1, pooler=False)
    bert.load_state_dict({**ours.state_dict(), "embeddings.token_type.weight": torch.zeros(1, SIZES["hidden_size"])})
    assert "embeddings.token_type.weight" not in ours.state_dict()
    assert [tensor.name for tensor in ours.config.graphs()[0].inputs] == ["input_ids", "attention_mask"]
    assert_close(ours(ids, mask)["last_hidden_state"], bert(ids, mask)["last_hidden_state"], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("activation", "function"),
    [("tanh", torch.tanh), ("relu", lambda x: x.clamp(min=0)), ("gelu", lambda x: x * (1 + (x / 2**0.5).erf()) / 2)],
)
def test_pooler_is_a_dense_layer_on_the_first_token(activation: str, function: object) -> None:
    ours, arguments = make(pooler_activation=activation), batch()
    outputs = ours(*arguments)
    first = outputs["last_hidden_state"][:, 0]
    expected = function(first @ ours.pooler.weight.T + ours.pooler.bias)
    assert (expected < 0).any() == (activation != "relu")
    assert_close(outputs["pooler_output"], expected, atol=1e-12, rtol=0)


# ALBERT: shared layers and narrow embeddings.


def test_shared_block_equals_bert_with_equal_blocks() -> None:
    ours, arguments = make(share_layers=True, num_layers=4), batch()
    bert = make(num_layers=4)
    state = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith("blocks.")}
    assert len(ours.blocks) == 1
    for layer in range(4):
        state |= {f"blocks.{layer}.{name}": tensor for name, tensor in ours.blocks[0].state_dict().items()}
    bert.load_state_dict(state)
    for name, expected in bert(*arguments).items():
        assert_close(ours(*arguments)[name], expected, atol=1e-12, rtol=0)


def test_every_layer_of_a_shared_block_runs() -> None:
    ours, arguments = make(share_layers=True, num_layers=1), batch()
    deeper = make(share_layers=True, num_layers=3)
    deeper.load_state_dict(ours.state_dict())
    x = ours.embeddings(arguments[0], arguments[2])
    for _ in range(3):
        x = ours.blocks[0](x, arguments[1].bool()[:, None, None, :].expand(-1, -1, x.shape[1], -1))
    assert_close(deeper(*arguments)["last_hidden_state"], x, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_another_width(tied: bool) -> None:
    """A projection after the norm maps them to the encoder's width, and the language-model head maps back."""
    ours, (ids, mask, types) = make(task="fill-mask", embedding_size=7, tie_embeddings=tied), batch()
    e = ours.embeddings
    summed = e.token.weight[ids] + e.token_type.weight[types] + e.position.weight[: ids.shape[1]]
    centred = summed - summed.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + SIZES["norm_eps"]).sqrt()
    expected = (normal * e.norm.weight + e.norm.bias) @ e.projection.weight.T + e.projection.bias
    assert_close(e(ids, types), expected, atol=1e-12, rtol=0)
    assert ours.masked_lm.decoder.weight.shape == e.token.weight.shape == (SIZES["vocab_size"], 7)
    assert (ours.masked_lm.decoder.weight is e.token.weight) == tied
    assert ours(ids, mask, types)["logits"].shape == (*ids.shape, SIZES["vocab_size"])


def test_embeddings_of_the_same_width_can_be_projected() -> None:
    assert make().embeddings.projection is None
    assert make(project_embeddings=True).embeddings.projection.weight.shape == (24, 24)


def test_features_of_a_shared_block_are_the_states_after_each_run() -> None:
    """Each run of the shared block gives its own state; state 0 is the input of the first run."""
    ours, arguments = make(share_layers=True, embedding_size=7, num_layers=3, feature_layers=(0, 1, 2, 3)), batch()
    parts = ours(*arguments)["features"].split(SIZES["hidden_size"], dim=-1)
    assert_close(parts[0], ours.embeddings(arguments[0], arguments[2]), atol=0, rtol=0)
    for runs in (1, 2, 3):
        shallow = make(share_layers=True, embedding_size=7, num_layers=runs)
        shallow.load_state_dict(ours.state_dict())
        assert_close(parts[runs], shallow(*arguments)["last_hidden_state"], atol=0, rtol=0)


# ELECTRA: replaced-token detection.


def test_replaced_tokens() -> None:
    """One logit per token, from the hidden states only."""
    ours, arguments = make(task="replaced-token-detection", activation="relu", pooler=False), batch()
    hidden, head = ours.encode(*arguments)[-1], ours.replaced
    expected = (hidden @ head.dense.weight.T + head.dense.bias).clamp(min=0) @ head.output.weight[0] + head.output.bias
    assert_close(ours(*arguments)["logits"], expected, atol=1e-12, rtol=0)


# MPNet: biases by distance.


def test_biases_by_distance_are_added_to_the_scores() -> None:
    """The weights equal softmax(scores + bias), computed by hand."""
    ours, (ids, mask, types) = make(relative_buckets=6, num_layers=1, pooler=False), batch()
    with recorded_attentions() as weights:
        ours(ids, mask, types)
    attention, x = ours.blocks[0].attention, ours.embeddings(ids, types)
    query, key = ((x @ part.weight.T + part.bias).unflatten(-1, (3, 8)) for part in (attention.query, attention.key))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / 8**0.5
    places = torch.arange(ids.shape[1])
    for t in places.tolist():
        for s in places.tolist():
            bucket = relative_buckets(torch.tensor(s - t), 6, 128, causal=False)
            scores[:, :, t, s] += ours.relative.table.weight[bucket]
    expected = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf).softmax(-1)
    assert_close(weights[0], expected, atol=1e-12, rtol=0)


def test_a_bias_that_ignores_distance_changes_nothing() -> None:
    ours, arguments = make(relative_buckets=6), batch()
    ours.relative.table.weight.copy_(torch.tensor([0.5, -2.0, 3.0]).expand(6, -1))
    bert = make()
    bert.load_state_dict(
        {name: tensor for name, tensor in ours.state_dict().items() if name != "relative.table.weight"}
    )
    for name, expected in bert(*arguments).items():
        assert_close(ours(*arguments)[name], expected, atol=1e-12, rtol=0)


# Nomic BERT and RoFormer: rotary positions and gated feed-forward networks.


@pytest.mark.parametrize("table", [True, False])
def test_rotary_positions_depend_on_distances_only(table: bool) -> None:
    """Padding on the left shifts all positions of a text. Angles, or their sines, are rounded to float32."""
    ours, (ids, _, types) = make(positions="rotary", rope_table=table, pooler=False), batch()
    alone = ours(ids[:1, :5], None, types[:1, :5])["last_hidden_state"]
    shifted = torch.cat((torch.zeros_like(ids[:1, :4]), ids[:1, :5]), dim=1)
    segments = torch.cat((torch.zeros_like(ids[:1, :4]), types[:1, :5]), dim=1)
    mask = (torch.arange(9) >= 4).long()[None]
    assert_close(ours(shifted, mask, segments)["last_hidden_state"][:, 4:], alone, atol=1e-5, rtol=0)
    reversed_order = ours(ids[:1, :5].flip(1), None, types[:1, :5].flip(1))["last_hidden_state"].flip(1)
    assert (reversed_order - alone).abs().max() > 1e-3


def test_rotations_are_those_of_the_paper() -> None:
    """Su et al. 2021, equation 15, with angles in float64: pair i of 4 turns by position x 10000^(-2 i / 8)."""
    ours = make(positions="rotary", rope_table=True, num_layers=1)
    cosine, sine = ours.rotary(torch.arange(12)[None], torch.float64)
    angles = torch.arange(12, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert_close(cosine[0, 0], angles.cos().repeat(1, 2), atol=1e-7, rtol=0)
    assert_close(sine[0, 0], angles.sin().repeat(1, 2), atol=1e-7, rtol=0)
    assert "embeddings.position.weight" not in ours.state_dict()


def test_gated_feed_forward_network_without_biases() -> None:
    ours = make(gated=True, mlp_bias=False, attention_bias=False, activation="silu")
    x = torch.randn(2, 5, SIZES["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mlp = ours.blocks[0].mlp
    gate = x @ mlp.gate.weight.T
    expected = (gate * gate.sigmoid() * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    assert_close(mlp(x), expected, atol=1e-12, rtol=0)
    biases = {name for name, _ in ours.blocks[0].named_parameters() if name.endswith("bias")}
    assert biases == {"norm_1.bias", "norm_2.bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "rotary", "skip_padding": True, "pad_token_id": 1}, "skip_padding is for learned positions"),
        ({"positions": "rotary", "num_heads": 8}, "heads of even width, got hidden_size 24 and num_heads 8"),
        ({"rope_table": True}, "rope_table is for rotary positions .* positions is 'learned'"),
        ({"positions": "rotary", "rope_table": True, "rope_theta": 50.0}, "rope_theta is 50.0"),
        ({"relative_buckets": 3}, "relative_buckets must be 0, or from 4 to 511, got 3"),
        ({"attention": "performer", "relative_buckets": 8}, "attention 'performer' needs relative_buckets 0, got 8"),
        ({"attention": "linformer", "positions": "rotary"}, "attention 'linformer' needs positions 'learned'"),
        ({"attention": "longformer", "attention_bias": False}, "attention 'longformer' needs attention_bias True"),
    ],
)
def test_contradictory_settings_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BERTConfig(**{**SIZES, **options})
