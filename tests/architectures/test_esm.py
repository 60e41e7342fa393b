"""ESM's laws. Tests of checkpoints compare every class and random configurations with transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_plugins.esm.config import ESMConfig
from zoo_plugins.esm.model import ESM

SIZES = {"vocab_size": 41, "max_seq_len": 16, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "pad_token_id": 1}
MASKED = 9
VARIANTS = {
    "rotary": {"dropped_token_id": MASKED},
    "learned": {"positions": "learned", "embedding_norm": True},
}


def make(**options: object) -> ESM:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = ESM(ESMConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def texts() -> tuple[Tensor, Tensor]:
    """Draw rows of eight, five and one tokens, with a masked token in the first two."""
    ids = torch.randint(10, 41, (3, 8), generator=torch.Generator().manual_seed(2))
    ids[:2, 3] = MASKED
    mask = (torch.arange(8) < torch.tensor([[8], [5], [1]])).long()
    return ids.masked_fill(mask == 0, 1), mask


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_changes_nothing(variant: str) -> None:
    model, (ids, mask) = make(**VARIANTS[variant]), texts()
    states = model(ids, mask)["last_hidden_state"]
    for row, length in enumerate((8, 5, 1)):
        alone = model(ids[row : row + 1, :length])["last_hidden_state"][0]
        assert_close(states[row, :length], alone, atol=1e-11, rtol=0)


def test_embeddings_are_scaled_by_the_share_of_dropped_tokens() -> None:
    """One of eight and one of five tokens is dropped; in training, 12 % were. Shares are float32."""
    model, (ids, mask) = make(dropped_token_id=MASKED), texts()
    found, table = model.embeddings(ids, mask), model.embeddings.token.weight
    for row, (length, share) in enumerate(((8, 1 / 8), (5, 1 / 5), (1, 0.0))):
        expected = table[ids[row]] * (1 - 0.12) / (1 - share)
        expected[(ids[row] == MASKED) | (mask[row] == 0)] = 0
        assert_close(found[row, :length], expected[:length], atol=1e-6, rtol=0)
        assert not found[row, length:].any()


def test_text_of_dropped_tokens_alone_is_finite() -> None:
    model = make(task="fill-mask", dropped_token_id=MASKED)
    assert model(torch.full((1, 4), MASKED))["logits"].isfinite().all()


def test_rotary_positions_depend_on_distances_only() -> None:
    """Padding on the left shifts all positions of a text. Angles are float32."""
    model, (ids, _) = make(), texts()
    shifted = torch.cat((torch.ones_like(ids[:1, :4]), ids[:1]), dim=1)
    mask = (torch.arange(12) >= 4).long()[None]
    alone = model(ids[:1])["last_hidden_state"]
    assert_close(model(shifted, mask)["last_hidden_state"][:, 4:], alone, atol=1e-4, rtol=0)
    assert (model(ids[:1].flip(1))["last_hidden_state"].flip(1) - alone).abs().max() > 1e-2


def test_learned_positions_skip_padding() -> None:
    """The n-th token uses row pad_token_id + n."""
    model = make(positions="learned")
    embeddings, ids = model.embeddings, torch.tensor([[11, 1, 12, 13]])
    assert embeddings.position.num_embeddings == 16 + 2
    expected = embeddings.token.weight[ids] + embeddings.position.weight[torch.tensor([[2, 1, 3, 4]])]
    assert_close(embeddings(ids, None), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 8}, "must be even for rotary positions, got 3"),
        ({"positions": "learned", "pad_token_id": None}, "need a pad_token_id, got None"),
        ({"pad_token_id": 41}, "pad_token_id 41 lies outside vocab_size 41"),
        ({"dropped_token_id": 41}, "dropped_token_id 41 lies outside vocab_size 41"),
        ({"positions": "learned", "rope_float16": True}, "rope_float16 is for rotary positions"),
        ({"task": "text-classification", "pooler": False}, "reads the pooler, but pooler is False"),
    ],
)
def test_contradictory_settings_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ESMConfig(**{**SIZES, **options})


def test_pooler_follows_the_task() -> None:
    """Like the original classes."""
    base = ESMConfig(**SIZES)
    classifier = base.with_task("text-classification")
    assert (base.pooler, classifier.pooler) == (False, True)
    assert not classifier.with_task("fill-mask").pooler
    assert ESMConfig(**SIZES, pooler=True).with_task("sentence-embedding").pooler
